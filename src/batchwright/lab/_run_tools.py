"""Small helpers of a run: a mean that begins again, and a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final


@final
@dataclass
class RunningMean:
    """A weighted mean that begins again when it is taken.

    >>> mean = RunningMean()
    >>> mean.add(1.0, 3)
    >>> mean.add(5.0, 1)
    >>> mean.take(), mean.take()
    (2.0, None)
    """

    total: float = 0.0
    weight: int = 0

    def add(self, value: float, weight: int) -> None:
        """Take one more value."""
        self.total += value * weight
        self.weight += weight

    def take(self) -> float | None:
        """Return the mean, None of nothing, and forget it."""
        mean = self.total / self.weight if self.weight else None
        self.total, self.weight = 0.0, 0
        return mean


@final
class Stopwatch:
    """Seconds inside its context, without pauses; those of the processor, which other processes do not lengthen.

    Args:
        clock: seconds that never go back.

    >>> clock = iter([0.0, 1.0, 5.0, 7.0]).__next__
    >>> watch = Stopwatch(clock)
    >>> with watch:
    ...     with watch.paused():
    ...         pass
    >>> watch.seconds  # 0 to 1 and 5 to 7
    3.0
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._total = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._total + (0.0 if self._started is None else self._clock() - self._started)

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, *error: object) -> None:
        self._total, self._started = self.seconds, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop for a while, if it runs."""
        was_running = self._started is not None
        if was_running:
            self.__exit__()
        try:
            yield
        finally:
            if was_running:
                self.__enter__()
