"""The measurements themselves, on the CPU."""

from dataclasses import replace

import pytest
import torch

from batchwright.cli.doctor import examine as launching
from batchwright.cli.doctor.examine import (
    BACKENDS,
    _lengths,
    examine,
    look_at,
    measure_attention,
    measure_launch,
    sizes,
)
from batchwright.cli.doctor.records import CPU, GPU, effort_for
from batchwright.errors import DoesNotFitError

from .made import GIB, H200, LAPTOP

DEVICE = torch.device("cpu")
TINY = replace(CPU, width=16, num_layers=1, num_shapes=2, repeats=1, length=4, max_items=4)


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


def test_the_machine_says_what_it_is():
    machine = look_at(DEVICE)
    assert (machine.device, machine.num_devices, machine.has_bfloat16) == ("cpu", 1, True)
    assert 0 < machine.free_bytes <= machine.total_bytes
    assert machine.versions["torch"] == torch.__version__
    assert machine.num_cores >= 1
    assert machine.name


def test_no_two_kernels_share_a_length():
    lengths = [length for backend in BACKENDS for length in _lengths(backend, 6)]
    assert len(set(lengths)) == len(lengths)
    assert all(length % 8 == 0 for length in lengths)


def test_attention_reports_the_least_of_first_and_later_visits():
    # Two shapes, each a first visit and one more: 5 then 3 seconds, 4 then 2.
    found = measure_attention("default", DEVICE, TINY, clock=ticking(5.0, 3.0, 4.0, 2.0))
    assert (found.visits.first_seconds, found.visits.later_seconds) == (4.0, 2.0)
    assert found.takes_mask
    assert found.picks in BACKENDS


def test_a_kernel_that_is_not_here_has_no_visits():
    assert measure_attention("cudnn", DEVICE, TINY).visits is None
    assert measure_attention("math", DEVICE, TINY).visits is not None


def test_steps_double_and_noise_is_taken_out():
    # A warm-up of two runs, then for 1, 2 and 4 examples a first and a later run: 3, 2 and 8 seconds.
    clock = ticking(9.0, 9.0, 9.0, 3.0, 9.0, 2.0, 9.0, 8.0)
    found = measure_launch(DEVICE, replace(TINY, most_seconds=100.0), clock=clock)
    assert [row.tokens for row in found.rows] == [4, 8, 16]
    assert [row.seconds for row in found.rows] == [2.0, 2.0, 8.0]
    assert found.noise == 1.5
    assert found.model == "1 layers of width 16"


def test_a_long_step_is_the_last():
    done = []
    clock = ticking(9.0, 9.0, 9.0, 1.0, 9.0, 6.0)
    found = measure_launch(DEVICE, replace(TINY, most_seconds=5.0), clock=clock, done=lambda: done.append(1))
    assert [row.tokens for row in found.rows] == [4, 8]
    assert len(done) == 2


def test_memory_that_runs_out_ends_the_sizes(monkeypatch):
    def full_above(most):
        def run(shape):
            if shape[0] > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        return lambda device, effort: run

    monkeypatch.setattr(launching, "_training_step", full_above(2))
    assert [row.tokens for row in measure_launch(DEVICE, TINY).rows] == [4, 8]
    monkeypatch.setattr(launching, "_training_step", full_above(0))
    with pytest.raises(DoesNotFitError, match="one example of 4 tokens does not fit cpu"):
        measure_launch(DEVICE, TINY)


def test_the_effort_follows_the_machine():
    assert effort_for(LAPTOP, quick=False) == CPU
    assert effort_for(H200, quick=False) == GPU
    assert effort_for(replace(H200, free_bytes=4 * GIB), quick=False).width == 512
    assert len(sizes(effort_for(H200, quick=True))) < len(sizes(GPU)) == 11


def test_a_whole_run_leaves_random_state_and_threads_alone():
    torch.manual_seed(0)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = examine(quick=True, device="cpu", progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert [entry.backend for entry in found.attention] == list(BACKENDS)
    assert found.launch.rows[0].tokens == CPU.length
    assert found.launch.kernel_seconds > 0


def test_progress_is_shown_to_the_end(capsys):
    examine(quick=True, device="cpu")
    # Five kernels and sizes 1 to 32.
    assert "measuring: 11 in " in capsys.readouterr().err
