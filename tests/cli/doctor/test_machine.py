"""The machine: what it is, and how busy it is."""

import time

import pytest
import torch

from batchwright.cli.doctor.machine import clock_for, look_at, wall_per_cpu
from batchwright.cli.doctor.records import Load

DEVICE = torch.device("cpu")


def test_the_machine_says_what_it_is():
    machine = look_at(DEVICE)
    assert (machine.device, machine.num_devices, machine.has_bfloat16) == ("cpu", 1, True)
    assert 0 < machine.free_bytes <= machine.total_bytes
    assert machine.versions["torch"] == torch.__version__
    assert machine.num_cores >= 1
    assert machine.name


@pytest.mark.parametrize(("share", "busy"), [(1.0, False), (0.9, False), (0.5, True), (0.25, True)])
def test_a_loop_that_gets_a_share_of_the_processor_tells_it(share, busy):
    # Each look at the processor time is a tick of it, in which 1 / share ticks pass on the wall.
    ticks = iter(range(10**6))
    state = {"cpu": 0.0}

    def cpu_clock():
        state["cpu"] = next(ticks) / 1000
        return state["cpu"]

    found = wall_per_cpu(0.05, clock=lambda: state["cpu"] / share, cpu_clock=cpu_clock)
    assert found == pytest.approx(1 / share, rel=0.05)
    assert Load(wall_per_cpu=found).is_busy == busy


def test_steps_on_a_cpu_are_timed_by_what_the_process_used():
    clock = clock_for(DEVICE)
    if clock is not time.process_time:
        pytest.skip("this system counts processor time in coarse steps")
    start = clock()
    time.sleep(0.05)
    assert clock() - start < 0.04
    assert clock_for(torch.device("cuda")) is time.perf_counter
