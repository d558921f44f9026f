"""A progress bar that needs nothing installed: alive on a terminal, one closing line in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import TextIO, TypeVar, final

Item = TypeVar("Item")

SECONDS_BETWEEN_DRAWS = 0.1
BAR_WIDTH = 24
# A bar shorter than this tells nothing; a narrow terminal shows the numbers alone.
MIN_BAR_WIDTH = 5


@final
class ProgressBar:
    """Counts work that is done and shows it, with the rate and the time that is left.

    ``rate = done / elapsed`` and ``left = (total - done) / rate``, over the whole run: steady, not nervous.
    A terminal sees a bar, drawn at most ten times a second; any other stream sees the closing line alone.

    Args:
        label: what is being done, e.g. ``"measuring lengths"``.
        total: how much there is to do; None when nobody knows.
        enabled: False counts silently.
        stream: where to write; None is ``sys.stderr``.
        clock: seconds that never go back.

    >>> ticks = iter([0.0, 0.5, 1.0]).__next__
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
        self._is_live = self._stream is not None and self._stream.isatty()
        self._label = label
        self._total = total
        self._clock = clock
        self._start = clock()
        self._last_draw = float("-inf")
        self._width_drawn = 0
        self._is_closed = False
        self.done = 0

    def update(self, num: int = 1) -> None:
        """Count ``num`` more as done and redraw the bar if that is due."""
        self.done += num
        self._draw_if_due()

    def close(self, *, stopped: bool = False) -> None:
        """Write the closing line; a second call does nothing.

        Args:
            stopped: the work ended early; a count below the total says so by itself.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._stream is not None:
            stopped = stopped or (self._total is not None and self.done < self._total)
            self._write(self._closing_line(stopped))
            self._stream.write("\n")
            self._stream.flush()

    def __enter__(self) -> ProgressBar:
        if self._is_live:
            self._draw_if_due()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(stopped=kind is not None)

    def _draw_if_due(self) -> None:
        now = self._clock()
        if not self._is_live or self._is_closed or now - self._last_draw < SECONDS_BETWEEN_DRAWS:
            return
        self._last_draw = now
        self._write(self._live_line(now - self._start))

    def _write(self, line: str) -> None:
        """Write a line over the one before it."""
        assert self._stream is not None
        # Blanks rather than an escape sequence: some consoles print the sequence.
        blanks = " " * (self._width_drawn - len(line))
        self._stream.write(f"\r{line}{blanks}" if self._is_live else line)
        self._stream.flush()
        self._width_drawn = len(line)

    def _live_line(self, elapsed_seconds: float) -> str:
        assert self._stream is not None
        rate = self.done / elapsed_seconds if elapsed_seconds > 0 else 0.0
        columns = _columns(self._stream) - 1  # the last column makes some terminals wrap
        if self._total is None:
            return "  ".join([self._label, *_numbers(f"{self.done:,}", rate, elapsed_seconds, "")])[:columns]
        share = min(self.done / self._total, 1.0) if self._total else 1.0
        left = max(self._total - self.done, 0) / rate if rate else None
        head = f"{self._label} {int(share * 100):3d}%"
        tail = "  ".join(_numbers(f"{self.done:,}/{self._total:,}", rate, left, " left"))
        width = min(BAR_WIDTH, columns - len(head) - len(tail) - 3)
        bar = f" {_bar(share, width, self._stream)}" if width >= MIN_BAR_WIDTH else ""
        return f"{head}{bar}  {tail}"[:columns]

    def _closing_line(self, stopped: bool) -> str:
        elapsed = self._clock() - self._start
        done = f"{self.done:,}" if self._total is None or not stopped else f"{self.done:,} of {self._total:,}"
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
    """Yield the items of an iterable and show how far the loop has come.

    An item counts as done when the loop asks for the next one.

    Args:
        iterable: what to loop over.
        label: what the loop does.
        total: the number of items; None takes ``len(iterable)`` where there is one.
        enabled: False yields silently.
        stream: where to write; None is ``sys.stderr``.
        clock: seconds that never go back.

    Returns:
        An iterator over the same items.

    >>> ticks = iter([0.0, 1.0, 2.0, 4.0]).__next__
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


def _numbers(count: str, rate: float, seconds: float | None, suffix: str) -> list[str]:
    """Return the count, and the rate and a duration once there are any."""
    return [
        count,
        *([_rate(rate)] if rate else []),
        *([] if seconds is None else [_duration(seconds) + suffix]),
    ]


def _bar(share: float, width: int, stream: TextIO) -> str:
    full, empty = ("━", "─") if _can_show(stream, "━─") else ("#", "-")
    num_full = int(share * width)
    return full * num_full + empty * (width - num_full)


def _can_show(stream: TextIO, text: str) -> bool:
    # A stream in memory has no encoding and holds every character.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


def _rate(per_second: float) -> str:
    """Return a rate in three figures or so.

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
