"""The shapes to measure: a fixed list, or chosen while they are measured."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole, is_number
from ..._lengths import as_lengths
from ...errors import BudgetError
from ...plan import Budget, MaxItems, MaxTokens, MemoryModel
from ...plan.budget import check_budget
from ...plan.models.memory import MIN_ROWS, MIN_SHAPES, one_phase, two_phases
from ._bounds import dominates
from .result import Measurement, Shape

QUANTILES = (0.1, 0.5, 0.9, 1.0)
# Shares of the items that fit at a length; the limit matters most.
SHARES = (1.0, 0.4, 0.15, 0.7, 0.05)
MIN_LENGTHS = 3
# A first look at small batches, before they grow.
FIRST_LOOK = MaxItems(4)
# A model fitted to small batches says little about large ones, so batches grow at most by this factor at a time.
GROWTH = 4
# Rows that are long on only one axis are known least, so they stay this far below the limit.
UNEVEN_SHARE = 0.85
# A batch that is not this much larger than a measured one shows nothing new.
WORTHWHILE = 1.25

# Yields a shape, is sent its measurement (None if memory ran out), and returns why shapes were left out, or None.
Strategy: TypeAlias = Generator[Shape, Measurement | None, str | None]
Explore: TypeAlias = Callable[[int | None], Strategy]


def default_shapes(lengths: npt.ArrayLike, budget: Budget | int, *, num: int = 10) -> list[tuple[int, ...]]:
    """Choose shapes for ``calibrate``: spread over the lengths of the data and over numbers of items.

    Lengths are quantiles of each axis, the longest among them; axes are combined in step and out of step, so that a fit
    can tell their terms apart. At each, the number of items is a share of what the budget allows.

    Args:
        lengths: those of the data, ``(N,)`` or ``(N, axes)``.
        budget: the largest batches to try, or the most items; ``calibrate`` goes on if one runs out of memory.
        num: how many shapes, at least 4; fewer are returned if data or budget do not allow as many.

    Returns:
        Shapes ``(num_items, padded length per axis)``, fewest tokens first.

    >>> default_shapes([8, 16, 16, 32, 64], MaxItems(8), num=6)
    [(3, 8), (3, 16), (8, 8), (8, 16), (3, 64), (8, 64)]
    """
    num = as_whole("num", num, least=4)
    limit = MaxItems(budget) if is_number(budget) else check_budget(budget)  # type: ignore[arg-type]
    levels = [levels_of(column) for column in as_lengths(lengths).T]
    found = dict.fromkeys(_one_side_at_a_time(limit, levels))
    for shape in _candidates(limit, levels):
        if len(found) < num:
            found[shape] = None
    return sorted(found, key=lambda shape: (shape[0] * sum(shape[1:]), max(shape[1:])))


def _one_side_at_a_time(limit: Budget, levels: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield each axis at its longest beside the shortest others, where all at their longest do not fit.

    An example that is longest on one axis need not be longest on the others.
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
    """Return a few lengths of an axis, from the shortest to the longest."""
    # Only lengths that occur: not every width of an image or number of frames is possible.
    found = np.unique(np.quantile(column, QUANTILES, method="inverted_cdf"))
    if len(found) < MIN_LENGTHS:  # data of one length: shorter ones show what a length costs
        found = np.unique([-(-found[-1] // 4), -(-found[-1] // 2), *found])
    return [int(length) for length in found]


def _candidates(limit: Budget, levels: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield shapes, the most informative first: in each turn every length once, the longest first."""
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
    """Return a row of lengths with a share of the items that fit, None if no item fits."""
    most = int(limit.max_items(np.array([row], dtype=np.int64))[0])
    return (max(1, int(share * most)), *row) if most else None


def in_turn(probes: Sequence[Shape], limit: int | None) -> Strategy:
    """Measure a list of shapes, until one runs out of memory or is predicted over the limit."""
    found: list[Measurement] = []
    for shape in probes:
        if limit is not None and len(found) >= MIN_ROWS and float(_fit(found).predict([shape])[0]) > limit:
            return f"{shape} is predicted over {limit} bytes"
        row = yield shape
        if row is None:
            return f"{shape} ran out of memory"
        found.append(row)
    return None


