"""Random policies made of all parts: bounds always hold, runs repeat, and a state at any point has the same future."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from batchwright.testing import check_policy


class Wild(Policy):
    """Asks for whatever the loss says: zero, below zero, huge, infinite, or NaN."""

    def init(self):
        return None

    def update(self, state, observation):
        return math.nan if observation.loss is None else observation.loss, state


def falling(index):
    return 0.9**index


sizes = st.floats(1, 1e5)
counts = st.integers(1, 20)
units = st.sampled_from([{"per": "epoch"}, {"per": "step", "every": 3}, {"per": "examples", "every": 100}])
schedules = st.one_of(
    st.builds(Wild),
    st.builds(constant, sizes),
    st.builds(lambda start, slope, unit: linear(start, slope, **unit), sizes, st.floats(-1e6, 1e6), units),
    st.builds(lambda start, factor, unit: exponential(start, factor, **unit), sizes, st.floats(0.01, 100), units),
    st.builds(lambda low, high, over, unit: warm_up(low, high, over, **unit), sizes, sizes, counts, units),
    st.builds(lambda low, high, at, unit: milestones({0: low, at: high}, **unit), sizes, sizes, counts, units),
    st.builds(lambda start, unit: from_lr(falling, start=start, **unit), st.none() | sizes, units),
    st.builds(lambda start, most: seesaw(falling, start=start, max_factor=most)[0], sizes, sizes),
)
transforms = st.one_of(
    st.builds(lambda low, more: clamp(low, low + more), counts, counts),
    st.builds(multiple_of, counts),
    st.builds(smooth, st.floats(0, 0.99)),
    st.builds(rate_limit, st.floats(1.01, 10)),
    st.builds(hysteresis, st.floats(0.01, 2)),
    st.builds(monotone),
    st.builds(lambda name, pause: cooldown(**{name: pause}), st.sampled_from(["steps", "examples", "epochs"]), counts),
)


def combine(inner):
    return st.one_of(
        st.builds(lambda policy, parts: chain(policy, *parts), inner, st.lists(transforms, max_size=4)),
        st.builds(lambda first, second, at, unit: switch({0: first, at: second}, **unit), inner, inner, counts, units),
        st.builds(lambda policies: maximum(*policies), st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda policies: minimum(*policies), st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda policy, period: cyclic(chain(policy), period), inner, counts),
    )


policies = st.recursive(schedules, combine, max_leaves=5)


@st.composite
def courses(draw):
    epoch, course = 0, []
    for ends in draw(st.lists(st.booleans(), min_size=1, max_size=12)):
        epoch += ends
        loss = draw(st.none() | st.floats() | st.floats(1, 1000))
        course.append({"epoch": epoch, "batch_size": draw(st.integers(1, 200)), "loss": loss})
    return course


def run(controller, course):
    return [controller.observe(**figures) for figures in course]


@given(policies, courses(), st.integers(1, 100), st.integers(0, 5000), st.data())
def test_the_size_is_whole_and_within_the_bounds_whatever_the_policy(policy, course, low, width, data):
    initial = data.draw(st.none() | st.integers(low, low + width))
    controller = BatchSizeController(policy, min_size=low, max_size=low + width, initial=initial)
    for size in [controller.size, *run(controller, course)]:
        assert type(size) is int
        assert low <= size <= low + width


@given(policies, courses(), st.data())
def test_the_state_at_any_point_survives_json_and_has_the_same_future(policy, course, data):
    whole, first, second = (BatchSizeController(policy, min_size=1, max_size=4096) for _ in range(3))
    expected = run(whole, course)
    num = data.draw(st.integers(0, len(course)))
    run(first, course[:num])
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert run(second, course[num:]) == expected[num:]
    assert second.state_dict() == whole.state_dict()


@given(policies, courses())
def test_every_change_is_recorded_with_its_reason(policy, course):
    controller = BatchSizeController(policy, min_size=1, max_size=4096)
    walk = [controller.size, *run(controller, course)]
    changes = [(old, new) for old, new in pairwise(walk) if old != new]
    assert [(decision.old, decision.new) for decision in controller.history] == changes
    assert all(decision.reason for decision in controller.history)
    assert controller.explain()


@given(policies)
def test_every_policy_can_be_written_and_has_a_fixed_fingerprint(policy):
    state = BatchSizeController(policy, min_size=1, max_size=64).state_dict()
    assert "0x" not in state["policy"]
    assert repr(policy)


@pytest.mark.parametrize(
    "policy",
    [
        constant(64),
        linear(32, 8),
        exponential(32, 1.1, per="step"),
        cyclic(linear(32, 8), 3),
        milestones({0: 64, 1000: 256}, per="examples"),
        warm_up(64, 1024, 20, per="step", mode="geometric"),
        from_lr(falling),
        seesaw(falling, max_factor=8)[0],
        switch({0: linear(32, 8), 2: constant(256)}),
        maximum(constant(64), linear(32, 8)),
        minimum(constant(64), linear(32, 8)),
        chain(exponential(32, 3), smooth(0.9), rate_limit(2), cooldown(steps=3), hysteresis(0.25), monotone()),
        chain(exponential(32, 3), multiple_of(8), clamp(32, 4096)),
    ],
    ids=repr,
)
def test_every_policy_of_ours_keeps_the_published_contract(policy):
    check_policy(policy)
