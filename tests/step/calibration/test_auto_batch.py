"""auto_batch: doubled until memory runs out, or would; never beyond what runs."""

import time

import numpy as np
import pytest
import torch

from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.step import MemoryMonitor, auto_batch
from batchwright.step.calibration.finding import ALONE, largest_batch
from batchwright.testing import FakeClock, FakeMemory


def run_on(memory, ran=None, clock=None, seconds=lambda num: 0.01):
    def run(shape):
        if ran is not None:
            ran.append(shape)
        memory.run_batch(*shape)
        if clock is not None:
            clock.advance(seconds(shape[0]))

    return run


def test_batches_double_until_memory_runs_out_and_then_halve():
    """No monitor, as on a device whose memory cannot be read."""
    memory, ran = FakeMemory(1000), []
    clock = FakeClock()
    budget = auto_batch(run_on(memory, ran, clock), [3, 50], device="cpu", clock=clock)
    # 16 examples take 800 bytes and 32 would take 1600; a tenth of the tokens stays free.
    assert list(dict.fromkeys(ran)) == [(1, 50), (2, 50), (4, 50), (8, 50), (16, 50), (32, 50)]
    assert budget.max_items(np.array([[50], [10]])).tolist() == [14, 64]


def test_with_a_monitor_nothing_runs_that_would_not_fit():
    memory, ran = FakeMemory(1000, used_bytes=100), []
    budget = auto_batch(run_on(memory, ran), [50], memory=MemoryMonitor(source=memory))
    assert ran[-1] == (16, 50)  # 32 would take 1700 of 1000
    assert budget.max_items(np.array([[50]])).tolist() == [16]


@pytest.mark.parametrize(("margin", "num"), [(0.1, 16), (0.25, 8)])  # 16 take 800 bytes
def test_the_margin_is_left_free(margin, num):
    memory = FakeMemory(1000)
    budget = auto_batch(run_on(memory), [50], memory=MemoryMonitor(source=memory), margin=margin)
    assert budget.max_items(np.array([[50]])).tolist() == [num]


def test_several_axes_are_padded_to_the_longest_of_each():
    memory, ran = FakeMemory(10**6, bytes_of=lambda num, a, b: num * (a + b)), []
    budget = auto_batch(run_on(memory, ran), [[3, 9], [7, 2]], memory=MemoryMonitor(source=memory), max_items=8)
    assert ran[-1] == (8, 7, 9)
    assert budget.max_items(np.array([[7, 9]])).tolist() == [8]


def test_without_memory_to_read_batches_stop_where_throughput_does():
    clock, ran = FakeClock(), []
    # 1 second for 4 examples at once, then no faster per example.
    run = run_on(FakeMemory(10**9), ran, clock, lambda num: max(0.1, num * 0.025))
    auto_batch(run, [50], device="cpu", clock=clock)
    assert ran[-1] == (8, 50)


def test_no_more_examples_than_allowed():
    assert auto_batch(lambda shape: None, [5], device="cpu", max_items=3).max_items(np.array([[5]])).tolist() == [3]


def test_one_example_that_does_not_run_is_an_error():
    memory = FakeMemory(10)
    with pytest.raises(DoesNotFitError, match="not even one example of length 50 runs; shorten it"):
        auto_batch(run_on(memory), [50], device="cpu")


def test_other_errors_are_raised_as_they_are():
    def run(shape):
        raise KeyError("input_ids")

    with pytest.raises(KeyError, match="input_ids"):
        auto_batch(run, [50], device="cpu")


def test_a_margin_of_everything_is_refused():
    with pytest.raises(ArgumentError, match="margin"):
        auto_batch(lambda shape: None, [5], margin=1.0)


def test_torch_running_out_of_memory_counts():
    def run(shape):
        if shape[0] > 4:
            raise torch.OutOfMemoryError("out of memory")

    clock = FakeClock()

    def timed(shape):
        clock.advance(0.01)
        run(shape)

    assert auto_batch(timed, [10], device="cpu", clock=clock, margin=0.0).max_items(np.array([[10]])).tolist() == [4]


def test_a_processor_that_others_use_too_makes_no_batch_look_slow(monkeypatch):
    """The time of the process does not count the waiting, of which long steps have the most."""
    now, used = FakeClock(), FakeClock()
    monkeypatch.setattr("batchwright.step.calibration.finding.time.perf_counter", now)
    monkeypatch.setattr("batchwright.step.calibration.finding.time.process_time", used)

    def run(shape):
        seconds = 0.01 + 0.001 * shape[0]
        used.advance(seconds)
        now.advance(seconds if shape[0] < 4 else 10 * seconds)  # others take their turns

    assert largest_batch(run, [10], agreement=ALONE, device="cpu").max_items([[10]])[0] == 64


def test_a_function_that_computes_elsewhere_is_timed_by_the_clock():
    """The time of this process does not count what a server or another process does; here that takes far longer."""
    budget = auto_batch(lambda shape: time.sleep(0.01 * shape[0] ** 2), [10], device="cpu")
    assert budget.max_items([[10]])[0] == 2
