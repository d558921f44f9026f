"""The fewest boxes that hold every example: what a catalogue needs at the least."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..._types import IntArray
from .base import Problem


def cover(problem: Problem, units: IntArray) -> IntArray:
    """Return few boxes of units ``(M, axes)`` that together hold all examples, each within the budget with one item.

    One box where that fits. Examples that are long on different axes may each fit alone while their common box does
    not; on two axes the fewest boxes are found, on more a few by joining what fits.
    """
    longest = units.max(axis=0, keepdims=True).astype(np.int64)
    if _fits(problem, longest)[0]:
        return longest
    front = _maximal(units.astype(np.int64))
    return _cover_stairs(problem, front) if problem.num_axes == 2 else _cover_any(problem, front)


def _fits(problem: Problem, boxes: IntArray) -> npt.NDArray[np.bool_]:
    return problem.fits(boxes * problem.pad_multiple_of)


def _maximal(units: IntArray) -> IntArray:
    """Return the distinct examples that no other one holds, by descending lengths."""
    found = []
    left = np.unique(units, axis=0)[::-1]
    left = left[np.argsort(-left.sum(axis=1), kind="stable")]
    while len(left):
        found.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.array(found)


def _cover_stairs(problem: Problem, front: IntArray) -> IntArray:
    """Join neighbours on the stairs of two axes as far as they fit: no set of boxes holds them with fewer."""
    front = front[np.argsort(front[:, 0])]  # the second axis falls
    boxes = []
    start = 0
    while start < len(front):
        low, high = start, len(front)  # the box of start..low fits, that of start..high does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = bool(_fits(problem, np.array([[front[middle, 0], front[start, 1]]]))[0])
            low, high = (middle, high) if fits else (low, middle)
        boxes.append([front[low, 0], front[start, 1]])
        start = low + 1
    return np.array(boxes)


def _cover_any(problem: Problem, left: IntArray) -> IntArray:
    """Grow one box after the other by the example that lengthens it the least, as long as one fits."""
    boxes = []
    while len(left):
        box, left = left[0], left[1:]
        while len(left):
            common = np.maximum(box, left)
            more = np.where(_fits(problem, common), common.sum(axis=1), np.iinfo(np.int64).max)
            best = int(more.argmin())
            if more[best] == np.iinfo(np.int64).max:
                break
            box = common[best]
            left = left[(left > box).any(axis=1)]
        boxes.append(box)
    return np.array(boxes)
