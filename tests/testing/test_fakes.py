"""FakeMemory, FakeClock and EagerGraphs: what a test sets is what is read."""

import numpy as np
import pytest
import torch

from batchwright.errors import ArgumentError
from batchwright.testing import EagerGraphs, FakeClock, FakeMemory


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


def test_a_replay_runs_the_captured_function_again():
    graphs, total = EagerGraphs(), torch.zeros(2)
    replay = graphs.capture(lambda: total.add_(1), writes=[total])
    assert total.tolist() == [0, 0]
    replay()
    replay()
    assert total.tolist() == [2, 2]
    assert (graphs.num_captured, graphs.num_replayed) == (1, 2)


def test_what_a_failed_capture_wrote_is_put_back_and_not_counted():
    graphs, total = EagerGraphs(bytes_per_capture=5), torch.zeros(2)

    def fail():
        total.add_(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        graphs.capture(fail, writes=[total])
    assert (total.tolist(), graphs.num_captured, graphs.pool_bytes()) == ([0, 0], 0, 0)


def test_captures_beyond_the_most_run_out_of_memory_until_all_are_released():
    graphs = EagerGraphs(max_captures=2, bytes_per_capture=10)
    for _ in range(2):
        graphs.capture(lambda: None)
    assert graphs.pool_bytes() == 20
    with pytest.raises(MemoryError, match="a stand-in of 2 captures is full"):
        graphs.capture(lambda: None)
    graphs.release()
    assert (graphs.pool_bytes(), graphs.num_released) == (0, 1)
    graphs.capture(lambda: None)
    assert graphs.num_captured == 3


def test_graphs_tell_the_time_of_a_clock_and_the_memory_that_a_test_sets():
    clock = FakeClock(5.0)
    graphs = EagerGraphs(clock=clock, bytes_per_capture=7, used_bytes=11)
    ran = []
    assert graphs.measure(lambda: ran.append(1)) == 7
    assert (ran, graphs.seconds(), graphs.used_bytes(), graphs.lost_peak_bytes) == ([1], 5.0, 11, 0)
    clock.advance(1.0)
    assert graphs.seconds() == 6.0


@pytest.mark.parametrize("name", ["max_captures", "bytes_per_capture", "used_bytes"])
def test_numbers_of_graphs_are_whole_and_not_negative(name):
    with pytest.raises(ArgumentError, match=f"{name} must be a whole number of 0 or more, got -1"):
        EagerGraphs(**{name: -1})
