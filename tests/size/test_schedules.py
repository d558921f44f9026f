"""Schedules: every formula by hand, units, edges of the counts, and settings that are refused."""

import math

import numpy as np
import pytest

from batchwright import size
from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size.controller import BatchSizeController
from batchwright.size.observation import Observation
from batchwright.size.policy import Policy
from batchwright.size.schedules import (
    constant,
    cyclic,
    exponential,
    from_lr,
    linear,
    milestones,
    seesaw,
    warm_up,
)


def sizes_at(policy, counts, per="epoch"):
    return [policy.update(policy.init(), Observation(**{per: count}))[0] for count in counts]


def words_at(policy, **figures):
    return policy.explain(policy.init(), Observation(**figures))


def test_constant_asks_for_its_size_from_the_start():
    assert constant(64).start() == 64
    assert constant(64).update(None, Observation()) == (64, None)
    assert words_at(constant(64)) == "constant: 64"


def test_linear_adds_the_slope_once_an_epoch():
    policy = linear(32, 8)
    assert policy.start() == 32
    assert sizes_at(policy, [0, 1, 3]) == [32, 40, 56]
    assert words_at(policy, epoch=3) == "linear: 32 + 8 × 3 = 56 at epoch 3"  # noqa: RUF001


def test_a_negative_slope_shrinks_and_the_controller_holds_the_floor():
    controller = BatchSizeController(linear(32, -8), min_size=4, max_size=64)
    assert [controller.observe(epoch=epoch) for epoch in (1, 3, 4, 5)] == [24, 8, 4, 4]


def test_linear_rounds_the_closed_form_and_not_step_by_step():
    controller = BatchSizeController(linear(10, 0.4), min_size=1, max_size=100)
    # 10.4, 10.8, 11.2, 11.6, 12.0; adding 0.4 to a rounded size would stay at 10 for ever.
    assert [controller.observe(epoch=epoch) for epoch in range(1, 6)] == [10, 11, 11, 12, 12]


def test_half_a_unit_is_rounded_to_even():
    controller = BatchSizeController(linear(1, 0.5), min_size=1, max_size=100)
    # 1.5, 2.0, 2.5, 3.0, 3.5
    assert [controller.observe(epoch=epoch) for epoch in range(1, 6)] == [2, 2, 2, 3, 4]


def test_exponential_multiplies_once_an_epoch():
    policy = exponential(32, 1.5)
    assert policy.start() == 32
    assert sizes_at(policy, [1, 2, 4]) == [48, 72, 162]  # 32 × 1.5⁴ = 32 × 5.0625
    assert words_at(policy, epoch=2) == "exponential: 32 × 1.5^2 = 72 at epoch 2"  # noqa: RUF001


def test_an_exponential_never_overflows():
    [huge] = sizes_at(exponential(1, 10.0), [10**6])
    assert math.isfinite(huge)
    assert huge > 1e299
    assert sizes_at(exponential(4096, 0.5), [10**6]) == [0]
    controller = BatchSizeController(exponential(1, 10.0), min_size=1, max_size=4096)
    assert controller.observe(epoch=10**6) == 4096


@pytest.mark.parametrize("count", [10**18, 10**400])
def test_absurd_counts_stay_finite(count):
    for policy in (linear(32, 1e200), exponential(32, 1.0001), exponential(1e200, 1e200), warm_up(1, 9, over=3)):
        assert all(map(math.isfinite, sizes_at(policy, [count])))


def test_steps_and_blocks_of_steps_are_counted():
    assert sizes_at(linear(32, 8, per="step"), [0, 1, 2], per="step") == [32, 40, 48]
    assert sizes_at(linear(32, 8, per="step", every=10), [9, 10, 29], per="step") == [32, 40, 48]


