"""Which device is there, how much memory it has, and which versions run on it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from ..step import MemoryMonitor
from .records import Machine

_PACKAGES = ("batchwright", "numpy", "torch", "transformers", "numba")


def look_at(device: torch.device) -> Machine:
    """Describe a device and this process's share of it.

    >>> look_at(torch.device("cpu")).device
    'cpu'
    """
    monitor = MemoryMonitor(device)
    is_cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if is_cuda else None
    return Machine(
        device=device.type,
        name=_cpu_name() if properties is None else properties.name,
        num_devices=torch.cuda.device_count() if is_cuda else 1,
        total_bytes=monitor.total_bytes if properties is None else properties.total_memory,
        free_bytes=max(0, monitor.total_bytes - monitor.used_bytes),
        # Emulated bfloat16 is slower than none.
        has_bfloat16=torch.cuda.is_bf16_supported(including_emulation=False) if is_cuda else True,
        allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "",
        num_cores=_num_cores(),
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
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "unknown"