def growing_shapes(lengths: npt.ArrayLike, *, max_tokens: int = 2**18) -> Explore:
    """Choose shapes for ``calibrate`` while they are measured: batches grow until they fill the memory.

    Small batches run first, then larger ones at a few lengths of the data. In each round every row of lengths runs with
    as many items as are predicted to fit, but at most 4 times as many as have run. So no shape is far from one that was
    measured, and in the end each row is measured at the limit, where a budget will use it. With several axes, rows that
    are long on only one of them come last, below the limit: rows that are long on all axes show how much memory these
    take together, but not which axis takes it. After a shape ran out of memory, batches at least as large on all sides
    are left out, and the others go on. If memory is not measured, as on a CPU without a monitor, small batches are all.

    Args:
        lengths: those of the data, ``(N,)`` or ``(N, axes)``.
        max_tokens: the most padded tokens of a batch, even if more fit: a larger shape is not worth its time.

    >>> shapes = growing_shapes([8, 16, 16, 32, 64])(None)  # what calibrate does, without a limit
    >>> next(shapes)
    (1, 8)
    """
    limit_tokens = MaxTokens(max_tokens)
    return lambda limit: _growing(lengths, limit, limit_tokens)


def _growing(lengths: npt.ArrayLike, limit: int | None, limit_tokens: MaxTokens) -> Strategy:
    found: list[Measurement] = []
    failed: list[Shape] = []
    wanted = default_shapes(lengths, FIRST_LOOK)
    columns = as_lengths(lengths).T
    levels = [levels_of(column) for column in columns]
    rows = list(dict.fromkeys(_rows(levels)))
    uneven = [row for row in dict.fromkeys(_uneven_rows(levels, columns)) if row not in rows]
    while wanted:
        for shape in wanted:
            if any(dominates(shape, other) for other in failed):
                continue
            row = yield shape
            if row is None:
                failed.append(shape)
            else:
                found.append(row)
        if limit is None or len(found) < MIN_ROWS:
            break  # nothing to grow towards, or too little for a model
        model = _fit(found)
        wanted = list(_larger(rows, found, failed, model.budget(limit) & limit_tokens))
        if not wanted:  # no row can grow any more: now those that are long on one axis only, once each
            uneven = [lengths_of for lengths_of in uneven if all(row.shape[1:] != lengths_of for row in found)]
            wanted = list(_filling(uneven, failed, model.budget(UNEVEN_SHARE * limit) & limit_tokens))
    return f"{failed[0]} ran out of memory" if failed else None


def _fit(found: Sequence[Measurement]) -> MemoryModel:
    """Return the memory model of the measurements, without a margin."""
    shapes = np.array([row.shape for row in found])
    peaks = np.array([float(row.peak_bytes or 0) for row in found])
    phases = (two_phases if len(found) >= MIN_SHAPES else one_phase)(shapes, peaks)
    return MemoryModel(phases[0], 0.0, phases[1] if len(phases) > 1 else None)


def _rows(levels: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield rows of lengths: all axes from short to long in step, then each at its longest with the others short."""
    for place in range(max(map(len, levels))):
        yield tuple(axis[min(place, len(axis) - 1)] for axis in levels)
    if len(levels) > 1:
        for long_axis in range(len(levels)):
            yield one_long(levels, long_axis, levels[long_axis][-1])


def _uneven_rows(levels: list[list[int]], columns: npt.NDArray[np.int32]) -> Iterator[tuple[int, ...]]:
    """Yield rows of lengths with one axis at a middle level or half its longest, the others at their shortest.

    An encoder may take more than its decoder only if the source is long; one length would not show how it grows.
    """
    if len(levels) > 1:
        for long_axis, (chosen, column) in enumerate(zip(levels, columns, strict=True)):
            half = int(column[np.abs(2 * column.astype(np.int64) - column.max()).argmin()])
            for level in (*chosen[1:-1], half):
                yield one_long(levels, long_axis, level)


def _filling(rows: list[tuple[int, ...]], failed: list[Shape], budget: Budget) -> Iterator[Shape]:
    """Yield each row of lengths with as many items as fit, or half as many as ran out of memory."""
    for row in rows:
        num = int(budget.max_items(np.array([row]))[0])
        while num and any(dominates((num, *row), other) for other in failed):
            num //= 2
        if num:
            yield (num, *row)


def _larger(
    rows: list[tuple[int, ...]], found: list[Measurement], failed: list[Shape], budget: Budget
) -> Iterator[Shape]:
    """Yield the next shape of every row that can still grow, fewest tokens first."""
    shapes = []
    for row, most in zip(rows, budget.max_items(np.array(rows)).tolist(), strict=True):
        ran = max((probe.shape[0] for probe in found if probe.shape[1:] == row), default=0)
        num = min(max(GROWTH * ran, FIRST_LOOK.limit), most)
        while num > ran and any(dominates((num, *row), other) for other in failed):
            num = (num + ran) // 2
        if num > WORTHWHILE * ran:
            shapes.append((num, *row))
    yield from sorted(shapes, key=lambda shape: shape[0] * sum(shape[1:]))
