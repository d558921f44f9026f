"""Combinations: each transform by hand, its memory, the order of a chain, and settings that are refused."""

import json
import math

import pytest

from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size.combine import (
    chain,
    clamp,
    cooldown,
    hysteresis,
    maximum,
    minimum,
    monotone,
    multiple_of,
    rate_limit,
    smooth,
    switch,
)
from batchwright.size.controller import BatchSizeController
from batchwright.size.observation import Observation
from batchwright.size.policy import Policy, Transform
from batchwright.size.schedules import constant, cyclic, exponential, from_lr, linear, milestones
from batchwright.size.signals import goodput, loss_driven, memory_driven, speed_driven, step_time


class Wish(Policy):
    """Asks for what the loss says, and counts how often it was asked."""

    def init(self):
        return 0

    def update(self, state, observation):
        return observation.loss, state + 1


class Measured(Transform):
    """Needs a figure that is not there before training."""

    def init(self):
        return None

    def update(self, state, observation, size):
        return size * observation.need("lr"), state


def control(*transforms, initial=64, policy=None):
    return BatchSizeController(chain(policy or Wish(), *transforms), min_size=1, max_size=100_000, initial=initial)


def follow(controller, wishes, **figures):
    return [controller.observe(loss=wish, **figures) for wish in wishes]


def change(transform, size, **figures):
    return transform.update(transform.init(), Observation(**figures), float(size))[0]


def test_clamp_keeps_both_bounds():
    assert [change(clamp(32, 4096), size) for size in (-5, 31.9, 100, 1e300)] == [32, 32, 100, 4096]


def test_multiple_of_takes_the_nearest_and_at_least_one():
    # 44 and 52 lie halfway and go to the even multiple: 5.5 → 6 and 6.5 → 6.
    assert [change(multiple_of(8), size) for size in (0, 3, 43, 44, 52, 1000)] == [8, 8, 40, 48, 48, 1000]


def test_bounds_win_over_multiples():
    policy = chain(constant(10), multiple_of(8), clamp(30, 100))
    assert policy.start() == 30
    controller = BatchSizeController(chain(constant(64), multiple_of(48)), min_size=1, max_size=40)
    assert controller.size == 40


def test_smooth_averages_the_logarithm():
    controller = control(smooth(0.5))
    # The first wish is taken as it is; then sqrt(64 × 1024) = 256, sqrt(256 × 1) = 16.
    assert follow(controller, [64, 1024, 1]) == [64, 256, 16]


def test_smooth_of_nothing_kept_follows_at_once():
    assert follow(control(smooth(0)), [64, 1024, 3]) == [64, 1024, 3]


def test_smooth_counts_sizes_below_one_as_one():
    assert follow(control(smooth(0.5)), [256, -1e300, 0]) == [256, 16, 4]


def test_rate_limit_allows_a_factor_either_way():
    assert follow(control(rate_limit(2)), [1000, 1000, 1000, 3]) == [128, 256, 512, 256]


def test_a_small_factor_at_a_small_size_is_not_rounded_away():
    # 1 × 1.2 would be rounded back to 1 for ever: one example is always allowed.
    assert follow(control(rate_limit(1.2), initial=1), [9, 9, 9]) == [2, 3, 4]
    assert follow(control(rate_limit(1.2), initial=3), [1, 1]) == [2, 1]


def test_hysteresis_holds_within_its_band():
    # 64 / 1.25 = 51.2 and 64 × 1.25 = 80.
    assert follow(control(hysteresis(0.25)), [80, 51.2, 64]) == [64, 64, 64]
    assert follow(control(hysteresis(0.25)), [81]) == [81]
    assert follow(control(hysteresis(0.25)), [51]) == [51]


def test_hysteresis_follows_from_the_new_size_on():
    assert follow(control(hysteresis(0.25)), [100, 90, 79]) == [100, 100, 79]


def test_cooldown_holds_for_its_steps_after_a_change():
    controller = control(cooldown(steps=3))
    # Changed at step 1; steps 2 and 3 hold, so that three updates run at 70; step 4 is free again.
    assert follow(controller, [70, 80, 90, 100, 110], batch_size=1) == [70, 70, 70, 100, 100]


