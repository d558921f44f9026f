"""Groupings that sort examples by length: not at all, all at once, or window by window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole
from ..._random import Purpose
from ..._types import IntArray
from ._cutting import cut_falling, cut_rest, cut_running
from ._sort_keys import SortedKeys, order_examples, sort_examples
from .base import Grouping, Groups, Problem, SizeRounding, UInt64Array, distinct, stratum_lookup, to_units

# Small epochs get at least this many windows, so that neighbours change there too.
_MIN_WINDOWS = 4
_MIN_BATCHES_PER_WINDOW = 32


@final
@dataclass(frozen=True)
class InOrder(Grouping):
    """Data order, cut when the budget is reached; never shuffled."""

    def group(self, problem: Problem) -> Groups:
        """Cut the examples as they stand."""
        return cut_in_order(problem, np.arange(problem.num_examples, dtype=np.int32))

    @property
    def keeps_order(self) -> bool:
        """Return True: data order is the point."""
        return True

    @property
    def takes_weights(self) -> bool:
        """Return True: a batch ends by what its examples count."""
        return True


@final
@dataclass(frozen=True)
class Sorted(Grouping):
    """One global sort: the least padding, the same neighbours in every epoch; shuffling moves whole batches."""

    def group(self, problem: Problem) -> Groups:
        """Sort all examples and cut them."""
        if problem.num_axes > 1:
            return group_strata(problem, 1, shuffle=False)
        return group_windows(problem, 1, shuffle=False)

    @property
    def takes_weights(self) -> bool:
        """Return True: a batch ends by what its examples count."""
        return True


@final
@dataclass(frozen=True)
class WindowSort(Grouping):
    """Shuffle, sort inside windows worth ``batches_per_window`` batches: new neighbours every epoch. The default.

    Larger windows pad less and repeat neighbours more. Small epochs get four windows where each still holds 32 batches.
    """

    batches_per_window: int = 256

    def __post_init__(self) -> None:
        per_window = as_whole("WindowSort: batches_per_window", self.batches_per_window, least=1)
        object.__setattr__(self, "batches_per_window", per_window)

    def group(self, problem: Problem) -> Groups:
        """Send examples to windows, sort and cut each."""
        windows = self._num_windows(problem)
        if problem.num_axes > 1:
            return group_strata(problem, windows, shuffle=problem.shuffle)
        return group_windows(problem, windows, shuffle=problem.shuffle)

    @property
    def takes_weights(self) -> bool:
        """Return True: a batch ends by what its examples count."""
        return True

    def _num_windows(self, problem: Problem) -> int:
        num_batches = problem.num_batches
        per_window = min(self.batches_per_window, max(_MIN_BATCHES_PER_WINDOW, num_batches / _MIN_WINDOWS))
        return min(max(1, round(num_batches / per_window)), problem.num_examples)


_HALF = np.uint64(32)


def window_of(
    start: int, stop: int, chance: UInt64Array, *, windows: int, num_examples: int, shuffle: bool
) -> UInt64Array:
    """Return the window of each example: by chance, or in the order of the data without shuffling."""
    if shuffle:
        return ((chance >> _HALF) * np.uint64(windows)) >> _HALF
    return np.arange(start, stop, dtype=np.uint64) * np.uint64(windows) // np.uint64(num_examples)


def sort_windows(problem: Problem, windows: int, *, shuffle: bool) -> SortedKeys:
    """Order the examples of one axis window by window, each by falling length.

    Returns:
        The examples, their lengths in units of padding, and where each window starts.
    """
    longest = int(problem.table.values[-1])

    def fields(start: int, stop: int, chance: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
        units = to_units(problem.lengths[start:stop, 0], problem.pad_multiple_of)
        window = window_of(start, stop, chance, windows=windows, num_examples=problem.num_examples, shuffle=shuffle)
        return window, (longest - units).astype(np.uint64)

    keys = sort_examples(
        problem.num_examples,
        fields,
        num_groups=windows,
        max_value=longest,
        stream=problem.stream(Purpose.GROUP) if shuffle else None,
    )
    return keys._replace(values=np.subtract(longest, keys.values, out=keys.values))


def group_windows(problem: Problem, windows: int, *, shuffle: bool) -> Groups:
    """Cut every window into full batches; what fills none, its shortest examples, goes on to the next window."""
    keys = sort_windows(problem, windows, shuffle=shuffle)
    if problem.weights is not None:
        return cut_in_order(problem, _turning(keys))
    sizes_at = problem.table.sizes_of(keys.values)
    starts, rests = cut_falling(sizes_at, keys.group_offsets)
    carried = _Carried(keys.values, sizes_at)
    for rest, stop in zip(rests, keys.group_offsets[1:].tolist(), strict=True):
        if rest < stop:
            carried.add(range(rest, stop))
    num_short = carried.finish(problem.rounding)
    units = np.concatenate([keys.values[starts], np.array(carried.units, dtype=np.int32)])
    behind = np.array(carried.places, dtype=np.int64)
    carried_sizes = np.array(carried.sizes, dtype=np.int64)
    carried_starts = len(keys.indices) + np.cumsum(carried_sizes) - carried_sizes
    return Groups(
        indices=np.concatenate([keys.indices, keys.indices[behind]]),
        starts=np.concatenate([starts, carried_starts]),
        sizes=np.concatenate([sizes_at[starts], carried_sizes]),
        padded=units.astype(np.int64)[:, None] * problem.pad_multiple_of,
        num_short=num_short,
    )


def _turning(keys: SortedKeys) -> npt.NDArray[np.int32]:
    """Return the examples with every second window turned round, so that a batch over two windows pads little."""
    parts = [keys.indices[start:stop] for start, stop in pairwise(keys.group_offsets.tolist())]
    return np.concatenate([part[::-1] if number % 2 else part for number, part in enumerate(parts)])


@final
class _Carried:
    """The examples that filled no batch in their window, and the batches they fill together with the next ones."""

    def __init__(self, units: npt.NDArray[np.int32], sizes: IntArray) -> None:
        self._unit_at: memoryview[int] = memoryview(units)  # type: ignore[arg-type]  # far faster to index
        self._size_at: memoryview[int] = memoryview(sizes)  # type: ignore[arg-type]
        self._waiting: list[int] = []
        self.places: list[int] = []
        self.sizes: list[int] = []
        self.units: list[int] = []

    def add(self, rest: range) -> None:
        """Join the rest of a window with what waits, longest first, and cut full batches."""
        waiting = sorted([*self._waiting, *rest], key=self._unit_at.__getitem__, reverse=True)
        while waiting and len(waiting) >= self._limit(waiting):
            size = self._limit(waiting)
            self._close(waiting[:size])
            waiting = waiting[size:]
        self._waiting = waiting

    def finish(self, rounding: SizeRounding) -> int:
        """Batch what still waits; return how many batches that takes."""
        if not self._waiting:
            return 0
        sizes = cut_rest(len(self._waiting), self._limit(self._waiting), rounding)
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            self._close(self._waiting[end - size : end])
        return len(sizes)

    def _limit(self, waiting: list[int]) -> int:
        return self._size_at[waiting[0]]

    def _close(self, batch: list[int]) -> None:
        self.places += batch
        self.sizes.append(len(batch))
        self.units.append(self._unit_at[batch[0]])


_SAMPLE = 32_768  # examples on which the number of strata is tried
_MAX_STRATA = 64


def group_strata(problem: Problem, windows: int, *, shuffle: bool) -> Groups:
    """Group examples with several lengths, window by window."""
    indices = _sort(problem, _axes(problem.lengths), windows, _best_bounds(problem, windows), shuffle=shuffle)
    return cut_in_order(problem, indices)


def cut_in_order(problem: Problem, indices: npt.NDArray[np.int32]) -> Groups:
    """Cut a sequence as it stands; the last batches are short when more would have fitted."""
    weights = None if problem.weights is None else problem.weights[indices]
    starts, padded, first_open = cut_running(problem, _axes(problem.lengths).take(indices, axis=1), weights)
    sizes = np.diff(np.append(starts, len(indices)))
    num_items = sizes if weights is None else np.add.reduceat(weights, starts)
    # All batches from the first open one on are short, but that one itself may have been just full.
    is_full = num_items[first_open] >= problem.sizes(padded)[first_open]
    return Groups(indices, starts, sizes, padded, num_short=len(starts) - first_open - int(is_full))


def _axes(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return lengths as ``(axes, N)``: each axis lies together in memory, where it is read and gathered fastest."""
    return np.ascontiguousarray(lengths.T)


