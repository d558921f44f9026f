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

# Of more examples, a part is planned, evenly spread: the checks need some full batches, not all of them.
_MOST_EXAMPLES = 50_000
_Batch: TypeAlias = tuple[Shape, IntArray]  # and its examples

# One per kind runs if all is well; more if not, up to this many.
_MOST_RUNS = 24
# Where a fit is doubtful, each full batch is at most this many times as long on an axis as one that ran.
_APART = 1.3
# Batches that are predicted to take less than this share of the limit are not near it, even if the fit is wrong.
_NEAR = 0.75
_SMALL = 0.5  # and those that took less than this share of that say little
# Batches that are predicted to take this share of what the largest takes are as demanding.
_FULL = 0.95
# Checks may take so much longer than the search; those of a doubtful fit less, as a wider margin does too.
_MOST_SECONDS, _MOST_SECONDS_IN_DOUBT = 10.0, 4.0


def planned_checks(search: Search, lengths: IntArray) -> Iterator[tuple[Shape, list[int]]]:
    """Yield planned batches, as shapes and examples; ``search.note`` gets what each took before the next is asked for.

    A budget is fitted to a few rows of lengths, and plans thousands of other shapes. So of the batches that it plans
    the most demanding run: the one of most bytes, the one of most items, and those that are longest on one axis. What
    takes more than was planned for, or runs out of memory, changes the fit and the plan, and is looked at again. A fit
    that misses even what ran, as memory follows another law, is doubtful between these too: then full batches of all
    lengths run.

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
        more = _MOST_SECONDS
        if found is None and search.is_doubtful:
            found, more = _least_known(plan, budget, search), _MOST_SECONDS_IN_DOUBT
        if found is None:
            search.is_checked = True
            return
        shape, examples = found
        num = search.instead(shape)
        if search.takes_too_long((num, *shape[1:]), more=more):
            return
        before = search.num_surprises
        yield (num, *shape[1:]), places[np.resize(examples, num)].tolist()
        if search.num_surprises > before:
            kind = 0  # the fit was wrong, and so may be what it said of the others
        elif not is_short and num == shape[0] and kind < num_kinds:
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


def _least_known(plan: Plan, budget: FoundBudget, search: Search) -> _Batch | None:
    """Return the full batch whose lengths are farthest from those of all that ran near the limit; None if all are near.

    Nothing is said by small batches of these lengths: they do not show what an item takes beside all that is there.
    """
    assert budget.memory is not None
    near = _NEAR * budget.memory.max_bytes
    bytes_of = budget.memory.model.predict(plan.shapes)
    full = np.flatnonzero(bytes_of >= min(near, _FULL * float(bytes_of.max())))
    ran = np.array([probe.shape for probe in search.found if (probe.peak_bytes or 0) >= _SMALL * near])
    if not len(ran):
        return None
    apart = np.abs(np.log(plan.shapes[full, None, 1:]) - np.log(ran[None, :, 1:])).max(axis=2).min(axis=1)
    if apart.max() <= np.log(_APART):
        return None
    place = int(full[apart.argmax()])
    return as_shape(plan.shapes[place]), _pillars_first(plan, place)


def _is_known(shape: Shape, budget: FoundBudget, search: Search) -> bool:
    """Say whether a batch at least as large ran, or this one is far from all limits, also that of items that ran."""
    assert budget.memory is not None
    predicted = float(budget.memory.model.predict([shape])[0])
    few = min([max(num for num, *_ in search.ran), *(int(CLOSE * num) for num, *_ in search.failed)])
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
