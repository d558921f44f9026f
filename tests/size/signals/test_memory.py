"""memory_driven: the limits, and a size that was too large is not tried again and again."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size.combine import chain, minimum, multiple_of
from batchwright.size.controller import BatchSizeController
from batchwright.size.observation import Observation
from batchwright.size.policy import TIMES
from batchwright.size.schedules import milestones
from batchwright.size.signals import memory_driven


def answer(policy, fraction, size=64, **figures):
    return policy.update(policy.init(), Observation(memory_fraction=fraction, size=size, **figures))[0]


def run(policy, memory_of, num=30, size=64):
    """Return the sizes of a run whose memory depends on the size; the state goes through JSON every time."""
    state, sizes = policy.init(), []
    for _ in range(num):
        wanted, state = policy.update(state, Observation(memory_fraction=memory_of(size), size=size))
        state, size = json.loads(json.dumps(state)), round(wanted)
        sizes.append(size)
    return sizes


@pytest.mark.parametrize(("fraction", "size"), [(0.81, 32), (0.8, 64), (0.5, 64), (0.48, 64), (0.47, 128)])
def test_the_limits_halve_hold_and_double(fraction, size):
    assert answer(memory_driven(), fraction) == size


def test_limits_and_factor_can_be_given():
    policy = memory_driven(0.5, 0.1, 4)
    assert [answer(policy, fraction) for fraction in (0.6, 0.3, 0.05)] == [16, 64, 256]


def test_a_size_that_was_too_large_is_not_tried_again():
    def proportional(size):
        return 0.45 * size / 64

    assert run(memory_driven(), proportional) == [128] + [64] * 29
    assert run(memory_driven(remember=False), proportional, num=4) == [128, 64, 128, 64]


@given(st.integers(1, 4096), st.floats(0, 0.7), st.floats(1e-6, 0.02))
def test_memory_that_is_linear_in_the_batch_never_swings_for_ever(size, constant, each):
    sizes = run(memory_driven(), lambda size: constant + each * size, num=60, size=size)
    assert len(set(sizes[40:])) == 1


def test_it_grows_again_once_memory_is_free():
    readings = iter([0.45, 0.9] + [0.45] * 20 + [0.2] * 12)
    sizes = run(memory_driven(patience=10), lambda size: next(readings), num=34)
    # 0.2 · 128 / 64 fits under 0.8: the tenth such reading forgets that 128 was too large.
    assert sizes[:31] == [128] + [64] * 30
    assert sizes[31] == 128


def test_one_light_batch_does_not_forget_a_heavy_one():
    readings = iter([0.45, 0.9, *([0.2] * 9 + [0.45]) * 5])
    assert set(run(memory_driven(patience=10), lambda size: next(readings), num=52)[1:]) == {64}


def test_a_batch_smaller_than_the_size_in_force_does_not_grow_it():
    assert answer(memory_driven(), 0.1, batch_size=7) == 64
    assert answer(memory_driven(), 0.1, batch_size=64) == 128
    assert answer(memory_driven(), 0.9, batch_size=7) == 32


@pytest.mark.parametrize("fraction", [math.nan, math.inf, -0.1])
def test_a_reading_that_is_no_share_holds(fraction):
    assert answer(memory_driven(), fraction) == 64


def test_it_explains_itself():
    controller = BatchSizeController(memory_driven(), min_size=1, max_size=1024, initial=64)
    said = []
    for fraction in (0.45, 0.9, 0.45, 0.6):
        controller.observe(memory_fraction=fraction)
        said.append(controller.explain().split("%) ")[-1].split("%), ")[-1].split("%): ")[-1])
    assert said == [
        f"64 {TIMES} 2 = 128",
        f"128 {TIMES} 0.5 = 64",
        "but 128 was too large: holds 64",
        "between the limits: holds 64",
    ]
    assert controller.history[0].reason == f"memory 45.0 % full (low 48 %, high 80 %): 64 {TIMES} 2 = 128"


def test_what_is_missing_is_named():
    with pytest.raises(MissingSignalError, match="memory_driven needs memory_fraction"):
        memory_driven().update(memory_driven().init(), Observation(size=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": 0.8}, "low must be below high, got low=0.8, high=0.8"),
        ({"low": 0}, "low must be a number above 0, got 0"),
        ({"high": 80}, "high must be a number of at most 1, got 80"),
        ({"factor": 1}, "factor must be a number above 1, got 1"),
        ({"patience": 0}, "patience must be a whole number of 1 or more, got 0"),
        ({"remember": None}, "remember must be True or False, got None"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        memory_driven(**arguments)


def per_epoch(readings, policy=None, **options):
    """Return the sizes after each reading and after each epoch, a list of readings."""
    controller = BatchSizeController(policy or memory_driven(per="epoch"), min_size=1, max_size=4096, initial=64)
    sizes = []
    for epoch, fractions in enumerate(readings):
        for fraction in fractions:
            sizes.append(controller.observe(epoch=epoch, batch_size=controller.size, memory_fraction=fraction))
        sizes.append(controller.observe(epoch=epoch + 1))
    return sizes, controller


def test_per_epoch_the_highest_reading_decides_at_the_end():
    sizes, controller = per_epoch([[0.1, 0.45, 0.2], [0.1, 0.9, 0.1], [0.5, 0.1, 0.1]])
    assert sizes == [64, 64, 64, 128, 128, 128, 128, 64, 64, 64, 64, 64]
    assert controller.history[0].reason == f"memory 45.0 % full (low 48 %, high 80 %): 64 {TIMES} 2 = 128"
    assert controller.explain().startswith("memory 50.0 % full")


def test_per_epoch_a_size_that_was_too_large_is_not_tried_again():
    sizes, _ = per_epoch([[0.45], [0.9], [0.45], [0.45], [0.45]])
    assert sizes[1::2] == [128, 64, 64, 64, 64]


def test_one_observation_per_epoch_is_an_epoch():
    controller = BatchSizeController(memory_driven(per="epoch"), min_size=1, max_size=4096, initial=64)
    assert [controller.observe(epoch=epoch, memory_fraction=0.1) for epoch in (1, 2, 2, 3)] == [128, 256, 256, 512]


def test_readings_that_are_no_shares_or_of_small_batches_leave_the_epoch_as_it_is():
    controller = BatchSizeController(memory_driven(per="epoch"), min_size=1, max_size=4096, initial=64)
    for ran, fraction in [(64, math.nan), (20, 0.1), (64, math.inf)]:
        controller.observe(epoch=0, batch_size=ran, memory_fraction=fraction)
    assert controller.observe(epoch=1) == 64
    assert controller.explain() == "gathering the memory use of the epoch: holds 64"


def test_an_epoch_in_which_nothing_was_read_is_refused():
    controller = BatchSizeController(memory_driven(per="epoch"), min_size=1, max_size=4096)
    with pytest.raises(MissingSignalError, match="memory_driven needs memory_fraction"):
        controller.observe(epoch=1)


def test_periods_of_steps_and_examples():
    steps = memory_driven(per="step", every=2)
    controller = BatchSizeController(steps, min_size=1, max_size=4096, initial=64)
    assert [controller.observe(memory_fraction=0.1) for _ in range(4)] == [64, 128, 128, 256]
    examples = BatchSizeController(memory_driven(per="examples", every=100), min_size=1, max_size=4096, initial=64)
    assert [examples.observe(batch_size=64, memory_fraction=0.1) for _ in range(2)] == [64, 128]
    assert memory_driven(per="step") == memory_driven()


def sizes_by_memory(policy, *, holds, initial, num=200):
    """Return the sizes on a device whose memory is in proportion to the batch."""
    controller = BatchSizeController(policy, min_size=1, max_size=512, initial=initial)
    return [
        controller.observe(batch_size=controller.size, memory_fraction=min(1.0, controller.size / holds))
        for _ in range(num)
    ]


# The growth is computed from the unrounded size, e.g. 82.8 where 83 was too large.
@pytest.mark.parametrize(
    ("factor", "low", "initial", "holds"), [(1.2, 0.7, 16, 100), (1.5, 0.6, 1, 64), (1.5, 0.6, 3, 90)]
)
def test_a_size_that_is_rounded_to_one_that_was_too_large_is_not_tried_again(factor, low, initial, holds):
    sizes = sizes_by_memory(memory_driven(factor=factor, low=low), initial=initial, holds=holds)
    assert len(set(sizes[100:])) == 1, sizes[-8:]


@given(
    st.integers(1, 64), st.floats(1.05, 3), st.floats(0.3, 0.79), st.integers(1, 300), st.sampled_from([1, 3, 8, 24])
)
def test_memory_behind_a_multiple_never_swings_for_ever(initial, factor, low, holds, number):
    policy = chain(memory_driven(low=low, factor=factor), multiple_of(number))
    sizes = sizes_by_memory(policy, initial=initial, holds=holds)
    assert len(set(sizes[150:])) == 1, sizes[-8:]


def test_a_multiple_does_not_make_memory_driven_swing():
    # 24 takes 0.375 of the memory and grows; 48 takes 0.75, between the limits.
    sizes = sizes_by_memory(chain(memory_driven(), multiple_of(24)), initial=1, holds=64)
    assert set(sizes[100:]) == {48}


def test_batches_formed_before_the_size_shrank_do_not_shrink_it_again():
    controller = BatchSizeController(memory_driven(), min_size=1, max_size=4096, initial=256)
    ahead = [256, 256]  # a loader with workers
    for _ in range(8):
        ahead.append(controller.size)
        ran = ahead.pop(0)
        controller.observe(batch_size=ran, memory_fraction=0.95 * ran / 256)
    assert [decision.new for decision in controller.history] == [128]


def test_the_highest_reading_of_an_epoch_is_one_of_the_size_in_force():
    """Another policy halves the size in the middle of an epoch, whose first half took 95 % of the memory."""
    policy = minimum(memory_driven(per="epoch"), milestones({0: 256, 5: 128}, per="step"))
    controller = BatchSizeController(policy, min_size=1, max_size=4096, initial=256)
    for step in range(1, 31):
        ran = controller.size
        controller.observe(epoch=step // 10, batch_size=ran, memory_fraction=0.95 * ran / 256)
    assert [decision.new for decision in controller.history] == [128]


def test_a_loader_that_never_follows_the_size_is_heard():
    controller = BatchSizeController(memory_driven(), min_size=1, max_size=4096, initial=8)
    assert [controller.observe(batch_size=64, memory_fraction=0.9) for _ in range(3)] == [4, 2, 1]
