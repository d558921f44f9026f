"""The seconds of an update: those of the device where it has its own clock, read only when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, final

import torch


class Event(Protocol):
    """A mark in the work of a device, as ``torch.cuda.Event(enable_timing=True)`` is once it was recorded."""

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
class Stopwatch:
    """Times pieces of work without waiting for them.

    The host only launches work on a CUDA device and runs ahead of it, so its own clock would tell the time of the
    launches. Marks in the device's queue tell when the work itself began and ended.

    Args:
        devices: that the work runs on; those that are not CUDA run with the host's clock.
        clock: the host's, in seconds that never go back.
        mark: puts a mark into the queue of a device.

    >>> from batchwright.testing import FakeClock
    >>> clock = FakeClock()
    >>> lap = Stopwatch([], clock=clock).start()
    >>> clock.advance(2.0)
    >>> lap.stop()
    >>> float(lap)
    2.0
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        *,
        clock: Callable[[], float] = time.perf_counter,
        mark: MarkNow = _mark_cuda,
    ) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._clock, self._mark = clock, mark

    def start(self) -> Lap:
        """Begin to time."""
        return Lap(self._devices, self._clock, self._mark)


@final
class Lap:
    """One piece of work; ``float(lap)`` waits for its end and returns its seconds, those of the slowest device."""

    def __init__(self, devices: Iterable[torch.device], clock: Callable[[], float], mark: MarkNow) -> None:
        self._clock, self._mark = clock, mark
        self._begun = [(device, mark(device)) for device in devices]
        self._ends: list[Event] = []
        self._seconds: float | None = None
        self._started = clock()

    def stop(self) -> None:
        """End it here; what the device has still to do counts."""
        if self._begun:
            self._ends = [self._mark(device) for device, _ in self._begun]
        else:
            self._seconds = self._clock() - self._started

    def __float__(self) -> float:
        if self._seconds is None:
            for end in self._ends:
                end.synchronize()
            pairs = zip(self._begun, self._ends, strict=True)
            self._seconds = max(begin.elapsed_time(end) for (_, begin), end in pairs) / 1000
            self._begun, self._ends = [], []  # marks are not kept longer than they are needed
        return self._seconds
