"""Seconds of training: those of the processor, or those that a stated model of a GPU gives each update."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, final

from batchwright.lab.update_time import UpdateTime, named


class Clock(Protocol):
    """Seconds that count so far."""

    @property
    def seconds(self) -> float:
        """Return the seconds that count so far."""

    @property
    def time_of(self) -> Callable[[int, int], float] | None:
        """Return the seconds of some passes over some examples as a function, None where only a run can tell."""

    def start(self) -> None:
        """Start, or go on."""

    def pause(self) -> None:
        """Stand still, e.g. while the validation loss is taken."""

    def passed(self, *, passes: int, examples: int) -> None:
        """Note work that was done."""


@final
class CpuClock:
    """Seconds of this process on the processor; other processes do not count."""

    def __init__(self) -> None:
        self._gone = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds that count so far."""
        return self._gone + (0.0 if self._since is None else time.process_time() - self._since)

    time_of = None

    def start(self) -> None:
        """Start, or go on."""
        self._since = time.process_time()

    def pause(self) -> None:
        """Stand still."""
        self._gone, self._since = self.seconds, None

    def passed(self, *, passes: int, examples: int) -> None:
        """Do nothing: the processor counts by itself."""


@final
class ModelClock:
    """Seconds by a stated ``UpdateTime``: the same at every run, and bound by launches, as a CPU hardly is."""

    def __init__(self, model: UpdateTime) -> None:
        self._model = model
        self.seconds: float = 0.0

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
