"""Numbers as text, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence


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


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out a table: the first column left, the others right, a rule under the header.

    >>> for line in render_table(["name", "count"], [["a", "1"], ["bc", "20"]]):
    ...     print(line)
    name  count
    ───────────
    a         1
    bc       20
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [_line(row, widths) for row in [header, *rows]]
    return [lines[0], "─" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
