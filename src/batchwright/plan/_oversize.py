"""Examples that do not fit the budget even in a batch of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from .._lengths import pad_up
from .._types import MAX_INT32, IntArray
from ..errors import BudgetError, LengthsError
from ._groups import AtomicGroups
from ._settings import PlanSettings
from .budget import Budget
from .grouping.base import distinct, to_units


@final
class Admitted(NamedTuple):
    """The examples a grouping receives, and what became of the others."""

    lengths: npt.NDArray[np.int32]  # as planned, of all examples
    oversize: IntArray  # the indices of those that are not grouped, empty where all are
    kept: IntArray | None = None  # the indices of those that are, None where that is all of them
    num_truncated: int = 0
    groups: AtomicGroups | None = None  # of those that are grouped
    lone_sizes: IntArray | None = None  # how many of ``oversize`` form each group, None where each stands for itself


def admit(lengths: npt.NDArray[np.int32], budget: Budget, settings: PlanSettings) -> Admitted:
    """Find the examples over the budget and treat them as ``oversize`` says."""
    _check_padded(lengths, settings)
    if settings.groups is not None and settings.groups.largest > 1:
        return _admit_groups(lengths, budget, settings, settings.groups)
    over = _find_over(lengths, budget, settings)
    none = np.empty(0, dtype=np.int64)
    if len(over) == 0:
        return Admitted(lengths, none)
    if settings.oversize == "error":
        raise BudgetError(_complaint(lengths, over, budget, settings))
    if settings.oversize == "truncate":
        return Admitted(_truncated(lengths, over, budget, settings), none, num_truncated=len(over))
    if settings.oversize == "drop" and len(over) == len(lengths):
        raise BudgetError(f"every example is over {budget}, so oversize='drop' leaves nothing; raise the budget")
    return Admitted(lengths, over, kept=np.delete(np.arange(len(lengths)), over))


def fits(lengths: IntArray, budget: Budget, settings: PlanSettings) -> npt.NDArray[np.bool_]:
    """Return whether an example of each length ``(M, axes)`` fits a batch, or a packed row, by itself."""
    if settings.grouping.row_capacity is not None:
        return np.all(lengths <= settings.grouping.row_capacity, axis=1)
    return budget.fraction(np.ones(len(lengths), dtype=np.int64), pad_up(lengths, settings.pad_multiple_of)) <= 1


def _admit_groups(
    lengths: npt.NDArray[np.int32], budget: Budget, settings: PlanSettings, groups: AtomicGroups
) -> Admitted:
    """Treat whole groups: one is over the budget where it does not fit, padded to its longest member."""
    none = np.empty(0, dtype=np.int64)
    is_over = ~_groups_fit(lengths, groups, budget, settings)
    over = np.flatnonzero(is_over)
    if len(over) == 0:
        return Admitted(lengths, none, groups=groups)
    if settings.oversize == "error":
        raise BudgetError(_group_complaint(lengths, groups, over, budget, settings))
    if settings.oversize == "truncate":
        cut = _truncated_groups(lengths, groups, is_over, budget, settings)
        return Admitted(cut, none, num_truncated=int((cut < lengths).any(axis=1).sum()), groups=groups)
    if settings.oversize == "drop" and len(over) == len(groups.sizes):
        raise BudgetError(f"every group is over {budget}, so oversize='drop' leaves nothing; raise the budget")
    is_lone = np.repeat(is_over, groups.sizes)
    return Admitted(
        lengths,
        groups.members[is_lone],
        kept=np.sort(groups.members[~is_lone]),
        groups=groups.some(~is_over),
        lone_sizes=groups.sizes[over],
    )


def _groups_fit(
    lengths: npt.NDArray[np.int32], groups: AtomicGroups, budget: Budget, settings: PlanSettings
) -> npt.NDArray[np.bool_]:
    """Return whether each group fits a batch by itself."""
    capacity = settings.grouping.row_capacity
    if capacity is None:
        return budget.fraction(groups.sizes, pad_up(groups.longest(lengths), settings.pad_multiple_of)) <= 1
    from .grouping._blocks import rows_hold

    # Where not even one row fits, the grouping says so.
    return rows_hold(groups.members_of(lengths), capacity, max(1, int(budget.max_items(np.array([[capacity]]))[0])))


def _group_complaint(
    lengths: npt.NDArray[np.int32], groups: AtomicGroups, over: IntArray, budget: Budget, settings: PlanSettings
) -> str:
    first = int(over[0])
    more = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
    length = groups.longest(lengths)[first].tolist()
    shown = length[0] if len(length) == 1 else tuple(length)
    packed = f" in rows of {settings.grouping}" if settings.grouping.row_capacity is not None else ""
    return (
        f"{groups.describe(first)}{more} with a longest length of {shown} is over {budget}{packed} by itself; raise "
        'the limit, make the group smaller, or pass oversize="alone", "drop" or "truncate"'
    )


def _truncated_groups(
    lengths: npt.NDArray[np.int32],
    groups: AtomicGroups,
    is_over: npt.NDArray[np.bool_],
    budget: Budget,
    settings: PlanSettings,
) -> npt.NDArray[np.int32]:
    """Cut the longest axes of the members of each oversize group down to the largest common cap that fits."""
    examples = np.sort(groups.members[np.repeat(is_over, groups.sizes)])
    rows, some = lengths[examples], groups.some(is_over)

    def cut(caps: IntArray) -> npt.NDArray[np.int32]:
        return np.minimum(rows, caps[some.ids, None]).astype(np.int32)

    caps = _largest_caps(some.longest(rows).max(axis=1), lambda caps: _groups_fit(cut(caps), some, budget, settings))
    if (caps < 1).any():
        group = int(np.flatnonzero(is_over)[(caps < 1).argmax()])
        raise BudgetError(
            f"{groups.describe(group)} does not fit {budget} even at one token each, so it cannot be cut to fit; raise "
            'the limit, make the group smaller, or pass oversize="alone" or "drop"'
        )
    planned = lengths.copy()
    planned[examples] = cut(caps)
    return planned


def _check_padded(lengths: npt.NDArray[np.int32], settings: PlanSettings) -> None:
    longest = int(lengths.max())
    if -(-longest // settings.pad_multiple_of) * settings.pad_multiple_of > MAX_INT32:
        raise LengthsError(
            f"length {longest} padded to a multiple of {settings.pad_multiple_of} is over {MAX_INT32}; "
            "use a coarser unit or a smaller pad_multiple_of"
        )


def _find_over(lengths: npt.NDArray[np.int32], budget: Budget, settings: PlanSettings) -> IntArray:
    longest = np.array([[axis.max() for axis in lengths.T]])  # axis by axis: over short rows a reduction is slow
    if fits(longest, budget, settings)[0]:
        return np.empty(0, dtype=np.int64)
    if lengths.shape[1] > 1:
        return np.flatnonzero(~fits(lengths, budget, settings))
    # Budgets grow with length, so one length divides the examples: find it among the distinct ones.
    values, _ = distinct(to_units(lengths[:, 0], settings.pad_multiple_of))
    good = fits(values[:, None] * settings.pad_multiple_of, budget, settings)
    limit = values[good][-1] * settings.pad_multiple_of if good.any() else 0
    return np.flatnonzero(lengths[:, 0] > limit)


def _complaint(lengths: IntArray, over: IntArray, budget: Budget, settings: PlanSettings) -> str:
    first, longest = int(over[0]), int(over[lengths[over].sum(axis=1, dtype=np.int64).argmax()])
    shown, most = (row[0] if len(row) == 1 else tuple(row) for row in lengths[[first, longest]].tolist())
    more = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
    worst = "" if most == shown else f", and example {longest} of {most} by the most"
    capacity = settings.grouping.row_capacity
    limit = repr(budget) if capacity is None else f"Packed(capacity={capacity})"
    return (
        f"example {first}{more} of length {shown} is over {limit} by itself{worst}; raise the limit, "
        'or pass oversize="alone", "drop" or "truncate"'
    )


def _truncated(
    lengths: npt.NDArray[np.int32], over: IntArray, budget: Budget, settings: PlanSettings
) -> npt.NDArray[np.int32]:
    """Cut the longest axes of each oversize example down to the largest common cap that fits."""
    rows = lengths[over]
    caps = _largest_caps(rows.max(axis=1), lambda caps: fits(np.minimum(rows, caps[:, None]), budget, settings))
    if (caps < 1).any():
        raise BudgetError(f"not even one token of an example fits {budget}; raise the budget")
    cut = lengths.copy()
    cut[over] = np.minimum(rows, caps[:, None])
    return cut


def _largest_caps(longest: IntArray, fit: Callable[[IntArray], npt.NDArray[np.bool_]]) -> IntArray:
    """Return the largest cap below each longest length under which all is well, 0 where none is: by bisection."""
    low = np.zeros(len(longest), dtype=np.int64)
    high = longest.astype(np.int64)
    while (high - low > 1).any():
        middle = (low + high) // 2
        good = fit(np.maximum(middle, 1))
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return low
