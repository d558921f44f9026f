"""Cut an ordered sequence of examples into batches, each as large as the budget allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..._types import IntArray
from .base import Groups, Problem, SizeRounding, to_units

_LEVELS = 7
_MOST_LIFTED = (1 << _LEVELS) - 1
_WORTH_LIFTING = 96  # from about this size of batch on, counting from every place costs more than it saves
_CHUNK = 4096


def cut_falling(
    units: npt.NDArray[np.int32], start: int, stop: int, size_at: Mapping[int, int], starts: list[int]
) -> int:
    """Cut lengths that fall: the first is the longest, so its size is the size of the batch.

    Args:
        units: lengths in units of padding, falling within ``start..stop``.
        start: where to begin.
        stop: where to end.
        size_at: items that fit at each unit.
        starts: receives where each full batch starts.

    Returns:
        Where the examples that fill no batch begin.
    """
    view = memoryview(units)  # type: ignore[arg-type]  # far faster to index than the array
    place = start
    while place < stop:
        after = place + size_at[view[place]]
        if after > stop:
            break
        starts.append(place)
        place = after
    return place


def cut_rest(num_items: int, size: int, rounding: SizeRounding) -> list[int]:
    """Split what is left into allowed sizes, largest first: 13 of at most 64, by powers of two, is 8, 4, 1.

    >>> cut_rest(13, 64, SizeRounding(ladder="pow2"))
    [8, 4, 1]
    """
    sizes = []
    while num_items:
        sizes.append(rounding.round_one(min(size, num_items)))
        num_items -= sizes[-1]
    return sizes


@final
class Cut(NamedTuple):
    """Where batches start in a sequence, the lengths they pad to, and the first that the end of the data cut short."""

    starts: IntArray  # (batches,)
    padded: IntArray  # (batches, axes)
    first_open: int


def cut_running(problem: Problem, lengths: npt.NDArray[np.int32]) -> Cut:
    """Cut lengths in any order and on any number of axes: a batch ends before the example that would break the budget.

    Args:
        problem: the budget and the rounding.
        lengths: ``(M, axes)`` in the order of the sequence.
    """
    padded = problem.padded(lengths)
    count_from = _on_one_axis(problem, lengths) if problem.num_axes == 1 else _OnAxes(problem, padded).count_from
    rounded = cache(problem.rounding.round_one)
    starts: list[int] = []
    place, first_open = 0, -1
    while place < len(padded):
        count = count_from(place)
        if place + count == len(padded) and first_open < 0:
            first_open = len(starts)
        starts.append(place)
        place += rounded(count)
    tops = np.stack([np.maximum.reduceat(column, starts) for column in padded.T], axis=1)
    return Cut(np.array(starts, dtype=np.int64), tops.astype(np.int64), first_open)


def _on_one_axis(problem: Problem, lengths: npt.NDArray[np.int32]) -> Callable[[int], int]:
    """Return the function from a place to how many examples from there share a batch, on one axis."""
    size_at = problem.table.size_at()
    view = memoryview(to_units(lengths[:, 0], problem.pad_multiple_of))  # type: ignore[arg-type]

    def count_from(place: int) -> int:
        longest = limit = count = 0
        for unit in view[place:]:
            if unit > longest:
                longest, limit = unit, size_at[unit]
            if count >= limit:
                break
            count += 1
        return count

    return count_from


@final
class _OnAxes:
    """How many examples share a batch from rising places on, on several axes.

    Small batches are counted from thousands of places at once: a call of the budget costs far more than its arithmetic.
    """

    def __init__(self, problem: Problem, padded: IntArray) -> None:
        self._problem = problem
        self._padded = padded
        self._begin = 0
        self._counts: list[int] = []
        self._last = 1

    def count_from(self, place: int) -> int:
        """Return how many examples from a place on share a batch."""
        if place >= self._begin + len(self._counts) and self._last < _WORTH_LIFTING:
            self._begin, self._counts = place, self._lift(self._padded[place : place + _CHUNK + _MOST_LIFTED])
        known = place < self._begin + len(self._counts)
        count = self._counts[place - self._begin] if known else _MOST_LIFTED
        if count == _MOST_LIFTED:
            count = self._gallop(self._padded[place:], max(2 * _MOST_LIFTED, self._last + self._last // 2))
        self._last = count
        return count

    def _gallop(self, padded: IntArray, guess: int) -> int:
        """Look at more and more examples until the budget breaks."""
        while True:
            tops = np.maximum.accumulate(padded[:guess], axis=0)
            over = self._problem.budget.fraction(np.arange(1, len(tops) + 1), tops) > 1
            if over.any():
                return max(1, int(np.argmax(over)))
            if len(tops) == len(padded):
                return len(tops)
            guess *= 4

    def _lift(self, padded: IntArray) -> list[int]:
        """Count from the first places, up to 127: take the largest power of two of examples that fits, then the next.

        ``maxima[k]`` holds the lengths that 2**k examples from each place pad to.
        """
        # A sparse table: the maximum of 2**(k+1) places is that of two neighbouring blocks of 2**k.
        maxima = [padded]
        for level in range(_LEVELS - 1):
            maxima.append(np.maximum(maxima[-1][: -(1 << level)], maxima[-1][1 << level :]))
        places = np.arange(min(_CHUNK, len(padded)))
        counts = np.zeros(len(places), dtype=np.int64)
        tops = np.zeros((len(places), padded.shape[1]), dtype=padded.dtype)
        # Binary lifting, from the largest block down: every place takes a block whenever the batch it makes still fits.
        # Budgets grow with the batch, so the count that results is the largest that fits.
        for level, table in reversed([item for item in enumerate(maxima) if len(item[1])]):
            more = counts + (1 << level)
            taller = np.maximum(tops, table[np.minimum(places + counts, len(table) - 1)])
            fits = (places + more <= len(padded)) & (self._problem.budget.fraction(more, taller) <= 1)
            counts = np.where(fits, more, counts)
            tops = np.where(fits[:, None], taller, tops)
        return np.maximum(counts, 1).tolist()


@final
@dataclass(frozen=True)
class Cells:
    """Batches cut from consecutive cells: the cell and size of each, and what is left of the last cell."""

    cells: IntArray
    sizes: IntArray
    rest: int

    def to_groups(self, problem: Problem, indices: npt.NDArray[np.int32], padded: IntArray) -> Groups:
        """Lay the batches over the examples; the rest becomes short batches of the last cell."""
        last = len(padded) - 1
        limit = int(problem.sizes(padded[last:])[0])
        short = cut_rest(self.rest, limit, problem.rounding)
        cells = np.append(self.cells, np.full(len(short), last, dtype=np.int64))
        sizes = np.append(self.sizes, np.array(short, dtype=np.int64))
        starts = np.cumsum(sizes) - sizes
        return Groups(indices, starts, sizes, padded[cells], num_short=len(short))


def fill_cells(counts: IntArray, sizes: IntArray) -> Cells:
    """Cut each cell into batches of its size; leftovers join the next cell.

    >>> fill_cells(np.array([5, 4]), np.array([2, 3]))
    Cells(cells=array([0, 0, 1]), sizes=array([2, 2, 3]), rest=2)
    """
    cells: list[int] = []
    carried = 0
    for cell, (count, size) in enumerate(zip(counts.tolist(), sizes.tolist(), strict=True)):
        full, carried = divmod(count + carried, size)
        cells.extend([cell] * full)
    chosen = np.array(cells, dtype=np.int64)
    return Cells(chosen, sizes[chosen], carried)
