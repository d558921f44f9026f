"""Send examples to windows and sort inside them: little padding, new neighbours every epoch."""

from __future__ import annotations

from typing import final

import numpy as np
import numpy.typing as npt

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
        carried.add(np.arange(rest, stop))
    num_short = carried.finish(problem.rounding)
    units = np.concatenate([keys.values[starts], np.array(carried.units, dtype=np.int32)])
    sizes = [size_at[unit] for unit in keys.values[starts].tolist()] + carried.sizes
    behind = np.concatenate([np.empty(0, dtype=np.int64), *carried.batches])
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
        self._keys = keys
        self._size_at = size_at
        self._waiting = np.empty(0, dtype=np.int64)
        self.batches: list[npt.NDArray[np.int64]] = []
        self.sizes: list[int] = []
        self.units: list[int] = []

    def add(self, rest: npt.NDArray[np.int64]) -> None:
        """Join the rest of a window with what waits, longest first, and cut full batches."""
        waiting = np.concatenate([self._waiting, rest])
        waiting = waiting[np.argsort(-self._keys.values[waiting], kind="stable")]
        units = self._keys.values[waiting]
        starts: list[int] = []
        end = cut_falling(units, 0, len(waiting), self._size_at, starts)
        for start in starts:
            self._close(waiting[start : start + self._size_at[int(units[start])]])
        self._waiting = waiting[end:]

    def finish(self, rounding: SizeRounding) -> int:
        """Batch what still waits; return how many batches that takes."""
        if len(self._waiting) == 0:
            return 0
        limit = self._size_at[int(self._keys.values[self._waiting[0]])]
        sizes = cut_rest(len(self._waiting), limit, rounding)
        for part in np.split(self._waiting, np.cumsum(sizes)[:-1]):
            self._close(part)
        return len(sizes)

    def _close(self, batch: npt.NDArray[np.int64]) -> None:
        self.batches.append(batch)
        self.sizes.append(len(batch))
        self.units.append(int(self._keys.values[batch[0]]))
