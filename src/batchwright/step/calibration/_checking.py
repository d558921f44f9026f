"""Which planned batches to run before a budget counts: those that a fit to other shapes may be most wrong about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from ..._types import FloatArray, IntArray
from ...plan import Plan, plan_batches
from ._bounds import CLOSE, dominates
from ._searching import Search
from .found import FoundBudget
from .result import Shape

# Of more examples, every so many are planned: the checks need some full batches, not all of them.
_MOST_EXAMPLES = 50_000
_Batch: TypeAlias = tuple[Shape, IntArray]  # and its examples

# One per kind runs if all is well; more if not, until so many ran.
_MOST_RUNS = 12
# Batches that are predicted to take less than this share of the limit are not near it, even if the fit is wrong.
_NEAR = 0.75
# Batches that are predicted to take this share of what the largest takes are as demanding.
_FULL = 0.95
# Checks may take so much longer than the search.
_MOST_SECONDS = 10.0


def planned_checks(search: Search, lengths: IntArray) -> Iterator[tuple[Shape, list[int]]]:
    """Yield planned batches, as shapes and examples; ``search.note`` gets what each took before the next is asked for.

    A budget is fitted to a few rows of lengths, and plans thousands of other shapes. So of the batches that it plans
    the most demanding run: the one of most bytes, the one of most items, and those that are longest on one axis. What
    takes more than was planned for, or runs out of memory, changes the fit and the plan, and is looked at again.

    Args:
        search: has run its own batches.
        lengths: of the examples, as padded, ``(N, axes)``.
    """
    if search.limit is None or not search.is_fitted:
        return
    places = np.arange(0, len(lengths), -(-len(lengths) // _MOST_EXAMPLES))
    kind, num_kinds = 0, 2 + lengths.shape[1]
    for _ in range(_MOST_RUNS):
        budget = search.fitted()
        plan = plan_batches(lengths[places], budget, shuffle=False)
        found = _shortest(plan, budget, search)
        is_short = found is not None
        while found is None and kind < num_kinds:
            found = _of_kind(kind, plan, budget, search)
            kind += found is None
        if found is None:
            search.is_checked = True
            return
        shape, examples = found
        num = search.instead(shape)
        if search.takes_too_long((num, *shape[1:]), more=_MOST_SECONDS):
            return
        before = search.num_surprises
        yield (num, *shape[1:]), places[np.resize(examples, num)].tolist()
        if search.num_surprises > before:
            kind = 0  # the fit was wrong, and so may be what it said of the others
        elif not is_short and num == shape[0]:
            kind += 1


def _shortest(plan: Plan, budget: FoundBudget, search: Search) -> _Batch | None:
    """Return as many of the shortest example as any batch has, if fewer items of anything ran out of memory before.

    If these do too, it is their number that counts, and the bound that follows holds for all other lengths as well.
    """
    most = int(plan.shapes[:, 0].max())
    example = int(plan.lengths.sum(axis=1, dtype=np.int64).argmin())
    shape = (most, *as_shape(plan.lengths[example]))
    is_suspect = any(num <= most for num, *_ in search.failed)
    return (shape, np.array([example])) if is_suspect and not _is_known(shape, budget, search) else None


def _of_kind(kind: int, plan: Plan, budget: FoundBudget, search: Search) -> _Batch | None:
    """Return a demanding batch of the plan; None if it is known."""
    assert budget.memory is not None
    place = demanding(plan.shapes, budget.memory.model.predict(plan.shapes))[kind]
    shape = as_shape(plan.shapes[place])
    return None if _is_known(shape, budget, search) else (shape, _pillars_first(plan, place))


def _is_known(shape: Shape, budget: FoundBudget, search: Search) -> bool:
    """Say whether a batch at least as large ran, or this one is far from all limits."""
    assert budget.memory is not None
    predicted = float(budget.memory.model.predict([shape])[0])
    few = min([2 * max(num for num, *_ in search.ran), *(int(CLOSE * num) for num, *_ in search.failed)])
    is_far = predicted < _NEAR * budget.memory.max_bytes and shape[0] <= few
    return is_far or any(dominates(other, shape) for other in search.ran)


def demanding(shapes: IntArray, bytes_of: FloatArray) -> list[int]:
    """Return the places of the batch of most bytes, the full one longest on each axis, and the one of most items.

    >>> shapes = np.array([[8, 64, 64], [900, 3, 3], [8, 90, 30], [8, 30, 90], [2, 3, 3]])
    >>> demanding(shapes, np.array([10.0, 9.0, 9.9, 9.8, 1.0]))
    [0, 2, 3, 1]
    """
    full = np.flatnonzero(bytes_of >= _FULL * bytes_of.max())
    sides = shapes[full, 1:].astype(np.float64)
    shares = sides / sides.sum(axis=1, keepdims=True)
    return [int(bytes_of.argmax()), *full[shares.argmax(axis=0)].tolist(), int(shapes[:, 0].argmax())]


def as_shape(row: IntArray) -> Shape:
    """Return a row of shapes as plain numbers."""
    return tuple(int(number) for number in row)


def _pillars_first(plan: Plan, place: int) -> IntArray:
    """Return the examples of a batch, the longest on each axis first, so that fewer of them have the same lengths."""
    chosen = np.array(plan[place])
    pillars = np.unique(plan.lengths[chosen].argmax(axis=0))
    return chosen[np.concatenate([pillars, np.setdiff1d(np.arange(len(chosen)), pillars)])]
