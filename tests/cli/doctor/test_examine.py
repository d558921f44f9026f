"""The measurements themselves, on the CPU."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from batchwright.cli.doctor.advice import advise
from batchwright.cli.doctor.examine import BACKENDS, _lengths, examine, measure_attention
from batchwright.cli.doctor.records import CPU, GPU, effort_for
from batchwright.cli.doctor.steps import sizes

from .made import GIB, H200, LAPTOP

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


def test_the_effort_follows_the_machine():
    assert effort_for(LAPTOP, quick=False) == CPU
    assert effort_for(H200, quick=False) == GPU
    assert effort_for(replace(H200, free_bytes=4 * GIB), quick=False).width == 512
    assert len(sizes(effort_for(H200, quick=True))) < len(sizes(GPU)) == 11
    assert [GPU.length * num for num in GPU.graph_items] == [1024, 2048, 4096, 8192, 16384, 32768]
    assert effort_for(H200, quick=True).graph_items == (16, 64, 256)
    assert CPU.graph_items == ()


def test_a_whole_run_leaves_random_state_and_threads_alone():
    torch.manual_seed(0)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = examine("cpu", quick=True, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert [entry.backend for entry in found.attention] == list(BACKENDS)
    assert found.launch.rows[0].tokens == CPU.length
    assert found.launch.kernel_seconds > 0
    assert found.graphs.problem.startswith("CUDA graphs need a CUDA device")
    assert found.encoding == found.decoding == found.graphs


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
