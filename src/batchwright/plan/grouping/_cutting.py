"""Cut an ordered sequence of examples into batches, each as large as the budget allows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..._types import IntArray
from .base import Problem, SizeRounding, to_units

_LEVELS = 7
_MOST_LIFTED = (1 << _LEVELS) - 1
_WORTH_LIFTING = 96  # from about this size of batch on, counting from every place costs more than it saves
_CHUNK = 4096


@final
class FullBatches(NamedTuple):
    """Where the full batches of all windows start, and where the examples that fill none begin in each window."""

    starts: IntArray  # (batches,)
    rests: list[int]  # (windows,)


def cut_falling(sizes: IntArray, offsets: IntArray) -> FullBatches:
    """Cut windows in which lengths fall: the first example is the longest, so its size is the size of the batch.

    Args:
        sizes: items that fit at the length of each example.
        offsets: where each window starts, and the end of the last.

    >>> cut_falling(np.array([2, 2, 3, 3, 4, 4, 4]), np.array([0, 7]))
    FullBatches(starts=array([0, 2]), rests=[5])
    """
    # Where sizes are equal the batches are counted, not walked over: a window of small batches has few sizes.
    changes = np.flatnonzero(sizes[1:] != sizes[:-1]) + 1
    ends = np.unique(np.concatenate([changes, offsets[1:]])).tolist()
    runs: list[tuple[int, int, int]] = []  # the first place, the size and the number of equal batches in turn
    rests = []
    size_at: memoryview[int] = memoryview(sizes)  # type: ignore[arg-type]  # far faster to index than the array
    end = 0
    for place, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        while place < stop:
            end = bisect_right(ends, place, end)
            size = size_at[place]
            count = min(-((place - ends[end]) // size), (stop - place) // size)
            if count == 0:
                break
            runs.append((place, size, count))
            place += count * size
        rests.append(place)
    return FullBatches(_spread(runs), rests)


def _spread(runs: list[tuple[int, int, int]]) -> IntArray:
    """Return every start of runs of equal batches."""
    places, sizes, counts = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(places, counts) + within * np.repeat(sizes, counts)


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


def cut_running(problem: Problem, columns: npt.NDArray[np.int32], weights: IntArray | None) -> Cut:
    """Cut lengths in any order and on any number of axes: a batch ends before the example that would break the budget.

    Args:
        problem: the budget and the rounding.
        columns: ``(axes, M)`` in the order of the sequence.
        weights: how many each counts for, ``(M,)``; None where that is one. Each by itself fits.
    """
    units = to_units(columns, problem.pad_multiple_of)
    chain = _Chain(problem, units) if weights is None else _WeightedChain(problem, units, weights)
    starts, first_open = chain.follow()
    tops = units if len(starts) == units.shape[1] else np.maximum.reduceat(units, starts, axis=1)
    tops = tops.astype(np.int64)
    return Cut(starts, (tops * problem.pad_multiple_of).T, first_open)


# fits(number of items, units on each axis (axes, M)) -> whether each batch is within the budget
_Fits = Callable[[IntArray, IntArray], npt.NDArray[np.bool_]]


def _fits_by_table(problem: Problem) -> _Fits:
    """Return whether batches fit on one axis: the sizes at all lengths are known."""
    sizes_of = problem.table.sizes_of
    return lambda num_items, units: num_items <= sizes_of(units[0])


def _fits_by_budget(problem: Problem) -> _Fits:
    """Return whether batches fit on several axes."""
    multiple, fraction = problem.pad_multiple_of, problem.budget.fraction
    # Transposed, not copied: sums over the axes are then sums of whole columns.
    if multiple == 1:
        return lambda num_items, units: fraction(num_items, units.T) <= 1
    return lambda num_items, units: fraction(num_items, (units * multiple).T) <= 1


@final
class _Chain:
    """Batches one after the other, each with as many examples as the budget allows, rounded.

    Small batches are counted from thousands of places at once: a call of the budget costs far more than its arithmetic.
    """

    def __init__(self, problem: Problem, units: IntArray) -> None:
        self._fits = _fits_by_table(problem) if problem.num_axes == 1 else _fits_by_budget(problem)
        self._rounding = problem.rounding
        self._units = units
        self._stop = units.shape[1]
        self._numbers = np.arange(1, 4 * _MOST_LIFTED + 1)
        self._starts: list[IntArray | list[int]] = [[]]
        self._num_starts = 0
        self._first_open = -1

    def follow(self) -> tuple[IntArray, int]:
        """Return where batches start, and the first that the end of the data cut short."""
        place, count = 0, 1
        while place < self._stop:
            if count < _WORTH_LIFTING:
                place, count = self._follow_lifted(place)
            else:
                place, count = self._follow_one(place, count)
        return np.concatenate(self._starts).astype(np.int64, copy=False), self._first_open

    def _follow_one(self, place: int, guess: int) -> tuple[int, int]:
        """Close the batch that begins at a place; return where the next begins, and the count before rounding."""
        count = self._gallop(place, max(2 * _MOST_LIFTED, guess + guess // 2))
        if place + count == self._stop and self._first_open < 0:
            self._first_open = self._num_starts
        self._starts.append([place])
        self._num_starts += 1
        return place + self._rounding.round_one(count), count

    def _follow_lifted(self, begin: int) -> tuple[int, int]:
        """Close the batches that begin in a chunk; return where the next begins, and the last count."""
        counts = self._lift(self._units[:, begin : begin + _CHUNK + _MOST_LIFTED])
        is_large = counts == _MOST_LIFTED
        sizes = np.where(is_large, 0, self._rounding.round(counts))
        place, count = begin, 1
        while place < begin + len(counts):
            visited, after = _walk(sizes, place - begin)
            self._add(begin + visited, counts[visited])
            place = begin + after
            count = int(counts[visited[-1]]) if len(visited) else count
            if after < len(counts):
                place, count = self._follow_one(place, _MOST_LIFTED)
        return place, count

    def _add(self, starts: IntArray, counts: IntArray) -> None:
        is_last = starts + counts == self._stop
        if self._first_open < 0 and is_last.any():
            self._first_open = self._num_starts + int(is_last.argmax())
        self._starts.append(starts)
        self._num_starts += len(starts)

    def _gallop(self, place: int, guess: int) -> int:
        """Look at more and more examples until the budget breaks."""
        while True:
            units = self._units[:, place : place + guess]
            num = units.shape[1]
            if num > len(self._numbers):
                self._numbers = np.arange(1, 2 * num + 1)
            fits = self._fits(self._numbers[:num], np.maximum.accumulate(units, axis=1))
            first_over = int(fits.argmin())
            if not fits[first_over]:
                return max(1, first_over)
            if place + num == self._stop:
                return num
            guess *= 4

    def _lift(self, units: IntArray) -> IntArray:
        """Count from the first places, up to 127: take the largest power of two of examples that fits, then the next.

        ``maxima[k]`` holds the lengths that 2**k examples from each place pad to.
        """
        num = min(_CHUNK, units.shape[1])
        maxima = self._maxima(units)
        places = np.arange(num)
        counts = np.zeros(num, dtype=np.int64)
        tops = np.zeros((len(units), num), dtype=units.dtype)
        # Binary lifting, from the largest block down: every place takes a block whenever the batch it makes still fits.
        # Budgets grow with the batch, so the count that results is the largest that fits.
        for level in reversed(range(len(maxima))):
            more = counts + (1 << level)
            table = maxima[level]
            taller = np.maximum(tops, table.take(np.minimum(places + counts, table.shape[1] - 1), axis=1))
            fits = self._fits(more, taller) & (places + more <= units.shape[1])
            counts = np.where(fits, more, counts)
            tops = np.where(fits, taller, tops)
        return np.maximum(counts, 1)

    def _maxima(self, units: IntArray) -> list[IntArray]:
        """Return the maxima of blocks of 1, 2, 4, … examples, up to the largest that fits from any place."""
        # A sparse table: the maximum of 2**(k+1) places is that of two neighbouring blocks of 2**k.
        maxima = [units]
        for half in (1 << level for level in range(_LEVELS - 1)):
            blocks = np.maximum(maxima[-1][:, :-half], maxima[-1][:, half:])
            num = blocks.shape[1]
            if num == 0 or not self._fits(np.full(num, 2 * half), blocks).any():
                break
            maxima.append(blocks)
        return maxima if len(maxima) > 1 else []


@final
class _WeightedChain:
    """Batches one after the other, each with as many groups as the budget allows, rounded where whole groups can be."""

    def __init__(self, problem: Problem, units: IntArray, weights: IntArray) -> None:
        self._problem = problem
        self._units = units
        self._upto = np.append(0, np.cumsum(weights))
        self._stop = units.shape[1]
        self._guess = 16
        if problem.num_axes == 1:
            table = problem.table
            most = problem.budget.max_items((table.values * problem.pad_multiple_of)[:, None])
            self._limits = most[np.searchsorted(table.values, units[0])].tolist()
            self._weights = weights.tolist()

    def follow(self) -> tuple[IntArray, int]:
        """Return where batches start, and the first that the end of the data cut short."""
        reach = self._reach_by_table if self._problem.num_axes == 1 else self._reach_by_budget
        starts: list[int] = []
        first_open, place = -1, 0
        while place < self._stop:
            stop = reach(place)
            if stop == self._stop and first_open < 0:
                first_open = len(starts)
            starts.append(place)
            place += 1 + self._problem.rounding.best_of(self._upto[place + 1 : stop + 1] - self._upto[place])
        return np.array(starts, dtype=np.int64), first_open

    def _reach_by_table(self, place: int) -> int:
        limits, weights = self._limits, self._weights
        limit, total = limits[place], 0
        for stop in range(place, self._stop):
            total += weights[stop]
            if limits[stop] < limit:  # half the time of min()
                limit = limits[stop]
            if total > limit:
                return max(stop, place + 1)
        return self._stop

    def _reach_by_budget(self, place: int) -> int:
        """Look at more and more groups until the budget breaks."""
        problem = self._problem
        while True:
            stop = min(place + self._guess, self._stop)
            tops = np.maximum.accumulate(self._units[:, place:stop], axis=1) * problem.pad_multiple_of
            fits = problem.budget.fraction(self._upto[place + 1 : stop + 1] - self._upto[place], tops.T) <= 1
            first_over = int(fits.argmin())
            if not fits[first_over]:
                self._guess = 2 * first_over + 8
                return place + max(1, first_over)
            if stop == self._stop:
                return stop
            self._guess *= 4


def _walk(sizes: IntArray, place: int) -> tuple[IntArray, int]:
    """Go on by the size at each place from a place on; return the places visited, and the first that has none."""
    ends = np.append(np.flatnonzero(sizes[1:] != sizes[:-1]) + 1, len(sizes))
    steps = sizes.tolist() + [0] * _MOST_LIFTED
    if _RUN * len(ends) < len(sizes):
        return _walk_runs(steps, ends.tolist(), place)
    visited = []
    step = steps[place]
    while step:
        visited.append(place)
        place += step
        step = steps[place]
    return np.array(visited, dtype=np.int64), place


_RUN = 4  # equal sizes are worth counting in runs of this many


def _walk_runs(steps: list[int], ends: list[int], place: int) -> tuple[IntArray, int]:
    """Walk by runs of equal sizes, which are counted and not walked over."""
    runs = []
    end = 0
    while steps[place]:
        end = bisect_right(ends, place, end)
        count = -((place - ends[end]) // steps[place])
        runs.append((place, steps[place], count))
        place += count * steps[place]
    return _spread(runs), place


@final
@dataclass(frozen=True)
class Cells:
    """Batches cut from consecutive cells: the cell and size of each, and what is left of the last cell."""

    cells: IntArray
    sizes: IntArray
    rest: int


def fill_cells(counts: IntArray, sizes: IntArray) -> Cells:
    """Cut each cell into batches of its size; leftovers join the next cell.

    >>> fill_cells(np.array([5, 4]), np.array([2, 3]))
    Cells(cells=array([0, 0, 1]), sizes=array([2, 2, 3]), rest=2)
    """
    fulls: list[int] = []
    carried = 0
    for count, size in zip(counts.tolist(), sizes.tolist(), strict=True):
        full, carried = divmod(count + carried, size)
        fulls.append(full)
    chosen = np.repeat(np.arange(len(fulls)), fulls)
    return Cells(chosen, sizes[chosen], carried)
