"""The sources of memory figures: CUDA, NVML, MPS and the host."""

from __future__ import annotations

import importlib
import os
import sys
from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch

from ..._optional import is_installed
from ...errors import MissingDependencyError

# The memory that a container may have, in versions 2 and 1 of control groups; the files are absent without a limit.
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@runtime_checkable
class MemorySource(Protocol):
    """The memory of one device as this process sees it; a protocol, so that a fake needs no torch.

    ``total_bytes`` is all that this process can have, including what it has now and without what others hold. So
    ``used_bytes / total_bytes`` near 1 means that the next allocation fails.
    """

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Return the bytes in use now."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes in use since ``reset_peak``."""

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Return the most bytes that could be in use."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin a new peak at the bytes in use now."""


@final
class CudaMemory(MemorySource):
    """Tensors of this process on a CUDA device, and the room that the driver and the process's own cap leave for them.

    Blocks that the allocator keeps for later count as free, since it hands them out again. ``total_bytes`` leaves out
    what other processes, CUDA contexts and NCCL hold; ``torch.cuda.set_per_process_memory_fraction`` caps it.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = _with_index(torch.device(device))

    @property
    def used_bytes(self) -> int:
        """Return the bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes of live tensors."""
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def total_bytes(self) -> int:
        """Return ``min(free + reserved, cap)``."""
        free, _ = torch.cuda.mem_get_info(self._device)
        device_bytes = torch.cuda.get_device_properties(self._device).total_memory
        cap = int(device_bytes * torch.cuda.get_per_process_memory_fraction(self._device))
        return min(free + torch.cuda.memory_reserved(self._device), cap)

    def reset_peak(self) -> None:
        """Reset the allocator's peak statistics."""
        torch.cuda.reset_peak_memory_stats(self._device)


class SampledMemory(MemorySource):
    """Memory without a record of its peak: the peak is the highest reading, so readings must be frequent."""

    def __init__(self) -> None:
        self._highest = 0

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Return the bytes in use now."""

    @property
    def peak_bytes(self) -> int:
        """Return the highest reading since ``reset_peak``, this one included."""
        self._highest = max(self._highest, self.used_bytes)
        return self._highest

    def reset_peak(self) -> None:
        """Forget earlier readings."""
        self._highest = self.used_bytes


@final
class NvmlMemory(SampledMemory):
    """The whole device with all its processes, as ``nvidia-smi`` shows it; needs the package nvidia-ml-py."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if torch.version.hip is None and not is_installed("pynvml"):
            raise MissingDependencyError("pynvml is not installed; run: pip install nvidia-ml-py", name="pynvml")
        super().__init__()
        self._device = _with_index(torch.device(device))

    @property
    def used_bytes(self) -> int:
        """Return the bytes that all processes hold."""
        return torch.cuda.device_memory_used(self._device)

    @property
    def total_bytes(self) -> int:
        """Return the size of the device."""
        return torch.cuda.mem_get_info(self._device)[1]


@final
class MpsMemory(SampledMemory):
    """Metal's memory. Its pool keeps what it once took, so the size of the pool is an upper bound of the peak."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes that the driver has given to this process, including cached blocks."""
        return torch.mps.driver_allocated_memory()

    @property
    def total_bytes(self) -> int:
        """Return the most bytes that Metal recommends."""
        return torch.mps.recommended_max_memory()

    def reset_peak(self) -> None:
        """Give cached blocks back, so that the pool grows to the next peak."""
        torch.mps.synchronize()
        torch.mps.empty_cache()
        super().reset_peak()


def _with_index(device: torch.device) -> torch.device:
    """Return the device with its number: not every function of ``torch.cuda`` takes ``"cuda"`` as the current one."""
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


@final
class CpuMemory(SampledMemory):
    """Resident memory of this process, and the memory that the machine or its container can still give it.

    psutil reads both if it is installed. By hand is only what psutil cannot tell: the limit of a container, and on
    Linux the peak, which the kernel keeps. Without psutil Linux is read from /proc; elsewhere the resident memory is
    then the most that this process ever had.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mark_is_ours = sys.platform == "linux"

    @property
    def used_bytes(self) -> int:
        """Return the resident bytes."""
        return _resident_bytes()

    @property
    def peak_bytes(self) -> int:
        """Return the kernel's high-water mark, or the highest reading."""
        highest = super().peak_bytes
        # A mark that could not be reset is that of the whole life of the process.
        return max(highest, _proc_bytes("self/status", "VmHWM")) if self._mark_is_ours else highest

    @property
    def total_bytes(self) -> int:
        """Return the resident and the available bytes together, or the limit of the container if that is lower."""
        return min([_resident_bytes() + _available_bytes(), *_container_limits()])

    def reset_peak(self) -> None:
        """Ask the kernel for a new high-water mark."""
        super().reset_peak()
        self._mark_is_ours = sys.platform == "linux" and _reset_mark()


def _resident_bytes() -> int:
    psutil = _psutil()
    if psutil is not None:
        return int(psutil.Process().memory_info().rss)
    return _proc_bytes("self/status", "VmRSS") if sys.platform == "linux" else _most_resident_bytes()


def _available_bytes() -> int:
    psutil = _psutil()
    if psutil is not None:
        return int(psutil.virtual_memory().available)
    if sys.platform == "linux":
        return _proc_bytes("meminfo", "MemAvailable")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - _most_resident_bytes()


def _most_resident_bytes() -> int:
    try:
        import resource
    except ImportError:
        raise MissingDependencyError("psutil is not installed; run: pip install psutil", name="psutil") from None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, others KiB


@cache
def _psutil() -> Any:
    return importlib.import_module("psutil") if is_installed("psutil") else None


def _proc_bytes(file: str, field: str) -> int:
    """Return a field of a file under /proc, which counts in KiB."""
    lines = Path("/proc", file).read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _reset_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # what 5 does: man 5 proc_pid_clear_refs
    except OSError:
        return False
    return True


def _container_limits() -> list[int]:
    texts = [Path(path).read_text().strip() for path in _CONTAINER_LIMITS if Path(path).is_file()]
    return [int(text) for text in texts if text.isdigit()]
