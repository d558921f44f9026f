"""The measurements themselves, on the CPU."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from batchwright.cli.doctor.advice import advise
from batchwright.cli.doctor.examine import BACKENDS, _lengths, examine, measure_attention, measure_launch, sizes
from batchwright.cli.doctor.records import CPU, GPU, effort_for
from batchwright.errors import DoesNotFitError

from .made import GIB, H200, LAPTOP, ON_H200

DEVICE = torch.device("cpu")
TINY = replace(CPU, width=16, num_layers=1, num_shapes=2, repeats=1, rounds=2, length=4, max_items=4)


def ticking(*seconds):
    """A clock in which the calls between two readings take these seconds, then one second each."""
    state = {"now": 0.0, "reads": 0}

    def clock():
        place, inside = divmod(state["reads"], 2)
        if inside:
            state["now"] += seconds[place] if place < len(seconds) else 1.0
        state["reads"] += 1
        return state["now"]

    return clock


class World:
    """Time that passes only in steps: ``seconds(num_items)`` each, stretched by other work now and then."""

    def __init__(self, seconds, *, noise=0.0, seed=0):
        self.now = 0.0
        self.steps = []
        self._seconds, self._noise = seconds, noise
        self._random = np.random.default_rng(seed)

    def clock(self):
        return self.now

    def run(self, shape):
        self.steps.append(shape[0])
        self.now += self._seconds(shape[0]) * (1 + self._noise * self._random.exponential())

    def measure(self, **effort):
        return measure_launch(DEVICE, replace(LARGER, **effort), run=self.run, clock=self.clock)


# A step takes at least 10 s, and 2 s per example from five on.
def grown(num_items):
    return max(10.0, 2.0 * num_items)


LARGER = replace(TINY, max_items=64, rounds=5, most_seconds=1e9)


def sizes_advice(launch):
    return next(advice for advice in advise(replace(ON_H200, machine=LAPTOP, launch=launch)) if advice.topic == "sizes")


def test_no_two_kernels_share_a_length():
    lengths = [length for backend in BACKENDS for length in _lengths(backend, 6)]
    assert len(set(lengths)) == len(lengths)
    assert all(length % 8 == 0 for length in lengths)


def test_attention_reports_the_least_of_first_and_later_visits():
    # Two shapes, each a first visit and one more: 5 then 3 seconds, 4 then 2.
    found = measure_attention("default", DEVICE, TINY, clock=ticking(5.0, 3.0, 4.0, 2.0))
    assert (found.visits.first_seconds, found.visits.later_seconds) == (4.0, 2.0)
    assert [(one.first_seconds, one.later_seconds) for one in found.repeats] == [(5.0, 3.0), (4.0, 2.0)]
    assert found.takes_mask
    assert found.picks in BACKENDS


def test_a_kernel_that_is_not_here_has_no_visits():
    assert measure_attention("cudnn", DEVICE, TINY).visits is None
    assert measure_attention("math", DEVICE, TINY).visits is not None


def test_every_size_is_timed_in_turn_round_after_round():
    world = World(grown)
    found = world.measure(max_items=4, rounds=3)
    assert [row.tokens for row in found.rows] == [4, 8, 16]
    # A warm-up, each size once, then three rounds of all sizes; a measurement is two steps.
    assert world.steps == [1, 1] + [1, 1, 2, 2, 4, 4] * 4
    assert len(found.rounds) == 3
    assert found.model == "1 layers of width 16"


def test_without_noise_all_rounds_agree():
    found = World(grown).measure()
    assert (found.noise, found.spread) == (1.0, 0.0)
    # 4 examples take 10 s, 8 take 16; at 8 the throughput, 0.5 examples a second, is the best.
    assert found.flat_range == (16, 16)
    assert found.knee_range == (32, 32)
    assert sizes_advice(found).code == "bw.MaxTokens(32)"


@pytest.mark.parametrize("noise", [0.02, 0.3, 2.0])
def test_no_two_runs_contradict_each_other_however_noisy(noise):
    ranges = []
    for seed in range(40):
        found = World(grown, noise=noise, seed=seed).measure()
        advice = sizes_advice(found)
        if advice.code:
            ranges.append(found.knee_range)
            assert advice.code == f"bw.MaxTokens({found.knee_range[1]})"
        else:
            assert advice.text.startswith("Too busy to say which batches are too small")
    # What is stated contains the truth, 32, so any two of the answers have it in common.
    assert all(low <= 32 <= high for low, high in ranges)
    if noise < 0.1:
        assert len(ranges) == 40
    if noise > 1:
        assert len(ranges) < 40


def test_one_disturbed_round_is_not_hidden_by_the_median():
    # While all but the two largest sizes ran for the second time, in steps 30 to 43, something else ran too.
    world = World(grown)
    numbers = iter(range(10**6))

    def run(shape):
        world.run(shape)
        world.now += 1000.0 * (30 <= next(numbers) < 44 and shape[0] <= 16)

    found = measure_launch(DEVICE, LARGER, run=run, clock=world.clock)
    # The median of the rounds is right, but that round alone says 32 examples.
    assert found.knee_tokens == 32
    assert found.knee_range is None
    assert sizes_advice(found).text.startswith("Too busy to say which batches are too small")


def test_a_size_that_takes_longer_than_a_larger_one_is_noise():
    found = World(lambda num_items: {1: 3.0, 2: 2.0, 4: 8.0}[num_items]).measure(max_items=4)
    assert [row.seconds for row in found.rows] == [2.0, 2.0, 8.0]
    assert found.noise == 1.5


def test_a_long_step_is_the_last():
    done = []
    world = World(grown)
    effort = replace(LARGER, most_seconds=15.0, rounds=2)
    found = measure_launch(DEVICE, effort, run=world.run, clock=world.clock, done=lambda: done.append(1))
    # 8 examples take 16 s.
    assert [row.tokens for row in found.rows] == [4, 8, 16, 32]
    assert len(done) == 4 + 2


def test_memory_that_runs_out_ends_the_sizes():
    def full_above(most):
        def run(shape):
            if shape[0] > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        return run

    assert [row.tokens for row in measure_launch(DEVICE, TINY, run=full_above(2)).rows] == [4, 8]
    with pytest.raises(DoesNotFitError, match="one example of 4 tokens does not fit cpu"):
        measure_launch(DEVICE, TINY, run=full_above(0))


def test_memory_that_runs_out_later_drops_the_size():
    calls = []

    def run(shape):
        calls.append(shape)
        if shape[0] == 4 and len(calls) > 12:  # others have taken the memory since
            raise torch.OutOfMemoryError("CUDA out of memory.")

    found = measure_launch(DEVICE, TINY, run=run)
    assert [row.tokens for row in found.rows] == [4, 8]
    assert {len(seconds) for seconds in found.rounds} == {2}


def test_the_effort_follows_the_machine():
    assert effort_for(LAPTOP, quick=False) == CPU
    assert effort_for(H200, quick=False) == GPU
    assert effort_for(replace(H200, free_bytes=4 * GIB), quick=False).width == 512
    assert len(sizes(effort_for(H200, quick=True))) < len(sizes(GPU)) == 11


def test_a_whole_run_leaves_random_state_and_threads_alone():
    torch.manual_seed(0)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = examine("cpu", quick=True, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert [entry.backend for entry in found.attention] == list(BACKENDS)
    assert found.launch.rows[0].tokens == CPU.length
    assert found.launch.kernel_seconds > 0


def test_progress_is_shown_to_the_end(capsys):
    examine("cpu", quick=True)
    # Five kernels, sizes 1 to 32, and seven rounds.
    assert "measuring: 18 in " in capsys.readouterr().err


def test_a_busy_machine_gives_one_answer_or_says_that_it_is_too_busy(shared_core):
    runs = [examine("cpu", quick=True, progress=False) for _ in range(2)]
    found = [{advice.topic: advice for advice in advise(run)} for run in runs]
    assert all(run.load.is_busy and "noise" in advice for run, advice in zip(runs, found, strict=True))
    stated = [run.launch.knee_range for run, advice in zip(runs, found, strict=True) if advice["sizes"].code]
    if len(stated) == 2:
        assert max(low for low, _ in stated) <= min(high for _, high in stated)


@pytest.fixture
def shared_core():
    """Share one core with a process that never rests."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not let a process choose its cores")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        os.sched_setaffinity(0, before)
