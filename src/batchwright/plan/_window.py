"""Send examples to windows and sort inside them: little padding, new neighbours every epoch."""

from __future__ import annotations

from itertools import accumulate
from typing import final

import numpy as np

from ._cut import cut_falling, cut_rest
from ._keys import SortedKeys, UInt64Array, sort_examples
from ._problem import Groups, Problem, to_units
from ._random import Purpose
from .shapes import SizeRounding

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
    size_at = problem.table.size_at()
    starts: list[int] = []
    carried = _Carried(keys, size_at)
    for start, stop in zip(keys.group_offsets[:-1].tolist(), keys.group_offsets[1:].tolist(), strict=True):
        rest = cut_falling(keys.values, start, stop, size_at, starts)
        if rest < stop:
            carried.add(range(rest, stop))
    num_short = carried.finish(problem.rounding)
    units = np.concatenate([keys.values[starts], np.array(carried.units, dtype=np.int32)])
    sizes = [size_at[unit] for unit in keys.values[starts].tolist()] + carried.sizes
    behind = np.array(carried.places, dtype=np.int64)
    carried_sizes = np.array(carried.sizes, dtype=np.int64)
    carried_starts = len(keys.indices) + np.cumsum(carried_sizes) - carried_sizes
    return Groups(
        indices=np.concatenate([keys.indices, keys.indices[behind]]),
        starts=np.concatenate([np.array(starts, dtype=np.int64), carried_starts]),
        sizes=np.array(sizes, dtype=np.int64),
        padded=units.astype(np.int64)[:, None] * problem.pad_multiple_of,
        num_short=num_short,
    )


@final
class _Carried:
    """The examples that filled no batch in their window, and the batches they fill together with the next ones."""

    def __init__(self, keys: SortedKeys, size_at: dict[int, int]) -> None:
        self._unit_at: memoryview[int] = memoryview(keys.values)  # type: ignore[arg-type]
        self._size_at = size_at
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
        return self._size_at[self._unit_at[waiting[0]]]

    def _close(self, batch: list[int]) -> None:
        self.places += batch
        self.sizes.append(len(batch))
        self.units.append(self._unit_at[batch[0]])
