"""Look at the machine, run every measurement, and gather the findings."""

from __future__ import annotations

import os

import torch

from ..._machine import num_cores, one_thread, processor_name, versions_of
from ..._progress import ProgressBar
from ...step import MemoryMonitor
from .attention import BACKENDS, measure_attention
from .launch import measure_launch, sizes
from .records import Findings, Machine, effort_for


def examine(*, quick: bool = False, device: torch.device | str | None = None, progress: bool = True) -> Findings:
    """Measure a device: attention kernels with new and known shapes, and training steps of many sizes.

    The random state stays as it was. A CPU is measured with one thread: on shared cores, several threads mostly wait
    for each other, and their times vary more.

    Args:
        quick: measure fewer shapes and sizes.
        device: None is the accelerator that torch finds, else the CPU.
        progress: show a progress bar.

    Returns:
        What was measured; ``advise`` says what it means.
    """
    chosen = default_device() if device is None else torch.device(device)
    machine = look_at(chosen)
    effort = effort_for(machine, quick=quick)
    total = len(BACKENDS) + len(sizes(effort))
    devices = [chosen] if chosen.type == "cuda" else []
    bar = ProgressBar(label="measuring", total=total, enabled=progress)
    with torch.random.fork_rng(devices), one_thread(), bar:
        attention = []
        for backend in BACKENDS:
            attention.append(measure_attention(backend, chosen, effort))
            bar.update()
        launch = measure_launch(chosen, effort, done=bar.update)
        bar.update(total - bar.done)  # sizes that took too long or did not fit were left out
    return Findings(machine=machine, attention=tuple(attention), launch=launch)


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