def test_cooldown_counts_examples_or_epochs():
    by_examples = control(cooldown(examples=200))
    assert follow(by_examples, [70, 80, 90, 100], batch_size=100) == [70, 70, 90, 90]
    by_epochs = control(cooldown(epochs=2))
    sizes = [by_epochs.observe(epoch=epoch, loss=64 + epoch) for epoch in (1, 1, 2, 3)]
    assert sizes == [65, 65, 65, 67]


def test_cooldown_ends_where_its_count_begins_anew():
    policy = cyclic(chain(linear(32, 32), cooldown(epochs=1)), 4)
    controller = BatchSizeController(policy, min_size=1, max_size=512)
    sizes = [controller.observe(epoch=epoch) for epoch in range(1, 12)]
    assert sizes == [64, 96, 128, 32, 64, 96, 128, 32, 64, 96, 128]


def test_cooldown_does_not_begin_where_the_bounds_held_the_size():
    controller = BatchSizeController(chain(Wish(), cooldown(steps=5)), min_size=1, max_size=64, initial=64)
    assert follow(controller, [1000, 32], batch_size=1) == [64, 32]


def test_monotone_never_goes_back():
    assert follow(control(monotone()), [32, 128, 64, 200]) == [64, 128, 128, 200]


def test_monotone_forgets_a_wish_that_was_not_granted():
    controller = control(monotone(), rate_limit(2))
    assert follow(controller, [100_000, 32, 32]) == [128, 128, 128]


def test_monotone_remembers_its_own_answers_where_no_size_is_in_force():
    step, state, answers = monotone(), monotone().init(), []
    for wish in (8.0, 4.0, 9.0):
        size, state = step.update(state, Observation(), wish)
        answers.append(size)
    assert answers == [8, 8, 9]


def test_a_chain_applies_its_transforms_in_order():
    assert chain(constant(100), multiple_of(64), clamp(1, 100)).start() == 100
    assert chain(constant(100), clamp(1, 100), multiple_of(64)).start() == 128
    assert chain(constant(100)).start() == 100


def test_a_chain_explains_only_what_changed_something():
    policy = chain(linear(32, 8), rate_limit(2), multiple_of(8), clamp(1, 4096))
    words = policy.explain(policy.init(), Observation(epoch=20, size=33))
    # 32 + 8 × 20 = 192, at most 66, nearest multiple 64.
    assert words == (
        "linear: 32 + 8 × 20 = 192 at epoch 20; rate_limit(2) allows 66; multiple_of(8) makes it 64"  # noqa: RUF001
    )


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (clamp(1, 32), "clamp(1, 32) makes it 32"),
        (hysteresis(0.5), "hysteresis(0.5) holds 100"),
        (monotone(), "monotone() holds 100"),
        (rate_limit(1.25), "rate_limit(1.25) allows 80"),
    ],
)
def test_a_transform_names_itself_as_it_was_called(transform, words):
    size = 79 if isinstance(transform, type(rate_limit(2))) else 90
    assert transform.explain(transform.init(), Observation(size=100), size) == words


def test_a_cooldown_says_how_long_it_holds():
    step = cooldown(examples=1000)
    state = {"size": 64, "count": 5000, "changed": 5000}
    observation = Observation(examples=5500, size=64)
    assert step.explain(state, observation, 90.0) == "cooldown(examples=1000) holds 64"


def test_transforms_of_the_current_size_pass_the_start_through():
    policy = chain(constant(100), rate_limit(2), hysteresis(0.5), cooldown(steps=9), monotone(), smooth(0.9))
    assert policy.start() == 100


def test_a_transform_of_a_measured_figure_is_left_out_of_the_start():
    policy = chain(constant(100), Measured(), clamp(1, 64))
    assert policy.start() == 64
    with pytest.raises(MissingSignalError, match="lr"):
        policy.update(policy.init(), Observation())


def test_a_chain_without_a_start_has_none():
    assert chain(Wish(), clamp(1, 64)).start() is None


