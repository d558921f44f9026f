"""A histogram of lengths in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import IntArray

# Blocks of one to seven eighths: a bar ends in the nearest one.
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_MAX_BINS = 16
# If the longest is this many medians long, equal bins would put nearly all examples in the first two.
_HEAVY_TAIL = 8


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


def percentile(lengths: IntArray, percent: float) -> int:
    """Return the smallest length that at least ``percent`` of the examples do not exceed.

    >>> percentile(np.array([1, 2, 3, 4]), 50)
    2
    """
    return int(np.percentile(lengths, percent, method="inverted_cdf"))


def is_heavy_tailed(lengths: IntArray) -> bool:
    """Say whether the longest is more than eight times the median.

    >>> is_heavy_tailed(np.array([1, 1, 9])), is_heavy_tailed(np.array([1, 1, 8]))
    (True, False)
    """
    return int(lengths.max()) > _HEAVY_TAIL * percentile(lengths, 50)


def make_bins(lengths: IntArray) -> list[Bin]:
    """Cut lengths into at most 16 bins with round bounds; under a heavy tail the bins widen with the length.

    >>> make_bins(np.array([1, 2, 2, 3]))
    [Bin(low=1, high=1, count=1), Bin(low=2, high=2, count=2), Bin(low=3, high=3, count=1)]
    >>> [b.label for b in make_bins(np.array([3, 3, 3, 40]))]
    ['3', '4-5', '6-7', '8-11', '12-15', '16-23', '24-31', '32-47']
    """
    low, high = int(lengths.min()), int(lengths.max())
    bounds = _growing_bounds(low, high) if is_heavy_tailed(lengths) else _equal_bounds(low, high)
    counts, _ = np.histogram(lengths, bins=np.array([*bounds, bounds[-1] + 1]) - 0.5)
    counts = counts[:-1]  # the extra last bin keeps NumPy from including the right bound in the one before it
    return [Bin(a, b - 1, int(c)) for a, b, c in zip(bounds, bounds[1:], counts, strict=False)]


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


def _equal_bounds(low: int, high: int) -> list[int]:
    """Return bounds at multiples of the smallest of 1, 2, 5, 10, 20, 50, … that needs at most 16 bins."""
    steps = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    step = next(s for s in steps if high // s - low // s < _MAX_BINS)
    return [step * i for i in range(low // step, high // step + 2)]


def _growing_bounds(low: int, high: int) -> list[int]:
    """Return bounds at 1, 2, 3, 4, 6, 8, 12, … if 16 bins suffice, else at powers of 2, 4 or 16."""
    powers = [2**i for i in range(33)]
    ladders = [sorted({*powers, *(3 * p for p in powers)}), powers, powers[::2], powers[::4]]
    for ladder in ladders:
        start = max(i for i, bound in enumerate(ladder) if bound <= low)
        stop = min(i for i, bound in enumerate(ladder) if bound > high)
        if stop - start <= _MAX_BINS:
            break
    return ladder[start : stop + 1]
