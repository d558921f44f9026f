"""Packed rows: windows, best-fit decreasing, and rows grouped into batches."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from ..errors import BudgetError
from ._cut import cut_rest
from ._packing import pack_rows
from ._problem import Groups, Problem
from ._random import Purpose, permutation
from ._window import sort_windows

_LOW_HALF = 0 if sys.byteorder == "little" else 1
_WINDOW_ROWS = 128  # rows a window is worth: at this many the rows of all three benchmark corpora are full


def group_rows(problem: Problem, capacity: int) -> Groups:
    """Pack the examples into rows of ``capacity`` and return the rows in random order."""
    rows_per_batch = rows_that_fit(problem, capacity)
    total = int(problem.lengths.sum(dtype=np.int64))
    windows = max(1, min(round(total / capacity / _WINDOW_ROWS), problem.num_examples))
    keys = sort_windows(problem, windows, shuffle=problem.shuffle)
    row_of = pack_rows(keys.values, capacity)
    indices = _by_row(row_of, keys.indices)
    sizes = np.bincount(row_of)
    starts = np.cumsum(sizes) - sizes
    stream = problem.stream(Purpose.ROWS)
    order = np.arange(len(sizes)) if stream is None else permutation(len(sizes), stream)
    full, rest = divmod(len(sizes), rows_per_batch)
    short = cut_rest(rest, rows_per_batch, problem.rounding)
    return Groups(
        indices=indices,
        starts=starts[order],
        sizes=sizes[order],
        padded=np.full((full + len(short), 1), capacity, dtype=np.int64),
        num_short=len(short),
        rows=np.array([rows_per_batch] * full + short, dtype=np.int64),
    )


def _by_row(row_of: npt.NDArray[np.int32], indices: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the examples row by row: one sort of keys that hold row and index."""
    keys = row_of.astype(np.uint64)
    keys <<= np.uint64(32)
    np.bitwise_or(keys, indices, out=keys, casting="unsafe", dtype=np.uint64)
    keys.sort()
    # The index is the low half of each key, read in place.
    return keys.view(np.uint32)[_LOW_HALF::2].astype(np.int32)


def rows_that_fit(problem: Problem, capacity: int) -> int:
    """Return the rows of a batch, or say that not even one fits."""
    if problem.budget.max_items(np.array([[capacity]]))[0] < 1:
        raise BudgetError(
            f"a row of Packed(capacity={capacity}) does not fit {problem.budget}; lower it or raise the budget"
        )
    return int(problem.sizes(np.array([[capacity]]))[0])
