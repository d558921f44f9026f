"""Seconds of training: those of a processor of stated speed, or those that a stated model of a GPU gives each update.

A processor that other programs share is 10 to 20 % slower for some minutes, and the runs that are compared lie an hour
apart. So ``CpuClock`` times a piece of work that is always the same, ten times per second, and counts in seconds of a
processor that takes ``NOMINAL_SECONDS`` for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Protocol, final

import torch
import torch.nn.functional as F

from batchwright.lab.update_time import UpdateTime, named

# What the piece of work takes on the machine of the stored results while it does nothing else.
NOMINAL_SECONDS = 0.0009
_PROBE_EVERY = 0.1
_PROBES = 9  # whose median counts


class Clock(Protocol):
    """Seconds that count so far."""

    @property
    def seconds(self) -> float:
        """Return the seconds that count so far."""

    @property
    def stopwatch(self) -> float:
        """Return what a training would read on its own stopwatch, which knows nothing of stated speeds."""

    @property
    def time_of(self) -> Callable[[int, int], float] | None:
        """Return the seconds of some passes over some examples as a function, None where only a run can tell."""

    def start(self) -> None:
        """Start, or go on."""

    def pause(self) -> None:
        """Stand still, e.g. while the validation loss is taken."""

    def passed(self, *, passes: int, examples: int) -> None:
        """Note work that was done."""


def reference_seconds() -> float:
    """Return the seconds of the processor for a piece of work: the shortest of three, as interruptions only add."""
    return min(_time_reference() for _ in range(3))


def _time_reference() -> float:
    began = time.process_time()
    hidden = torch.linspace(-1, 1, 512 * 64).reshape(512, 64).requires_grad_()
    up, down = torch.linspace(-1, 1, 64 * 256).reshape(64, 256), torch.linspace(1, -1, 256 * 64).reshape(256, 64)
    F.layer_norm(F.gelu(hidden @ up) @ down, (64,)).square().sum().backward()
    return time.process_time() - began


@final
class CpuClock:
    """Seconds of this process on the processor, at a stated speed; other processes do not count.

    Args:
        reference: returns the seconds of the piece of work.
        read: returns the seconds of this process.
    """

    time_of = None

    def __init__(
        self, reference: Callable[[], float] = reference_seconds, read: Callable[[], float] = time.process_time
    ) -> None:
        self._reference, self._read = reference, read
        self._gone = self._raw = 0.0
        self._since: float | None = None
        self._probes = deque((reference() for _ in range(_PROBES)), maxlen=_PROBES)
        self._probed = self._read()

    @property
    def seconds(self) -> float:
        """Return the seconds that count so far."""
        return self._gone + self._running * NOMINAL_SECONDS / median(self._probes)

    @property
    def stopwatch(self) -> float:
        """Return the seconds of the processor as they are."""
        return self._raw + self._running

    @property
    def _running(self) -> float:
        return 0.0 if self._since is None else self._read() - self._since

    def start(self) -> None:
        """Start, or go on."""
        self._since = self._read()

    def pause(self) -> None:
        """Stand still."""
        self._gone, self._raw, self._since = self.seconds, self.stopwatch, None

    def passed(self, *, passes: int, examples: int) -> None:
        """Look now and then how fast the processor is; that time does not count."""
        if self._read() - self._probed < _PROBE_EVERY:
            return
        self.pause()
        self._probes.append(self._reference())
        self._probed = self._read()
        self.start()


@final
class ModelClock:
    """Seconds by a stated ``UpdateTime``: the same at every run, and bound by launches, as a CPU hardly is."""

    def __init__(self, model: UpdateTime) -> None:
        self._model = model
        self.seconds: float = 0.0

    @property
    def stopwatch(self) -> float:
        """Return the same seconds."""
        return self.seconds

    def time_of(self, passes: int, examples: int) -> float:
        """Return the seconds of some passes over some examples."""
        return self._model.seconds(passes=passes, examples=examples)

    def start(self) -> None:
        """Do nothing: only work that is noted takes time."""

    def pause(self) -> None:
        """Do nothing."""

    def passed(self, *, passes: int, examples: int) -> None:
        """Add the seconds of some passes over some examples."""
        self.seconds += self.time_of(passes, examples)


def make_clock(name: str) -> Clock:
    """Return the clock with a name: ``cpu``, or what ``lab.update_time.named`` takes."""
    return CpuClock() if name == "cpu" else ModelClock(named(name))


def kind_of(name: str) -> str:
    """Return ``"cpu"`` or ``"model"``."""
    return "cpu" if name == "cpu" else "model"
