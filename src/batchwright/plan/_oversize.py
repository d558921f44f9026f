"""Examples that do not fit the budget even in a batch of their own."""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from .._lengths import pad_up
from .._types import MAX_INT32, IntArray
from ..errors import BudgetError, LengthsError
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


def admit(lengths: npt.NDArray[np.int32], budget: Budget, settings: PlanSettings) -> Admitted:
    """Find the examples over the budget and treat them as ``oversize`` says."""
    _check_padded(lengths, settings)
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
    first = int(over[0])
    length = lengths[first].tolist()
    shown = length[0] if len(length) == 1 else tuple(length)
    more = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
    capacity = settings.grouping.row_capacity
    limit = repr(budget) if capacity is None else f"Packed(capacity={capacity})"
    return (
        f"example {first}{more} of length {shown} is over {limit} by itself; raise the limit, "
        'or pass oversize="alone", "drop" or "truncate"'
    )


def _truncated(
    lengths: npt.NDArray[np.int32], over: IntArray, budget: Budget, settings: PlanSettings
) -> npt.NDArray[np.int32]:
    """Cut the longest axes of each oversize example down to the largest common cap that fits, by bisection."""
    rows = lengths[over]
    low = np.zeros(len(rows), dtype=np.int64)
    high = rows.max(axis=1).astype(np.int64)
    while (high - low > 1).any():
        middle = (low + high) // 2
        good = fits(np.minimum(rows, np.maximum(middle, 1)[:, None]), budget, settings)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    if (low < 1).any():
        raise BudgetError(f"not even one token of an example fits {budget}; raise the budget")
    cut = lengths.copy()
    cut[over] = np.minimum(rows, low[:, None])
    return cut
