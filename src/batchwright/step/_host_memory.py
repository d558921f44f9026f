"""The memory of this process in the eyes of the operating system."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, final

from .._optional import is_installed
from ..errors import MissingDependencyError
from ._sources import SampledMemory

_PROC = Path("/proc")
# The memory a container may have, in its two versions; absent where nothing limits it.
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@final
class CpuMemory(SampledMemory):
    """Resident memory of this process, and what the machine or its container can still give it.

    On Linux the kernel keeps the peak. Elsewhere psutil is read where it is installed and the peak is the highest
    reading; without psutil the resident memory is the most this process ever had.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mark_is_ours = sys.platform == "linux"

    @property
    def used_bytes(self) -> int:
        """Return the resident bytes."""
        if sys.platform == "linux":
            return _proc_bytes("self/status", "VmRSS")
        memory = _psutil()
        return _ever_resident_bytes() if memory is None else int(memory.Process().memory_info().rss)

    @property
    def peak_bytes(self) -> int:
        """Return the kernel's high-water mark, or the highest reading."""
        highest = super().peak_bytes
        # A mark that could not be reset is that of the whole life of the process.
        return max(highest, _proc_bytes("self/status", "VmHWM")) if self._mark_is_ours else highest

    @property
    def total_bytes(self) -> int:
        """Return what is resident and what is available together, or the limit of the container."""
        return min([self.used_bytes + _available_bytes(), *_container_limits()])

    def reset_peak(self) -> None:
        """Ask the kernel for a new high-water mark."""
        super().reset_peak()
        self._mark_is_ours = sys.platform == "linux" and _reset_mark()


def _proc_bytes(file: str, field: str) -> int:
    """Return a field of a file under /proc, which counts in KiB."""
    for line in (_PROC / file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0


def _reset_mark() -> bool:
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _available_bytes() -> int:
    if sys.platform == "linux":
        return _proc_bytes("meminfo", "MemAvailable")
    memory = _psutil()
    if memory is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - _ever_resident_bytes()
    return int(memory.virtual_memory().available)


def _container_limits() -> list[int]:
    texts = [Path(path).read_text().strip() for path in _CONTAINER_LIMITS if Path(path).is_file()]
    return [int(text) for text in texts if text.isdigit()]


def _psutil() -> Any:
    return importlib.import_module("psutil") if is_installed("psutil") else None


def _ever_resident_bytes() -> int:
    try:
        import resource
    except ImportError:
        raise MissingDependencyError("psutil is not installed; run: pip install psutil", name="psutil") from None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, others KiB
