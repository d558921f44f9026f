"""MemoryMonitor: how full a device is, now and at its peak."""

from __future__ import annotations

from typing import final

import torch

from ...errors import ArgumentError
from .sources import CpuMemory, CudaMemory, MemorySource, MpsMemory


@final
class MemoryMonitor:
    """Read the memory of a device: the bytes in use, their peak, and their share of what this process can have.

    ``fraction = used_bytes / total_bytes`` and ``peak_fraction = peak_bytes / total_bytes``, from 0 to 1. What other
    processes hold is not part of ``total_bytes``, so a fraction near 1 means that the next allocation fails.

    - CUDA: live tensors of this process. The total is what the driver has free plus what the allocator has reserved,
      at most the cap of ``torch.cuda.set_per_process_memory_fraction``.
    - MPS: the pool of the process. The total is the recommended maximum.
    - CPU: resident memory. The total adds what the machine or its container has left.

    Args:
        device: ``"cuda:0"``, ``"mps"``, ``"cpu"`` or a ``torch.device``; None is the accelerator that torch finds, else
            the CPU.
        source: any ``MemorySource`` instead, such as ``NvmlMemory("cuda")`` or ``testing.FakeMemory``.

    >>> from batchwright.testing import FakeMemory
    >>> memory = FakeMemory(1000, used_bytes=200)
    >>> monitor = MemoryMonitor(source=memory)
    >>> memory.run_batch(8, 50)
    >>> monitor.fraction, monitor.peak_fraction, monitor.peak_bytes
    (0.2, 0.6, 600)
    """

    def __init__(self, device: torch.device | str | None = None, *, source: MemorySource | None = None) -> None:
        if device is not None and source is not None:
            raise ArgumentError("give a device or a source, not both; a source knows its own device")
        if source is not None and not isinstance(source, MemorySource):
            raise ArgumentError(
                f"source must have used_bytes, peak_bytes, total_bytes and reset_peak(), got {source!r}"
            )
        self._source = _source_of(device) if source is None else source

    @property
    def used_bytes(self) -> int:
        """Return the bytes in use now."""
        return self._source.used_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes in use since ``reset_peak``."""
        return self._source.peak_bytes

    @property
    def total_bytes(self) -> int:
        """Return the most bytes that this process could have in use now."""
        return self._source.total_bytes

    @property
    def fraction(self) -> float:
        """Return the share in use now."""
        return _share(self.used_bytes, self.total_bytes)

    @property
    def peak_fraction(self) -> float:
        """Return the share in use at the peak."""
        return _share(self.peak_bytes, self.total_bytes)

    def reset_peak(self) -> None:
        """Begin a new peak at the bytes in use now."""
        self._source.reset_peak()

    def __repr__(self) -> str:
        return f"MemoryMonitor({type(self._source).__name__}, {self.fraction:.3f} of {self.total_bytes} bytes in use)"


def _share(num_bytes: int, total_bytes: int) -> float:
    return min(1.0, num_bytes / total_bytes) if total_bytes > 0 else 1.0


def _source_of(device: torch.device | str | None) -> MemorySource:
    found = torch.device(_default_device() if device is None else device)
    if found.type == "cuda":
        return CudaMemory(found)
    if found.type == "mps":
        return MpsMemory()
    if found.type == "cpu":
        return CpuMemory()
    raise ArgumentError(f"the memory of device {str(found)!r} cannot be read; use cuda, mps or cpu, or pass source=")


def _default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
