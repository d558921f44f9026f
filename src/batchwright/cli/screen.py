"""How the commands print: the width and characters of the screen, tables, bars, and numbers as text."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

# What a terminal without Unicode shows instead of the characters used here.
_PLAIN = str.maketrans(
    {"─": "-", "█": "#", "…": "...", "·": "-", "−": "-", "×": "x", "±": "+-", "²": "2", "³": "3", "¹": "^1", "→": "->"}  # noqa: RUF001
    | dict.fromkeys("▌▋▊▉", "#")
    | dict.fromkeys("▏▎▍", ".")
)

# Blocks of one to seven eighths: a bar ends in the nearest one.
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


@final
@dataclass(frozen=True, kw_only=True)
class Screen:
    """The width in characters, and whether only ASCII can be shown."""

    width: int = 80
    ascii_only: bool = False

    @classmethod
    def of_stdout(cls) -> Screen:
        """Return what standard output can show; 80 characters wide if it is not a terminal."""
        try:
            # Some terminals have the full block and not its eighths.
            "".join(map(chr, _PLAIN)).encode(sys.stdout.encoding or "ascii")
            ascii_only = False
        except (UnicodeEncodeError, LookupError):
            ascii_only = True
        return cls(width=max(40, shutil.get_terminal_size().columns), ascii_only=ascii_only)

    def show(self, lines: Iterable[str]) -> None:
        """Print lines, in ASCII if the screen has nothing else; what it cannot show becomes a question mark."""
        encoding = "ascii" if self.ascii_only else getattr(sys.stdout, "encoding", None) or "utf-8"
        for line in lines:
            shown = line.translate(_PLAIN) if self.ascii_only else line
            print(shown.encode(encoding, "replace").decode(encoding))

    def wrap(self, text: str, *, indent: str = "") -> list[str]:
        """Break a sentence into lines of at most 100 characters.

        >>> Screen(width=40).wrap("one sentence that is longer than the screen", indent="  ")
        ['one sentence that is longer than the', '  screen']
        """
        return textwrap.wrap(text, min(self.width, 100), subsequent_indent=indent, break_on_hyphens=False)


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out a table: the first column left, the others right, a rule under the header.

    >>> for line in render_table(["name", "count"], [["a", "1"], ["bc", "20"]]):
    ...     print(line)
    name  count
    ───────────
    a         1
    bc       20
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [_line(row, widths) for row in [header, *rows]]
    return [lines[0], "─" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


@final
@dataclass(frozen=True)
class Bin:
    """``count`` examples have a length from ``low`` to ``high``, both included."""

    low: int
    high: int
    count: int

    @property
    def label(self) -> str:
        """Return the range as text: ``8-11``, or ``8`` for a single length."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


def render_bars(bins: Sequence[Bin], *, width: int) -> list[str]:
    """Draw one line per bin: its range, a bar, the count. The longest bar fills the width.

    Args:
        bins: the bins.
        width: the characters per line.

    >>> for line in render_bars([Bin(1, 1, 2), Bin(2, 3, 4)], width=14):
    ...     print(line)
      1 ████     2
    2-3 ████████ 4
    """
    labels = [b.label for b in bins]
    counts = [f"{b.count:,}" for b in bins]
    label_width, count_width = max(map(len, labels)), max(map(len, counts))
    room = max(8, width - label_width - count_width - 2)
    most = max(b.count for b in bins)
    return [
        f"{label:>{label_width}} {_bar(b.count / most * room):<{room}} {count:>{count_width}}"
        for label, count, b in zip(labels, counts, bins, strict=True)
    ]


def _bar(cells: float) -> str:
    """Draw a bar of a fractional number of cells; a count above zero is always visible."""
    eighths = max(round(cells * 8), 1 if cells > 0 else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def percent(share: float) -> str:
    """Write a share with one decimal.

    >>> percent(0.2345)
    '23.4 %'
    """
    return f"{100 * share:.1f} %"


def times(ratio: float) -> str:
    """Write a ratio with two or three digits.

    >>> times(0.974), times(2.61), times(15.38)
    ('0.97x', '2.6x', '15x')
    """
    digits = 2 if ratio < 1.95 else 1 if ratio < 9.95 else 0
    return f"{ratio:.{digits}f}x"


def counted(number: int, one: str, several: str | None = None) -> str:
    """Write a number and what it counts.

    >>> counted(1, "batch", "batches"), counted(1200, "example")
    ('1 batch', '1,200 examples')
    """
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = row
    cells = [f"{first:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))]
    return "  ".join(cells).rstrip()
