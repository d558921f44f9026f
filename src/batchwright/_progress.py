"""A progress bar: on a terminal tqdm's, or a plain count where tqdm is not installed; one closing line everywhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from importlib import import_module
from types import TracebackType
from typing import Any, TextIO, TypeVar, final

Item = TypeVar("Item")

# Of a count without tqdm: how long a line stays before the next, and the most of it that fits on one line.
_SECONDS_SHOWN = 0.2
_MAX_WIDTH = 79


@final
class ProgressBar:
    """Counts finished work, shows it on a terminal, and ends with one line in any stream.

    Args:
        label: what is being done, e.g. ``"measuring lengths"``.
        total: how much there is to do; None if unknown.
        enabled: False counts silently.
        stream: where to write; None is ``sys.stderr``.
        clock: seconds that never go back, for the closing line.

    >>> ticks = iter([0.0, 1.0]).__next__
    >>> with ProgressBar(label="counting", total=2, stream=sys.stdout, clock=ticks) as bar:
    ...     bar.update(2)
    counting: 2 in 1.0 s, 2.00/s
    """

    def __init__(
        self,
        *,
        label: str,
        total: int | None = None,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        # A program without a console has no stderr at all.
        self._stream = stream if enabled and stream is not None else None
        self._bar = None if self._stream is None else _live_bar(self._stream, label, total, clock)
        self._label = label
        self._total = total
        self._clock = clock
        self._start = clock()
        self._is_closed = False
        self.done = 0

    def update(self, num: int = 1) -> None:
        """Count ``num`` more as done."""
        self.done += num
        if self._bar is not None:
            self._bar.update(num)

    def doing(self, what: str) -> None:
        """Show beside the bar which part of the work is under way."""
        if self._bar is not None and self._stream is not None:
            self._bar.set_postfix_str(_writable(what, self._stream))

    def close(self, *, stopped: bool = False) -> None:
        """Replace the bar with the closing line; a second call does nothing.

        Args:
            stopped: whether the work ended early; a count below the total implies it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._bar is not None:
            self._bar.close()
        if self._stream is not None:
            stopped = stopped or (self._total is not None and self.done < self._total)
            self._stream.write(_writable(self._closing_line(stopped), self._stream) + "\n")
            self._stream.flush()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(stopped=kind is not None)

    def _closing_line(self, stopped: bool) -> str:
        elapsed = self._clock() - self._start
        done = f"{self.done:,} of {self._total:,}" if stopped and self._total is not None else f"{self.done:,}"
        what = f"stopped at {done} after" if stopped else f"{done} in"
        rate = f", {_rate(self.done / elapsed)}" if elapsed > 0 and self.done else ""
        return f"{self._label}: {what} {_duration(elapsed)}{rate}"


def progress(
    iterable: Iterable[Item],
    *,
    label: str,
    total: int | None = None,
    enabled: bool = True,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """Yield the items of an iterable and show the progress of the loop.

    An item counts as done when the loop asks for the next one.

    Args:
        iterable: what to loop over.
        label: what the loop does.
        total: the number of items; None takes ``len(iterable)`` if it has a length.
        enabled: False yields silently.
        stream: where to write; None is ``sys.stderr``.
        clock: seconds that never go back, for the closing line.

    Returns:
        An iterator over the same items.

    >>> ticks = iter([0.0, 4.0]).__next__
    >>> [x * x for x in progress([1, 2], label="squaring", stream=sys.stdout, clock=ticks)]
    squaring: 2 in 4.0 s, 0.50/s
    [1, 4]
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    with ProgressBar(label=label, total=total, enabled=enabled, stream=stream, clock=clock) as bar:
        for item in iterable:
            yield item
            bar.update()


@final
class _Count:
    """One line that is written again and again: what is done of how much. It has the methods of tqdm that are used."""

    def __init__(self, stream: TextIO, label: str, total: int | None, clock: Callable[[], float]) -> None:
        self._stream, self._label, self._total, self._clock = stream, label, total, clock
        self._done, self._what, self._shown, self._width = 0, "", -math.inf, 0
        self._show()

    def update(self, num: int) -> None:
        self._done += num
        if self._clock() >= self._shown + _SECONDS_SHOWN:
            self._show()

    def set_postfix_str(self, what: str) -> None:
        self._what = what
        self._show()

    def close(self) -> None:
        self._write("")
        self._stream.write("\r")

    def _show(self) -> None:
        self._shown = self._clock()
        of = "" if self._total is None else f" of {self._total:,}"
        self._write(_writable(f"{self._label}: {self._done:,}{of} {self._what}".rstrip(), self._stream)[:_MAX_WIDTH])

    def _write(self, line: str) -> None:
        self._stream.write(f"\r{line:<{self._width}}")
        self._stream.flush()
        self._width = len(line)


def _live_bar(stream: TextIO, label: str, total: int | None, clock: Callable[[], float]) -> Any:
    """Return a bar that removes itself at the end, tqdm's if it is installed; None if the stream is not a terminal."""
    if not stream.isatty():
        return None
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        return _Count(stream, label, total, clock)
    # Without its monitor thread, because some loops start processes.
    kind = type("Bar", (tqdm,), {"monitor_interval": 0})
    return kind(total=total, desc=_writable(label, stream), file=stream, leave=False, dynamic_ncols=True)


def _writable(line: str, stream: TextIO) -> str:
    """Replace the characters that the stream's encoding lacks; a stream in memory takes all of them."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return line.encode(encoding, "replace").decode(encoding)


def _rate(per_second: float) -> str:
    """Return a rate with about three digits.

    >>> _rate(0.25), _rate(42.4), _rate(1234), _rate(5_600_000)
    ('0.25/s', '42/s', '1.2k/s', '5.6M/s')
    """
    if per_second < 10:
        return f"{per_second:.2f}/s"
    if per_second < 1000:
        return f"{per_second:.0f}/s"
    scale, unit = (1e3, "k") if per_second < 1e6 else (1e6, "M")
    return f"{per_second / scale:.1f}{unit}/s"


def _duration(seconds: float) -> str:
    """Return a duration as people say it.

    >>> _duration(3.21), _duration(42.4), _duration(65), _duration(3723)
    ('3.2 s', '42 s', '1:05', '1:02:03')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"
