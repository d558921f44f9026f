"""Cut an ordered sequence of examples into batches, each as large as the budget allows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ._arrays import IntArray
from ._problem import Problem
from .shapes import SizeRounding


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


def cut_running(problem: Problem, lengths: IntArray, *, first_guess: int = 64) -> tuple[IntArray, IntArray]:
    """Cut lengths in any order and on any number of axes: a batch ends before the example that would break the budget.

    Args:
        problem: the budget and the rounding.
        lengths: ``(M, axes)`` in the order of the sequence.
        first_guess: how many examples to look at for the first batch.

    Returns:
        ``(starts, padded)``: where each batch starts, ``(B,)``, and the lengths it pads to, ``(B, axes)``.
    """
    padded = problem.padded(lengths)
    starts, tops = [0], []
    guess = first_guess
    while starts[-1] < len(padded):
        size, top = _longest_prefix(problem, padded[starts[-1] :], guess)
        guess = max(16, size + size // 2)
        starts.append(starts[-1] + size)
        tops.append(top)
    return np.array(starts[:-1], dtype=np.int64), np.array(tops, dtype=np.int64)


def _longest_prefix(problem: Problem, padded: IntArray, guess: int) -> tuple[int, IntArray]:
    """Return how many of the first examples share a batch, and the lengths they pad to."""
    while True:
        tops = np.maximum.accumulate(padded[:guess], axis=0)
        counts = np.arange(1, len(tops) + 1)
        over = problem.budget.fraction(counts, tops) > 1
        if over.any() or len(tops) == len(padded):
            break
        guess *= 4
    num_items = int(np.argmax(over)) if over.any() else len(tops)
    size = max(1, problem.rounding.round_one(max(num_items, 1)))
    return size, tops[size - 1]
