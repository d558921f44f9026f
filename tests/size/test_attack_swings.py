"""Policies that remember a size that failed: with the unrounded size they go back to it for ever."""

import pytest

from batchwright.size import BatchSizeController, chain, memory_driven, multiple_of, step_time


def sizes_by_memory(policy, *, holds, initial, num=200):
    """Return the sizes on a device whose memory is in proportion to the batch."""
    controller = BatchSizeController(policy, min_size=1, max_size=512, initial=initial)
    return [
        controller.observe(batch_size=controller.size, memory_fraction=min(1.0, controller.size / holds))
        for _ in range(num)
    ]


def sizes_by_time(policy, *, fixed, per_example, initial, num):
    """Return the sizes on a device with an exact clock."""
    controller = BatchSizeController(policy, min_size=1, max_size=4096, initial=initial)
    return [
        controller.observe(batch_size=controller.size, seconds=fixed + per_example * controller.size)
        for _ in range(num)
    ]


# Expected (memory_driven): "a size that passed high is remembered, and the batch does not grow back to it until
# patience readings in a row say that it would fit". Found: 83, 69, 83, 69, … for ever. The size that was too large is
# kept whole (83), the growth is computed from the unrounded size (82.8), which is not above 83 and rounds to it.
@pytest.mark.parametrize(
    ("factor", "low", "initial", "holds"), [(1.2, 0.7, 16, 100), (1.5, 0.6, 1, 64), (1.5, 0.6, 3, 90)]
)
def test_a_size_that_was_too_large_for_memory_is_not_tried_again_and_again(factor, low, initial, holds):
    sizes = sizes_by_memory(memory_driven(factor=factor, low=low), initial=initial, holds=holds)
    assert len(set(sizes[100:])) == 1, sizes[-8:]


# Expected: the same with the default settings behind a multiple. Found: 24, 72, 24, 72, … for ever; memory holds 64,
# and 24 -> 72 is three times the batch where the policy's factor is 2.
def test_a_multiple_does_not_make_memory_driven_swing():
    sizes = sizes_by_memory(chain(memory_driven(), multiple_of(24)), initial=1, holds=64)
    assert len(set(sizes[100:])) == 1, sizes[-8:]


# Expected (step_time): "a size that was too slow is remembered: the batch then only grows halfway towards it, until
# updates of the same size become faster". Found: 4, 5, 4, 5, … for ever on an exact clock: 5 was too slow (22.5 ms),
# 4.44 · 20 / 18 = 4.94 is below 5, so it is asked for, and rounds to 5.
def test_step_time_settles_on_an_exact_clock():
    sizes = sizes_by_time(step_time(20, tolerance=0.05, every=3), fixed=0.0, per_example=0.0045, initial=16, num=400)
    assert len(set(sizes[200:])) == 1, sizes[-12:]


# Expected: the same, default settings. Found: 16, 24, 16, 24 for ever: 24 was too slow, a size below it is asked
# for, and multiple_of(8) makes it 24 each time.
def test_step_time_settles_behind_a_multiple():
    policy = chain(step_time(50), multiple_of(8))
    sizes = sizes_by_time(policy, fixed=0.01, per_example=0.002, initial=64, num=1600)
    assert len(set(sizes[800:])) == 1, sorted(set(sizes[800:]))
