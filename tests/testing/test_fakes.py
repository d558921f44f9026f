"""FakeMemory and FakeClock: what a test sets is what is read."""

import numpy as np
import pytest

from batchwright.errors import ArgumentError
from batchwright.testing import FakeClock, FakeMemory


def test_the_peak_is_the_most_in_use_since_it_was_reset():
    memory = FakeMemory(100, used_bytes=10)
    memory.run_batch(4, 5)
    memory.used_bytes = 20
    assert (memory.used_bytes, memory.peak_bytes) == (20, 30)  # 10 in use and 4 × 5 for the batch
    memory.reset_peak()
    assert memory.peak_bytes == 20


def test_a_batch_that_is_too_large_fills_the_memory_and_raises():
    memory = FakeMemory(100, used_bytes=10, bytes_of=lambda num_items: 30 * num_items)
    memory.run_batch(3)
    assert memory.peak_bytes == 100  # exactly full is still fine
    memory.reset_peak()
    with pytest.raises(MemoryError, match="takes 120 bytes; 90 of 100 are free"):
        memory.run_batch(4)
    assert (memory.used_bytes, memory.peak_bytes) == (10, 100)


@pytest.mark.parametrize(("used", "allowed"), [(-1, "a whole number of 0 or more"), (101, "at most total_bytes, 100")])
def test_no_more_than_all_of_it_can_be_in_use(used, allowed):
    with pytest.raises(ArgumentError, match=f"used_bytes must be {allowed}, got {used}"):
        FakeMemory(100, used_bytes=used)


def test_numbers_of_numpy_are_kept_as_plain_numbers():
    memory = FakeMemory(np.int64(100), used_bytes=np.int32(10))
    assert [type(value) for value in (memory.total_bytes, memory.used_bytes, memory.peak_bytes)] == [int] * 3


def test_memory_of_no_size_is_refused():
    with pytest.raises(ArgumentError, match="total_bytes must be a whole number of 1 or more, got 0"):
        FakeMemory(0)


def test_a_clock_moves_when_told_to_and_never_back():
    clock = FakeClock(5.0)
    clock.advance(0.25)
    assert clock() == clock() == 5.25
    with pytest.raises(ArgumentError, match="seconds must be a number of 0 or more, got -1"):
        clock.advance(-1)