def test_examples_are_counted_in_blocks():
    policy = exponential(32, 2, per="examples", every=50_000)
    assert sizes_at(policy, [49_999, 50_000, 149_999], per="examples") == [32, 64, 128]
    assert words_at(policy, examples=60_000).endswith("32 × 2^1 = 64 after 60000 examples")  # noqa: RUF001


@pytest.mark.parametrize("make", [linear, exponential])
def test_growing_with_every_single_example_is_refused(make):
    with pytest.raises(ArgumentError, match="per examples needs every"):
        make(32, 2, per="examples")


def test_a_missing_count_is_named_with_the_way_to_it():
    with pytest.raises(MissingSignalError, match=r"linear needs epoch.*observe\(epoch=1"):
        linear(32, 8).update(None, Observation(step=3))


def test_cyclic_restarts_the_inner_schedule():
    policy = cyclic(exponential(16, 2), 3)
    assert policy.start() == 16
    assert sizes_at(policy, range(7)) == [16, 32, 64, 16, 32, 64, 16]
    assert words_at(policy, epoch=7) == "cycle 2 at epoch 7; exponential: 16 × 2^1 = 32 at epoch 1"  # noqa: RUF001


def test_cyclic_counts_blocks_and_the_inner_schedule_still_sees_units():
    policy = cyclic(linear(32, 8, per="step", every=5), 2, per="step", every=10)
    # A cycle is 2 × 10 steps; inside it the inner index is (step mod 20) // 5.
    assert sizes_at(policy, [0, 5, 19, 20, 26], per="step") == [32, 40, 56, 32, 40]


def test_a_cycle_that_would_never_restart_is_refused():
    with pytest.raises(ArgumentError, match="would never restart linear"):
        cyclic(linear(32, 8, per="step"), 4)


def test_milestones_hold_from_their_count_on():
    policy = milestones({50_000: 256, 0: 64}, per="examples")
    assert policy.start() == 64
    assert sizes_at(policy, [0, 49_999, 50_000, 10**9], per="examples") == [64, 64, 256, 256]
    assert words_at(policy, examples=60_000) == "milestones: 256 from milestone 50000, after 60000 examples"


def test_a_milestone_may_count_blocks():
    assert sizes_at(milestones({0: 8, 2: 16}, every=5), [9, 10]) == [8, 16]


def test_milestones_are_copied_from_the_dictionary():
    sizes = {0: 64, 1: 128}
    policy = milestones(sizes)
    sizes[1] = 1
    assert sizes_at(policy, [1]) == [128]


def test_a_linear_warm_up_reaches_its_end_and_stays():
    policy = warm_up(64, 1024, over=4)
    assert policy.start() == 64
    assert sizes_at(policy, [0, 1, 2, 3, 4, 99]) == [64, 304, 544, 784, 1024, 1024]  # steps of 960 / 4
    assert words_at(policy, epoch=1) == "warm_up: 1/4 from 64 to 1024 = 304 at epoch 1"


def test_a_geometric_warm_up_multiplies_by_the_same_each_time():
    policy = warm_up(64, 1024, over=4000, mode="geometric", per="examples", every=10)
    # 16 = 2⁴: doubled every 1000 indices of 10 examples.
    assert sizes_at(policy, [0, 10_000, 20_009, 40_000], per="examples") == [64, 128, 256, 1024]


