"""The boxes that are needed: few that hold all examples, each within the budget with one item."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..._types import IntArray
from ...errors import BudgetError
from .base import Problem

_MAX_COMPARED = 1024  # boxes that are compared with all others, on three axes and more
_BLOCK = 64
_NEVER = np.iinfo(np.int64).max


def cover(problem: Problem, units: IntArray, most: int) -> IntArray:
    """Return few boxes of units ``(M, axes)`` that together hold all examples, each within the budget with one item.

    One box where that fits. Examples that are long on different axes may each fit alone while their common box does
    not; on two axes the fewest boxes are found, on more a few by joining what fits. There it ends with ``most + 1``
    boxes, which then do not hold everything.
    """
    longest = units.max(axis=0, keepdims=True).astype(np.int64)
    if _fits(problem, longest)[0]:
        return longest
    units = units.astype(np.int64)
    return _cover_stairs(problem, _stairs(units)) if problem.num_axes == 2 else _cover_any(problem, units, most)


def check_enough(problem: Problem, count: int, num_needed: int) -> None:
    """Refuse a number of shapes that do not hold every example; only on two axes is it known how many would."""
    if num_needed <= count:
        return
    found = f"{num_needed} are needed" if problem.num_axes == 2 else f"the search needs more than {count}"
    raise BudgetError(
        f"Buckets(count={count}) is too few shapes: {found}, because examples that are long on different axes fit "
        f"{problem.budget} alone but not padded to one shape; raise count or the budget, or use WindowSort()"
    )


def _fits(problem: Problem, boxes: IntArray) -> npt.NDArray[np.bool_]:
    return problem.fits(boxes * problem.pad_multiple_of)


def _stairs(units: IntArray) -> IntArray:
    """Return the pairs that no other one holds: the first axis ascends, the second falls."""
    # From the longest on the first axis down, a pair is on the stairs if it is longer on the second than all before it.
    units = units[np.lexsort(units.T[::-1])][::-1]
    highest = np.maximum.accumulate(units[:, 1])
    is_higher = np.append([True], units[1:, 1] > highest[:-1])
    return units[is_higher][::-1]


def _cover_stairs(problem: Problem, front: IntArray) -> IntArray:
    """Join neighbours on the stairs of two axes as far as they fit: no set of boxes holds them with fewer."""
    # The box of start..low fits, that of start..high does not; for all starts at once.
    low, high = np.arange(len(front)), np.full(len(front), len(front))
    while True:
        open_ = np.flatnonzero(high - low > 1)
        if len(open_) == 0:
            break
        middle = (low[open_] + high[open_]) // 2
        fits = _fits(problem, np.stack([front[middle, 0], front[open_, 1]], axis=1))
        low[open_[fits]], high[open_[~fits]] = middle[fits], middle[~fits]
    # Greedy is best: the neighbours that one box holds are a run, and a run that ends later never needs more boxes.
    last, starts = low.tolist(), [0]
    while last[starts[-1]] + 1 < len(front):
        starts.append(last[starts[-1]] + 1)
    return np.stack([front[low[starts], 0], front[starts, 1]], axis=1)


def _cover_any(problem: Problem, units: IntArray, most: int) -> IntArray:
    """Cover some of the largest, then what these boxes do not hold; usually the first round holds everything."""
    left = _candidates(problem, units)
    boxes: list[IntArray] = []
    while len(left) and len(boxes) <= most:
        some, _ = _maximal(left[:: -(-len(left) // _MAX_COMPARED)], _MAX_COMPARED)
        grown = _grown(problem, some, most + 1 - len(boxes))
        boxes += grown
        left = _not_held(left, grown)
    return np.array(boxes)


def _candidates(problem: Problem, units: IntArray) -> IntArray:
    """Return the examples that no other one holds; where these are very many, neighbours that fit are joined."""
    found, left = _maximal(np.unique(units, axis=0)[::-1], _MAX_COMPARED)
    if len(left) == 0:
        return found
    left, step = np.concatenate([found, left]), 1
    while len(left) > _MAX_COMPARED and step < left.max():
        step *= 2
        left = _joined(problem, left, step)
    return _descending(left)


def _maximal(units: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Return about ``most`` boxes that no other one holds, by descending lengths, and the boxes that these leave."""
    found: list[IntArray] = []
    left = _descending(units)
    while len(left) and len(found) < most:
        # The largest among themselves, then the others without those that they hold: one copy per block, not per box.
        head, left = left[:_BLOCK], left[_BLOCK:]
        block: list[IntArray] = []
        while len(head):
            block.append(head[0].copy())  # a view would keep the whole array alive
            head = _not_held(head, block[-1:])
        left = _not_held(left, block)
        found += block
    return np.array(found), left


def _not_held(units: IntArray, boxes: list[IntArray]) -> IntArray:
    """Return those that reach beyond every box on some axis."""
    columns = np.ascontiguousarray(units.T)  # a comparison of whole columns is far faster than one of short rows
    kept = np.ones(len(units), dtype=bool)
    for box in boxes:
        beyond = columns[0] > box[0]
        for column, length in zip(columns[1:], box[1:], strict=True):
            beyond |= column > length
        kept &= beyond
    return units[kept]


def _descending(units: IntArray) -> IntArray:
    return units[np.argsort(-units.sum(axis=1), kind="stable")]


def _joined(problem: Problem, units: IntArray, step: int) -> IntArray:
    """Replace the boxes that end within the same ``step`` units of each axis by their common box, where that fits."""
    cells = (units - 1) // step
    order = np.lexsort(cells.T[::-1])
    units, cells = units[order], cells[order]
    starts = np.flatnonzero(np.append([True], (cells[1:] != cells[:-1]).any(axis=1)))
    common = np.maximum.reduceat(units, starts, axis=0)
    fits = _fits(problem, common)
    is_single = ~np.repeat(fits, np.diff(starts, append=len(units)))
    return np.concatenate([common[fits], units[is_single]])


def _grown(problem: Problem, left: IntArray, most: int) -> list[IntArray]:
    """Grow one box after the other by the example that lengthens it the least, as long as one fits."""
    boxes: list[IntArray] = []
    while len(left) and len(boxes) < most:
        box, left = left[0], left[1:]
        while len(left):
            common = np.maximum(box, left)
            more = np.where(_fits(problem, common), common.sum(axis=1), _NEVER)
            best = int(more.argmin())
            if more[best] == _NEVER:
                break
            box = common[best].copy()
            left = _not_held(left, [box])
        boxes.append(box)
    return boxes
