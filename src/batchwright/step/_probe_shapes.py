"""Which shapes to measure: few, spread over items and lengths, up to the limit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..errors import BudgetError
from ..plan import Budget, MaxItems
from ..plan._arrays import as_lengths, as_whole
from ..plan.budget import check_budget

QUANTILES = (0.1, 0.5, 0.9, 1.0)
# Shares of what fits at a length; the limit matters most.
SHARES = (1.0, 0.4, 0.15, 0.7, 0.05)
MIN_LENGTHS = 3


def default_shapes(lengths: npt.ArrayLike, budget: Budget | int, *, num: int = 10) -> list[tuple[int, ...]]:
    """Choose shapes for ``calibrate``: spread over the lengths of the data and over numbers of items.

    Lengths are quantiles of each axis, the longest among them; axes are combined in step and out of step, so that a fit
    can tell their terms apart. At each, the number of items is a share of what the budget allows.

    Args:
        lengths: of the data, ``(N,)`` or ``(N, axes)``.
        budget: the largest batches to try, or the most items; running out of memory is not a failure of ``calibrate``.
        num: how many shapes, at least 4; fewer come back where data or budget have not so many.

    Returns:
        Shapes ``(num_items, padded length per axis)``, fewest tokens first.

    >>> default_shapes([8, 16, 16, 32, 64], MaxItems(8), num=6)
    [(3, 8), (3, 16), (8, 8), (8, 16), (3, 64), (8, 64)]
    """
    num = as_whole("num", num, least=4)
    limit = MaxItems(budget) if isinstance(budget, int) else check_budget(budget)
    levels = [levels_of(column) for column in as_lengths(lengths).T]
    found = dict.fromkeys(_one_side_at_a_time(limit, levels))
    for shape in _candidates(limit, levels):
        if len(found) < num:
            found[shape] = None
    return sorted(found, key=lambda shape: (shape[0] * sum(shape[1:]), max(shape[1:])))


def _one_side_at_a_time(limit: Budget, levels: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield each axis at its longest beside the shortest others, where all at their longest do not fit.

    An example that is longest on one axis need not be so on the others.
    """
    if _shape(limit, tuple(axis[-1] for axis in levels), 1.0) is not None:
        return
    for long_axis in range(len(levels)):
        row = one_long(levels, long_axis, levels[long_axis][-1])
        shape = _shape(limit, row, 1.0)
        if shape is None:
            raise BudgetError(f"not one item of length {row} fits {limit}; raise the budget")
        yield shape


def one_long(levels: list[list[int]], long_axis: int, length: int) -> tuple[int, ...]:
    """Return a row with one axis of a given length and the others at their shortest.

    >>> one_long([[8, 16], [4, 9]], 1, 9)
    (8, 9)
    """
    return tuple(length if place == long_axis else axis[0] for place, axis in enumerate(levels))


def levels_of(column: npt.NDArray[np.int32]) -> list[int]:
    """Return a few lengths of an axis, shortest first, the longest last."""
    found = np.unique(np.quantile(column, QUANTILES, method="inverted_cdf"))  # lengths that exist: images, frames
    if len(found) < MIN_LENGTHS:  # data of one length: shorter ones tell what a length costs
        found = np.unique([-(-found[-1] // 4), -(-found[-1] // 2), *found])
    return [int(length) for length in found]


def _candidates(limit: Budget, levels: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield shapes, the most telling first: in each turn every length once, the longest first."""
    num_levels = max(map(len, levels))
    for turn in range(len(SHARES)):
        for place in range(num_levels):
            # In the first turn the longest and the shortest rows fill the budget, in the second those between.
            is_inner = 0 < place < num_levels - 1
            share = SHARES[turn ^ is_inner if turn < 2 else turn]
            places = [(place + turn * axis) % len(axis_levels) for axis, axis_levels in enumerate(levels)]
            row = tuple(axis_levels[-1 - at] for axis_levels, at in zip(levels, places, strict=True))
            shape = _shape(limit, row, share)
            if shape is not None:
                yield shape


def _shape(limit: Budget, row: tuple[int, ...], share: float) -> tuple[int, ...] | None:
    """Return a row of lengths with a share of the items that fit, None if not one does."""
    most = int(limit.max_items(np.array([row], dtype=np.int64))[0])
    return (max(1, int(share * most)), *row) if most else None