def test_nan_passes_by_the_transforms_and_holds():
    controller = control(smooth(0.5), multiple_of(8))
    assert follow(controller, [64, math.nan, 1024]) == [64, 64, 256]


def test_the_memory_of_transforms_is_json():
    controller = control(smooth(0.5), cooldown(steps=3), monotone(), rate_limit(2))
    follow(controller, [100, 50, 300], batch_size=7)
    state = controller.state_dict()
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_switch_hands_over_at_its_counts():
    policy = switch({10: constant(256), 0: linear(32, 8)})
    assert policy.start() == 32
    controller = BatchSizeController(policy, min_size=1, max_size=4096)
    assert [controller.observe(epoch=epoch) for epoch in (1, 9, 10, 11)] == [40, 104, 256, 256]


def test_switch_updates_only_the_policy_in_charge():
    policy, state = switch({0: Wish(), 2: Wish()}, per="step", every=10), [0, 0]
    for step in (0, 19, 20):
        _, state = policy.update(state, Observation(step=step, loss=8.0))
    assert state == [2, 1]


def test_a_policy_that_takes_over_begins_with_the_size_in_force():
    policy = switch({0: constant(48), 5: from_lr(lambda epoch: 0.5 ** (epoch // 10))})
    controller = BatchSizeController(policy, min_size=1, max_size=4096)
    assert [controller.observe(epoch=epoch) for epoch in (1, 5, 10)] == [48, 48, 96]


def test_switch_says_who_is_in_charge():
    policy = switch({0: constant(32), 10: constant(256)})
    words = policy.explain(policy.init(), Observation(epoch=12))
    assert words == "switch: the policy from 10 on; constant: 256"


def test_maximum_takes_the_largest_and_updates_all():
    policy = maximum(Wish(), constant(64), Wish())
    state = policy.init()
    sizes = []
    for wish in (32.0, 100.0, math.nan):
        size, state = policy.update(state, Observation(loss=wish))
        sizes.append(size)
    # NaN asks for nothing, so the floor of 64 wins against it.
    assert sizes == [64, 100, 64]
    assert state == [3, None, 3]


def test_maximum_starts_with_the_largest_start():
    assert maximum(Wish(), constant(64), milestones({0: 80})).start() == 80
    assert maximum(Wish()).start() is None


def test_maximum_of_no_opinion_holds_the_size():
    controller = BatchSizeController(maximum(Wish(), Wish()), min_size=1, max_size=100, initial=10)
    assert follow(controller, [math.nan]) == [10]
    assert "nan" in controller.explain()


def test_maximum_explains_the_winner():
    policy = maximum(constant(64), linear(32, 8))
    words = policy.explain(policy.init(), Observation(epoch=5))
    assert words == "maximum of 64, 72; linear: 32 + 8 × 5 = 72 at epoch 5"  # noqa: RUF001


def test_chains_nest():
    inner = chain(exponential(10, 3), multiple_of(8))
    policy = maximum(chain(inner, clamp(1, 64)), constant(20))
    # 10 → 8, 30 → 32, 90 → 88 → 64; the floor is 20.
    controller = BatchSizeController(policy, min_size=1, max_size=4096)
    assert [controller.size] + [controller.observe(epoch=epoch) for epoch in (1, 2)] == [20, 32, 64]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: chain(64), "chain needs policies, got 64; a fixed size is constant(64)"),
        (lambda: chain(clamp(1, 2)), "needs policies, got clamp(1, 2); it goes after one: chain(policy, clamp(1, 2))"),
        (lambda: chain(constant(64), constant(32)), "several policies go into maximum or switch"),
        (lambda: clamp(0, 10), "min_size must be a whole number of 1 or more, got 0"),
        (lambda: clamp(64, 32), "clamp needs min_size <= max_size, got 64 and 32"),
        (lambda: clamp(1.5, 32), "min_size must be a whole number"),
        (lambda: multiple_of(0), "number must be a whole number of 1 or more, got 0"),
        (lambda: smooth(1), "keep must be a number of 0 or more and below 1, got 1"),
        (lambda: smooth(-0.1), "keep must be a number of 0 or more and below 1, got -0.1"),
        (lambda: rate_limit(1), "factor must be a number above 1, got 1"),
        (lambda: rate_limit(math.inf), "factor must be a number above 1, got inf"),
        (lambda: hysteresis(0), "fraction must be a number above 0, got 0"),
        (lambda: cooldown(), "cooldown needs one of examples, steps, epochs and tokens, got none"),
        (lambda: cooldown(steps=1, epochs=1), "got steps=1, epochs=1"),
        (lambda: cooldown(steps=0), "steps must be a whole number of 1 or more, got 0"),
        (lambda: switch({}), "switch needs a mapping from counts"),
        (lambda: switch({1: constant(8)}), "must say what holds at 0"),
        (lambda: switch({0: constant(8), -1: constant(8)}), "a key of switch must be a whole number of 0 or more"),
        (lambda: switch({0: 64}), "switch needs policies, got 64"),
        (
            lambda: switch({0: constant(8)}, per="hour"),
            "'examples', 'tokens', got 'hour'",
        ),
        (lambda: maximum(), "maximum needs at least one policy"),
        (lambda: maximum(constant(8), 64), "maximum needs policies, got 64"),
    ],
)
def test_nonsense_is_refused_when_the_part_is_made(make, words):
    with pytest.raises(ArgumentError) as error:
        make()
    assert words in str(error.value)


def test_a_chain_is_written_as_the_call_that_makes_it():
    policy = chain(maximum(constant(8), linear(8, 2)), smooth(0.9), cooldown(epochs=2), clamp(8, 64))
    assert repr(policy) == "chain(maximum(constant(8), linear(8, 2)), smooth(0.9), cooldown(epochs=2), clamp(8, 64))"
    assert repr(switch({0: constant(8), 9: linear(8, 2)})) == "switch({0: constant(8), 9: linear(8, 2)})"


def test_the_rule_in_the_docstring_of_minimum_grows_the_batch():
    policy = minimum(memory_driven(per="epoch"), speed_driven())
    controller = BatchSizeController(policy, min_size=1, max_size=512, initial=16)
    for epoch in range(12):
        for _ in range(10):
            ran = controller.size
            controller.observe(epoch=epoch, batch_size=ran, seconds=0.1 + 0.001 * ran, memory_fraction=ran / 512)
        controller.observe(epoch=epoch + 1)
    assert controller.size > 16


def test_a_wish_of_nothing_behind_a_multiple_is_survived():
    policy = chain(minimum(linear(64, -16), step_time(100, every=3)), multiple_of(8))
    controller = BatchSizeController(policy, min_size=8, max_size=256)
    for epoch in range(7):
        for _ in range(8):
            controller.observe(epoch=epoch, batch_size=controller.size, seconds=0.001 * controller.size)
    assert controller.size == 8


def sizes_of(transform, losses):
    policy = chain(loss_driven(), transform)
    controller = BatchSizeController(policy, min_size=1, max_size=4096, initial=64)
    return [controller.observe(epoch=epoch, loss=loss) for epoch, loss in enumerate(losses, start=1)]


def test_the_smallest_multiple_is_a_bound_that_is_not_passed_in_secret():
    losses = [1, 2, 3, 4, 5, 6, 7, 8, 7, 6, 5]
    assert sizes_of(multiple_of(64), losses) == sizes_of(clamp(64, 4096), losses)
    assert sizes_of(multiple_of(64), losses)[-3:] == [128, 256, 512]


@pytest.mark.parametrize("combine", [maximum, minimum, lambda *policies: switch(dict(enumerate(policies)))])
def test_sizes_of_tokens_and_of_examples_are_not_combined(combine):
    with pytest.raises(ArgumentError, match="got policies that count examples and tokens; let all of them count"):
        combine(goodput(unit="tokens"), goodput())
    with pytest.raises(ArgumentError, match="count examples and tokens"):
        combine(chain(goodput(unit="tokens"), multiple_of(8)), constant(8), goodput())
    assert combine(goodput(unit="tokens"), constant(512)).unit == "tokens"
    assert combine(constant(64), constant(512)).unit is None
