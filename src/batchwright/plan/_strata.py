"""Several length axes: strata on the first, a winding sort on the others, one running cut.

Sorting by the first axis alone leaves the second at random. So the first axis is divided into strata of equal tokens;
inside a stratum the examples are sorted by their other lengths, falling in one stratum and rising in the next, so that
neighbours are close on both. Every other window is walked backwards, so that windows meet at their short ends.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ._arrays import IntArray
from ._cut import cut_running
from ._keys import SortedKeys, UInt64Array, sort_examples
from ._problem import Groups, Problem, distinct, to_units
from ._random import Purpose
from ._window import window_of

_SAMPLE = 32_768  # examples on which the number of strata is tried
_MAX_STRATA = 64


def group_strata(problem: Problem, windows: int, *, shuffle: bool) -> Groups:
    """Group examples with several lengths, window by window."""
    bounds = _best_bounds(problem, windows)
    keys = _sort(problem, problem.lengths, windows, bounds, shuffle=shuffle)
    return cut_in_order(problem, keys.indices)


def cut_in_order(problem: Problem, indices: npt.NDArray[np.int32]) -> Groups:
    """Cut a sequence as it stands; the last batches are short when more would have fitted."""
    starts, padded, first_open = cut_running(problem, problem.lengths[indices])
    sizes = np.diff(np.append(starts, len(indices)))
    # All batches from the first open one on are short, but that one itself may have been just full.
    is_full = sizes[first_open] >= problem.sizes(padded)[first_open]
    return Groups(indices, starts, sizes, padded, num_short=len(starts) - first_open - int(is_full))


def _sort(
    problem: Problem, lengths: npt.NDArray[np.int32], windows: int, bounds: IntArray, *, shuffle: bool
) -> SortedKeys:
    strata = len(bounds) + 1
    num = len(lengths)
    widest = int(_others(lengths, problem.pad_multiple_of).max())

    def fields(start: int, stop: int, chance: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
        part = lengths[start:stop]
        window = window_of(start, stop, chance, windows=windows, num_examples=num, shuffle=shuffle)
        backwards = (window & np.uint64(1)).astype(bool)
        stratum = strata - 1 - np.searchsorted(bounds, to_units(part[:, 0], problem.pad_multiple_of))
        others = _others(part, problem.pad_multiple_of)
        value = np.where((stratum % 2 == 1) ^ backwards, others, widest - others)
        stratum = np.where(backwards, strata - 1 - stratum, stratum)
        return window * np.uint64(strata) + stratum.astype(np.uint64), value.astype(np.uint64)

    return sort_examples(
        num,
        fields,
        num_groups=windows * strata,
        max_value=widest,
        stream=problem.stream(Purpose.GROUP) if shuffle else None,
    )


def _others(lengths: IntArray, multiple: int) -> IntArray:
    return to_units(lengths[:, 1:], multiple).sum(axis=1, dtype=np.int64)


def _best_bounds(problem: Problem, windows: int) -> IntArray:
    """Try 1, 2, 4, … strata on a sample the size of a window and keep the number with the fewest padded tokens."""
    units = to_units(problem.lengths[:, 0], problem.pad_multiple_of)
    values, counts = distinct(units)
    tokens: npt.NDArray[np.float64] = np.cumsum(values * counts, dtype=np.float64)
    per_window = max(1, problem.num_examples // windows)
    sample = problem.lengths[:: max(1, problem.num_examples // min(per_window, _SAMPLE))]
    best, fewest = 1, math.inf
    strata = 1
    while strata <= min(_MAX_STRATA, len(values)):
        padded = _padded_tokens(problem, sample, _equal_tokens(values, tokens, strata))
        if padded < fewest:
            best, fewest = strata, padded
        strata *= 2
    # A window larger than the sample holds finer strata at the same number of batches in each.
    finer = math.sqrt(per_window / len(sample))
    return _equal_tokens(values, tokens, max(1, round(best * max(1.0, finer))))


def _equal_tokens(values: IntArray, tokens: npt.NDArray[np.float64], strata: int) -> IntArray:
    """Return the inner bounds that cut the first axis into strata of equal tokens."""
    shares = np.arange(1, strata) * (tokens[-1] / strata)
    return np.unique(values[np.searchsorted(tokens, shares)])


def _padded_tokens(problem: Problem, sample: npt.NDArray[np.int32], bounds: IntArray) -> float:
    keys = _sort(problem, sample, 1, bounds, shuffle=False)
    starts, padded, _ = cut_running(problem, sample[keys.indices])
    sizes = np.diff(np.append(starts, len(sample)))
    return float((sizes * padded.sum(axis=1)).sum())