def halving(epoch):
    return 0.5 ** (epoch // 10)


def test_from_lr_grows_where_the_rate_would_fall():
    policy = from_lr(halving, start=64)
    assert policy.start() == 64
    assert sizes_at(policy, [0, 9, 10, 25]) == [64, 64, 128, 256]
    assert words_at(policy, epoch=10) == "from_lr: 64 × 0.5^-1 = 128 at epoch 10"  # noqa: RUF001
    # Twice the power, the square of the growth.
    assert sizes_at(from_lr(halving, start=64, power=2), [10, 20]) == [256, 1024]


def test_from_lr_takes_a_rate_in_any_unit():
    assert sizes_at(from_lr(lambda epoch: 0.1 * halving(epoch), start=64), [0, 10]) == [64, 128]


def test_from_lr_begins_with_the_size_in_force_and_remembers_it():
    controller = BatchSizeController(from_lr(halving), min_size=1, max_size=4096, initial=48)
    assert [controller.observe(epoch=epoch) for epoch in (1, 10, 20, 1)] == [48, 96, 192, 48]
    assert controller.state_dict()["policy_state"] == 48


def test_a_rate_of_zero_asks_for_the_largest_size():
    controller = BatchSizeController(from_lr(lambda i: 1 - i / 10, start=64), min_size=1, max_size=4096)
    assert controller.observe(epoch=5) == 128
    assert controller.observe(epoch=10) == 4096


def test_a_rate_that_is_no_number_holds_the_size():
    policy = from_lr(lambda i: math.nan if i == 2 else 1 / (i + 1), start=64)
    controller = BatchSizeController(policy, min_size=1, max_size=4096)
    assert [controller.observe(epoch=epoch) for epoch in (1, 2, 3)] == [128, 128, 256]


def warm_then_fall(step):
    return step / 10 if step < 10 else 0.25 ** (step // 10 - 1)


def test_from_lr_leaves_the_size_alone_during_a_warm_up_of_the_rate():
    policy = from_lr(warm_then_fall, start=64, per="step", after=10)
    assert sizes_at(policy, [0, 5, 10, 19, 20], per="step") == [64, 64, 64, 64, 256]
    with pytest.raises(ArgumentError, match="warm-up give after"):
        from_lr(warm_then_fall, start=64, per="step")


def test_seesaw_shares_the_decay_between_rate_and_size():
    policy, lr_factor = seesaw(lambda epoch: 0.25**epoch, start=64)
    assert sizes_at(policy, [0, 1, 2]) == [64, 256, 1024]
    assert [lr_factor(epoch) for epoch in (0, 1, 2)] == [1, 0.5, 0.25]


def test_seesaw_hands_the_decay_back_to_the_rate_where_the_batch_stops_growing():
    policy, lr_factor = seesaw(lambda epoch: 0.25**epoch, start=64, max_factor=4)
    assert sizes_at(policy, [1, 2, 3]) == [256, 256, 256]
    # 0.25ⁱ × sqrt(4): from epoch 1 on the rate falls by the whole factor of 4.
    assert [lr_factor(epoch) for epoch in (1, 2, 3)] == [0.5, 0.125, 0.03125]


def test_seesaw_follows_the_schedule_through_its_warm_up():
    policy, lr_factor = seesaw(warm_then_fall, start=64, per="step", after=10)
    assert [lr_factor(step) for step in (0, 5, 10, 20)] == [0, 0.5, 1, 0.5]
    assert sizes_at(policy, [5, 20], per="step") == [64, 256]
    # A schedule that peaks at 0.8 keeps its peak.
    low = seesaw(lambda step: 0.8 * warm_then_fall(step), start=64, per="step", after=10)[1]
    assert [low(step) for step in (5, 10, 20)] == [0.4, 0.8, 0.4]


def test_seesaw_ends_at_rate_zero_where_the_schedule_does():
    _, lr_factor = seesaw(lambda epoch: 1 - epoch / 4, start=64)
    assert lr_factor(4) == 0


def test_the_factor_of_seesaw_fits_a_scheduler_of_torch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, seesaw(lambda epoch: 0.25**epoch)[1])
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.1]
    assert scheduler.state_dict()["lr_lambdas"] == [None]  # a function is left out of the state, so it stays plain


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: constant(0), "size must be a number of 1 or more, got 0"),
        (lambda: constant(True), "size must be a number"),
        (lambda: linear(0, 1), "start must be a number of 1 or more, got 0"),
        (lambda: linear(32, math.nan), "slope must be a number, got nan"),
        (lambda: linear(32, "8"), "slope must be a number, got '8'"),
        (lambda: linear(32, 8, every=0), "every must be a whole number of 1 or more, got 0"),
        (lambda: linear(32, 8, per="week"), "per must be one of 'epoch', 'step', 'examples', 'tokens', got 'week'"),
        (lambda: exponential(32, 0), "factor must be a number above 0, got 0"),
        (lambda: exponential(32, -2), "factor must be a number above 0, got -2"),
        (lambda: exponential(math.inf, 2), "start must be a number of 1 or more, got inf"),
        (lambda: cyclic(linear(32, 8), 0), "period must be a whole number of 1 or more, got 0"),
        (lambda: cyclic(linear(32, 8), 2.5), "period must be a whole number of 1 or more, got 2.5"),
        (lambda: cyclic(64, 4), "cyclic repeats a policy, got 64"),
        (lambda: milestones({}), "milestones needs a mapping from counts"),
        (lambda: milestones([64, 128]), "milestones needs a mapping from counts"),
        (lambda: milestones({5: 64}), "must say what holds at 0"),
        (lambda: milestones({0: 64, -5: 8}), "a key of milestones must be a whole number of 0 or more, got -5"),
        (lambda: milestones({0: 64, 5: 0}), "the size at 5 must be a number of 1 or more, got 0"),
        (lambda: warm_up(64, 1024, over=0), "over must be a whole number of 1 or more, got 0"),
        (lambda: warm_up(64, 1024, over=4, mode="cubic"), "mode must be one of 'linear', 'geometric', got 'cubic'"),
        (lambda: from_lr(0.1), "from_lr needs a function"),
        (lambda: from_lr(halving, start=0), "start must be a number of 1 or more"),
        (lambda: from_lr(halving, power=0), "power must be a number above 0"),
        (lambda: from_lr(halving, after=-1), "after must be a whole number of 0 or more, got -1"),
        (lambda: seesaw(halving, max_factor=0.5), "max_factor must be a number of 1 or more"),
        (lambda: seesaw(lambda i: 0.0), "above 0 where it begins to fall, got 0.0 at 0"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(make, words):
    with pytest.raises(ArgumentError) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (constant(64), "constant(64)"),
        (linear(32, 2.5), "linear(32, 2.5)"),
        (linear(32, 8, per="examples", every=1000), "linear(32, 8, per='examples', every=1000)"),
        (linear(1, 0, per="examples", every=1), "linear(1, 0, per='examples', every=1)"),
        (exponential(1, 2, per="examples", every=1), "exponential(1, 2, per='examples', every=1)"),
        (linear(1, 8, every=10**16), "linear(1, 8, every=10000000000000000)"),
        (linear(1, 8, per=np.str_("step")), "linear(1, 8, per='step')"),
        (cyclic(exponential(16, 2), 4), "cyclic(exponential(16, 2), 4)"),
        (milestones({0: 64, 5: 128}, per="step"), "milestones({0: 64, 5: 128}, per='step')"),
        (from_lr(halving, start=64), "from_lr(halving, start=64)"),
        (warm_up(64, 1024, 10, mode="geometric"), "warm_up(64, 1024, 10, mode='geometric')"),
    ],
)
def test_a_policy_is_written_as_the_call_that_makes_it(policy, text):
    assert repr(policy) == text
    assert isinstance(policy, Policy)


def test_settings_are_frozen_and_comparable():
    assert linear(32, 8) == linear(32.0, 8)
    assert linear(32, 8) != linear(32, 9)
    with pytest.raises(AttributeError):
        linear(32, 8).slope = 9


@pytest.mark.parametrize(
    "text",
    [
        "linear(1, 0, per='examples', every=1)",
        "exponential(1, 2, per='examples', every=1)",
        "loss_driven(per='examples', every=1)",
        "milestones({0: 1}, per='examples')",
    ],
)
def test_blocks_of_one_example_are_shown_where_a_call_must_name_them(text):
    assert repr(eval(text, vars(size))) == text