def _sort(
    problem: Problem, columns: npt.NDArray[np.int32], windows: int, bounds: IntArray, *, shuffle: bool
) -> npt.NDArray[np.int32]:
    """Order examples window by window, by strata of the first axis, by the others within; turn round at each end."""
    last = np.uint64(len(bounds))
    num = columns.shape[1]
    first, others = to_units(columns[0], problem.pad_multiple_of), _others(columns, problem.pad_multiple_of)
    stratum_of = stratum_lookup(bounds, int(first.max()))
    widest = np.uint64(others.max())
    one = np.uint64(1)

    def fields(start: int, stop: int, chance: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
        window = window_of(start, stop, chance, windows=windows, num_examples=num, shuffle=shuffle)
        backwards = window & one
        stratum, value = last - stratum_of(first[start:stop]), others[start:stop].astype(np.uint64)
        value = np.where(((stratum ^ backwards) & one).astype(bool), value, widest - value)
        stratum = np.where(backwards.astype(bool), last - stratum, stratum)
        return window * (last + one) + stratum, value

    return order_examples(
        num,
        fields,
        num_groups=windows * (len(bounds) + 1),
        max_value=int(widest),
        stream=problem.stream(Purpose.GROUP) if shuffle else None,
    )


def _others(columns: npt.NDArray[np.int32], multiple: int) -> IntArray:
    """Return the sum of the units on all axes but the first."""
    return to_units(columns[1:], multiple).sum(axis=0, dtype=np.int64)


def _best_bounds(problem: Problem, windows: int) -> IntArray:
    """Try 1, 2, 4, … strata on a sample the size of a window and keep the number with the fewest padded tokens."""
    units = to_units(problem.lengths[:, 0], problem.pad_multiple_of)
    values, counts = distinct(units)
    tokens: npt.NDArray[np.float64] = np.cumsum(values * counts, dtype=np.float64)
    per_window = max(1, problem.num_examples // windows)
    step = max(1, problem.num_examples // min(per_window, _SAMPLE))
    sample = _axes(problem.lengths[::step])
    weights = None if problem.weights is None else problem.weights[::step]
    best, fewest = 1, math.inf
    strata = 1
    while strata <= min(_MAX_STRATA, len(values)):
        padded = _padded_tokens(problem, sample, weights, _equal_tokens(values, tokens, strata))
        if padded < fewest:
            best, fewest = strata, padded
        strata *= 2
    # A window larger than the sample holds finer strata at the same number of batches in each.
    finer = math.sqrt(per_window / sample.shape[1])
    return _equal_tokens(values, tokens, max(1, round(best * max(1.0, finer))))


def _equal_tokens(values: IntArray, tokens: npt.NDArray[np.float64], strata: int) -> IntArray:
    """Return the inner bounds that cut the first axis into strata of equal tokens."""
    shares = np.arange(1, strata) * (tokens[-1] / strata)
    return np.unique(values[np.searchsorted(tokens, shares)])


def _padded_tokens(
    problem: Problem, sample: npt.NDArray[np.int32], weights: IntArray | None, bounds: IntArray
) -> float:
    order = _sort(problem, sample, 1, bounds, shuffle=False)
    weights = None if weights is None else weights[order]
    starts, padded, _ = cut_running(problem, sample.take(order, axis=1), weights)
    sizes = np.diff(np.append(starts, len(order))) if weights is None else np.add.reduceat(weights, starts)
    return float((sizes * padded.sum(axis=1)).sum())
