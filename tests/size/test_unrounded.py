"""The size before rounding: steps too small for a whole example add up, and limits do not let it run away."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright import size
from batchwright.errors import ArgumentError
from batchwright.size import BatchSizeController
from batchwright.size.policy import TIMES

# 16 · exp(60 · v) = 94
SHARE = math.log(94 / 16) / 60


def control(policy, *, min_size=1, max_size=4096, initial=16, **options):
    return BatchSizeController(policy, min_size=min_size, max_size=max_size, initial=initial, **options)


def fall(controller, num=60, share=SHARE):
    """Observe a loss that falls by a share per epoch; return the sizes."""
    return [controller.observe(epoch=epoch, loss=(1 - share) ** epoch) for epoch in range(1, num + 2)]


def test_small_steps_reach_the_exact_product():
    assert fall(control(size.loss_driven(gain=1)))[-1] == 94


def test_small_linear_steps_add_up():
    # 60 steps of 0.4 examples: 16 + 24
    policy = size.loss_driven(mode="linear", gain=0.4 / SHARE)
    assert fall(control(policy))[-1] == 40


def test_a_small_factor_moves_a_small_size():
    controller = control(size.memory_driven(factor=1.02))
    sizes = [controller.observe(memory_fraction=0.1) for _ in range(100)]
    assert sizes[-1] == round(16 * 1.02**100) == 116


@pytest.mark.parametrize("number", [1, 8, 32])
def test_small_steps_add_up_behind_a_multiple(number):
    # The smallest multiple is a bound: 16 behind a multiple of 32 begins at 32.
    first = max(16, number)
    sizes = fall(control(size.chain(size.loss_driven(gain=1), size.multiple_of(number))))
    assert sizes[-1] == number * round(94 / 16 * first / number)


def test_small_steps_leave_a_dead_band_in_time():
    sizes = fall(control(size.chain(size.loss_driven(gain=1), size.hysteresis(0.25))))
    # Each time the wish is 1.25 times the size in force, it is taken; at the end at most that much is still to come.
    assert 94 / 1.25 <= sizes[-1] <= 94
    assert all(new == old or new > 1.2 * old for old, new in pairwise(sizes))


def test_a_bound_is_not_passed_in_secret():
    controller = control(size.loss_driven(gain=1), max_size=20)
    fall(controller)
    assert controller.size == 20
    assert controller.state_dict()["exact_size"] == 20.0
    # exp(-0.1) · 20 = 18.1: it falls at once, and not after what it would have grown by
    assert controller.observe(epoch=62, loss=1.1 * (1 - SHARE) ** 61) == 18


def test_a_rate_limit_is_not_passed_in_secret():
    policy = size.chain(size.loss_driven(up=100.0), size.rate_limit(2), size.multiple_of(8))
    controller = control(policy)
    assert fall(controller, num=3) == [16, 32, 64, 128]


def test_what_another_policy_decided_is_gone_on_from():
    # The constant wins until the loss asks for more than 50: from there on it is the product from 50.
    policy = size.maximum(size.constant(50), size.loss_driven(gain=1))
    assert fall(control(policy), num=30)[-1] == round(50 * math.exp(30 * SHARE))


def test_the_unrounded_size_is_in_words_and_in_the_state():
    controller = control(size.loss_driven(gain=1))
    fall(controller, num=2, share=0.1)
    # 16 · e^0.1 = 17.683, then · e^0.1 = 19.542
    assert controller.state_dict()["exact_size"] == pytest.approx(16 * math.exp(0.2))
    assert controller.history[-1].reason.endswith(f"17.68 {TIMES} 1.105 = 19.54")


def test_a_policy_of_ones_own_may_go_on_from_the_unrounded_size():
    class Grow(size.Policy):
        def init(self):
            return None

        def update(self, state, observation):
            return 1.02 * observation.exact, state

    controller = control(Grow())
    for _ in range(100):
        controller.observe()
    assert controller.size == 116
    assert size.Observation(batch_size=8).exact == 8.0


POLICIES = {
    "gain": size.loss_driven(gain=0.5),
    "linear": size.loss_driven(mode="linear", gain=3),
    "multiple": size.chain(size.loss_driven(gain=0.5), size.multiple_of(8)),
    "band": size.chain(size.loss_driven("ema", gain=0.5), size.hysteresis(0.2), size.rate_limit(1.5)),
    "bounds": size.minimum(size.loss_driven(gain=0.5), size.constant(40)),
}


@pytest.mark.parametrize("name", POLICIES)
@given(losses=st.lists(st.floats(0.1, 10), min_size=1, max_size=15), cut=st.integers(0, 15))
def test_a_state_at_any_step_goes_on_with_the_same_sizes(name, losses, cut):
    whole, first, second = (control(POLICIES[name], min_size=4, max_size=64) for _ in range(3))
    course = [{"epoch": epoch, "loss": loss} for epoch, loss in enumerate(losses, start=1)]
    sizes = [whole.observe(**figures) for figures in course]
    for figures in course[:cut]:
        first.observe(**figures)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert [second.observe(**figures) for figures in course[cut:]] == sizes[cut:]
    assert second.state_dict() == whole.state_dict()
    assert all(4 <= size <= 64 for size in sizes)


def test_a_state_without_the_unrounded_size_goes_on_from_the_whole_one():
    controller = control(size.loss_driven(gain=1))
    fall(controller, num=2, share=0.1)
    state = controller.state_dict()
    earlier = {name: value for name, value in state.items() if name not in ("exact_size", "num_changes")}
    again = control(size.loss_driven(gain=1))
    again.load_state_dict({**earlier, "version": 1})
    assert again.state_dict() == {**state, "exact_size": 20.0}


def test_bounds_of_more_digits_than_a_float_are_kept():
    bound = 2**60 + 1
    assert control(size.constant(8), min_size=bound, max_size=bound, initial=None).size == bound


def test_history_holds_the_newest_changes_and_counts_all():
    controller = control(size.linear(16, 1), max_history=3)
    for epoch in range(1, 11):
        controller.observe(epoch=epoch)
    assert [decision.new for decision in controller.history] == [24, 25, 26]
    assert controller.num_changes == 10
    assert len(controller.state_dict()["history"]) == 3


def test_history_may_be_left_out():
    controller = control(size.linear(16, 1), max_history=0)
    controller.observe(epoch=1)
    assert (controller.history, controller.num_changes, controller.state_dict()["history"]) == ((), 1, [])


def test_history_is_bounded_unless_it_is_asked_for():
    usual, whole = control(size.linear(16, 1)), control(size.linear(16, 1), max_history=None)
    for epoch in range(1, 1101):
        usual.observe(epoch=epoch)
        whole.observe(epoch=epoch)
    assert (len(usual.history), len(whole.history)) == (1000, 1100)
    assert len(json.dumps(usual.state_dict())) < 250_000


def test_a_longer_history_loads_into_a_shorter_one():
    whole, short = control(size.linear(16, 1)), control(size.linear(16, 1), max_history=2)
    for epoch in range(1, 6):
        whole.observe(epoch=epoch)
    short.load_state_dict(whole.state_dict())
    assert [decision.new for decision in short.history] == [20, 21]
    assert short.num_changes == 5


@pytest.mark.parametrize("number", [-1, 1.5, True])
def test_a_history_of_nonsense_is_refused(number):
    with pytest.raises(ArgumentError, match=f"max_history must be a whole number of 0 or more, got {number}"):
        control(size.linear(16, 1), max_history=number)


def test_a_history_longer_than_any_list_is_refused():
    with pytest.raises(ArgumentError, match=r"max_history must be at most .* None keeps all"):
        control(size.linear(16, 1), max_history=10**30)
