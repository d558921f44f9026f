"""MemoryMonitor and the sources it reads."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

from batchwright.errors import ArgumentError, MissingDependencyError
from batchwright.step.memory.monitor import MemoryMonitor
from batchwright.step.memory.sources import CpuMemory, NvmlMemory
from batchwright.testing import FakeMemory

MIB = 2**20


class Full:
    """A source whose device others have filled up."""

    used_bytes = peak_bytes = total_bytes = 0

    def reset_peak(self):
        pass


def test_fractions_are_shares_of_what_the_process_can_have():
    memory = FakeMemory(1000, used_bytes=250)
    monitor = MemoryMonitor(source=memory)
    memory.run_batch(500)
    assert (monitor.used_bytes, monitor.peak_bytes, monitor.total_bytes) == (250, 750, 1000)
    assert (monitor.fraction, monitor.peak_fraction) == (0.25, 0.75)
    monitor.reset_peak()
    assert monitor.peak_fraction == 0.25


def test_a_device_without_any_room_is_full():
    assert MemoryMonitor(source=Full()).fraction == 1.0


def test_what_is_no_source_is_refused():
    with pytest.raises(ArgumentError, match=r"used_bytes, peak_bytes, total_bytes and reset_peak\(\), got 3"):
        MemoryMonitor(source=3)


def test_a_device_and_a_source_together_are_refused():
    with pytest.raises(ArgumentError, match="a device or a source, not both"):
        MemoryMonitor("cpu", source=FakeMemory(10))


def test_a_device_whose_memory_nobody_can_read_is_refused():
    with pytest.raises(ArgumentError, match="the memory of device 'meta' cannot be read"):
        MemoryMonitor("meta")


def test_the_resident_memory_of_this_process_grows_with_what_it_holds():
    monitor = MemoryMonitor("cpu")
    before = monitor.used_bytes
    held = np.ones(64 * MIB, dtype=np.uint8)
    assert monitor.used_bytes - before > 48 * MIB  # not all: the allocator may have had some already
    assert 0 < monitor.fraction < 1
    assert held.all()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is Linux's")
def test_the_peak_remembers_memory_that_was_given_back_until_it_is_reset():
    monitor = MemoryMonitor("cpu")
    monitor.reset_peak()
    start = monitor.peak_bytes
    assert np.ones(256 * MIB, dtype=np.uint8).all()  # freed at once; only the kernel saw it
    assert monitor.peak_bytes - start > 192 * MIB
    monitor.reset_peak()
    assert monitor.peak_bytes - start < 128 * MIB


def test_the_limit_of_a_container_is_the_total(monkeypatch, tmp_path):
    limit, none = tmp_path / "memory.max", tmp_path / "none"
    limit.write_text("12345\n")
    none.write_text("max\n")
    monkeypatch.setattr("batchwright.step.memory.sources._CONTAINER_LIMITS", [str(none), str(tmp_path / "absent")])
    assert CpuMemory().total_bytes > 12345
    monkeypatch.setattr("batchwright.step.memory.sources._CONTAINER_LIMITS", [str(none), str(limit)])
    assert CpuMemory().total_bytes == 12345


def test_a_mark_that_cannot_be_reset_is_not_the_peak_since_then(monkeypatch):
    memory = CpuMemory()
    monkeypatch.setattr("batchwright.step.memory.sources._reset_mark", lambda: False)
    monkeypatch.setattr(CpuMemory, "used_bytes", property(lambda self: 7))
    memory.reset_peak()
    assert memory.peak_bytes == 7


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is not None, reason="nvidia-ml-py is installed")
def test_nvml_says_which_package_it_needs():
    with pytest.raises(MissingDependencyError, match="pip install nvidia-ml-py"):
        NvmlMemory()


@pytest.mark.needs_cuda
def test_tensors_on_the_device_count_and_their_peak_is_kept():
    monitor = MemoryMonitor("cuda")
    monitor.reset_peak()
    before = monitor.used_bytes
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert monitor.used_bytes - before == held.nbytes
    del held
    assert monitor.used_bytes == before
    assert monitor.peak_bytes - before == 64 * MIB
    monitor.reset_peak()
    assert monitor.peak_bytes == before


@pytest.mark.needs_cuda
def test_blocks_the_allocator_keeps_do_not_change_what_the_process_can_have():
    monitor = MemoryMonitor("cuda")
    torch.cuda.empty_cache()
    before = monitor.total_bytes
    held = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    # Other processes on the device may come and go a little; 256 MiB of our own must cancel out.
    assert abs(monitor.total_bytes - before) < 128 * MIB
    del held
    assert abs(monitor.total_bytes - before) < 128 * MIB


@pytest.mark.needs_cuda
def test_the_cap_of_the_process_is_the_total():
    device_bytes = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.125)
    try:
        assert MemoryMonitor("cuda").total_bytes == pytest.approx(device_bytes / 8, rel=0.01)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.needs_cuda
def test_without_a_device_the_accelerator_is_read():
    held = torch.zeros(MIB, device="cuda")
    assert MemoryMonitor().used_bytes == torch.cuda.memory_allocated() >= held.nbytes


@pytest.mark.needs_cuda
def test_nvml_sees_the_whole_device():
    pytest.importorskip("pynvml")
    held = torch.zeros(MIB, device="cuda")
    monitor = MemoryMonitor(source=NvmlMemory("cuda"))
    assert held.nbytes < monitor.used_bytes <= monitor.total_bytes
