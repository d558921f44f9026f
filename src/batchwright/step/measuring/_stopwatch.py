"""The seconds of work on a CUDA device, by marks in its queue, read only when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, final

import torch


class Event(Protocol):
    """A mark in the queue of a device, as ``torch.cuda.Event(enable_timing=True)`` is once it was recorded."""

    def synchronize(self) -> None:
        """Wait until the device has reached the mark."""

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds from this mark to another one."""


MarkNow: TypeAlias = Callable[[torch.device], Event]


def _mark_cuda(device: torch.device) -> Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@final
class Lap:
    """One piece of work on some devices: it begins here, and ``stop`` ends it.

    The host only launches work on a CUDA device and runs ahead of it, so its own clock would tell the time of the
    launches. Marks in the queues tell when the work itself began and ended. ``float(lap)`` waits for its end and
    returns its seconds, those of the slowest device.

    Args:
        devices: that the work runs on.
        mark: puts a mark into the queue of a device.
    """

    def __init__(self, devices: Sequence[torch.device], *, mark: MarkNow = _mark_cuda) -> None:
        self._devices, self._mark = devices, mark
        self._begins = [mark(device) for device in devices]
        self._ends: list[Event] = []
        self._seconds: float | None = None

    def stop(self) -> None:
        """End it here; what the devices have still to do of it counts."""
        self._ends = [self._mark(device) for device in self._devices]

    def __float__(self) -> float:
        if self._seconds is None:
            for end in self._ends:
                end.synchronize()
            pairs = zip(self._begins, self._ends, strict=True)
            self._seconds = max(begin.elapsed_time(end) for begin, end in pairs) / 1000
            self._begins, self._ends = [], []  # marks are not kept longer than they are needed
        return self._seconds
