"""The machine itself: its device and software, the clock to time it with, and how busy it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from ..._machine import num_cores, processor_name, versions_of
from ...step import MemoryMonitor
from .records import Machine

# The shortest steps take about a millisecond; Windows counts processor time in steps of 16.
_FINE_SECONDS = 1e-5


def look_at(device: torch.device) -> Machine:
    """Describe a device and how much of it this process can use.

    >>> look_at(torch.device("cpu")).device
    'cpu'
    """
    monitor = MemoryMonitor(device)
    is_cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if is_cuda else None
    return Machine(
        device=device.type,
        name=processor_name() if properties is None else properties.name,
        num_devices=torch.cuda.device_count() if is_cuda else 1,
        total_bytes=monitor.total_bytes if properties is None else properties.total_memory,
        free_bytes=max(0, monitor.total_bytes - monitor.used_bytes),
        # Emulated bfloat16 is slower than none.
        has_bfloat16=torch.cuda.is_bf16_supported(including_emulation=False) if is_cuda else True,
        allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "",
        num_cores=num_cores(),
        versions=_versions(),
    )


def default_device() -> torch.device:
    """Return the accelerator that torch finds, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _versions() -> dict[str, str | None]:
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        **versions_of("batchwright", "numpy", "torch", "transformers", "numba"),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def wall_per_cpu(
    seconds: float = 0.05,
    *,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.thread_time,
) -> float:
    """Return how many times its processor time a loop takes that waits for nothing; 1 on a quiet machine.

    Args:
        seconds: the processor time of the loop.
        clock: seconds that never go back.
        cpu_clock: the processor time of this thread in seconds.
    """
    start, cpu_start = clock(), cpu_clock()
    while cpu_clock() < cpu_start + seconds:
        pass
    return max(1.0, (clock() - start) / (cpu_clock() - cpu_start))


def clock_for(device: torch.device) -> Callable[[], float]:
    """Return the clock for steps on a device: processor time on a CPU, where it is fine enough, else the wall's."""
    is_fine = time.get_clock_info("process_time").resolution <= _FINE_SECONDS
    return time.process_time if device.type == "cpu" and is_fine else time.perf_counter
