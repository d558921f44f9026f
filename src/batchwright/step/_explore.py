"""In which order shapes are probed: a list, or batches that grow until they fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..plan import Budget, MaxItems, MaxTokens, MemoryModel
from ..plan._arrays import as_lengths
from ..plan._features import MIN_ROWS
from ..plan._phases import MIN_SHAPES, one_phase, two_phases
from ._probe_shapes import default_shapes, levels_of, one_long
from .calibration import Measurement, Shape

# Yields a shape, is sent what it took (None: memory ran out), and returns why shapes were left out, None if none were.
Strategy: TypeAlias = Generator[Shape, Measurement | None, str | None]
Explore: TypeAlias = Callable[[int | None], Strategy]

# A first look at small batches, then up to the memory that is there.
FIRST_LOOK = MaxItems(4)
# A model fitted to small batches says little of large ones, so batches grow by this factor at most at a time.
GROWTH = 4
# Rows that are long on one axis alone are the least known, so they stay this far below the limit.
UNEVEN_SHARE = 0.85
# Less than this much larger than what was measured tells nothing new.
WORTHWHILE = 1.25


def in_turn(probes: Sequence[Shape], limit: int | None) -> Strategy:
    """Probe a list, until a shape runs out of memory or is predicted over the limit."""
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
    as many items as are predicted to fit, but at most 4 times as many as have run. So no shape is far from what was
    measured, and in the end each row was measured at the limit, where a budget will use it. Of several axes, rows that
    are long on one alone come last, below the limit: rows whose axes are long together tell how much memory all of them
    take, but not which. A shape that runs out of memory is not the end: no batch as large in all its sides is tried
    again. Where memory is not measured, on a CPU without a monitor, small batches are all.

    Args:
        lengths: of the data, ``(N,)`` or ``(N, axes)``.
        max_tokens: the most padded tokens of a batch, whatever fits: a shape is worth no more time.

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
            if any(_is_as_large(shape, other) for other in failed):
                continue
            row = yield shape
            if row is None:
                failed.append(shape)
            else:
                found.append(row)
        if limit is None or len(found) < MIN_ROWS:
            break
        model = _fit(found)
        wanted = list(_larger(rows, found, failed, model.budget(limit) & limit_tokens))
        if not wanted:
            uneven = [lengths_of for lengths_of in uneven if all(row.shape[1:] != lengths_of for row in found)]
            wanted = list(_filling(uneven, failed, model.budget(UNEVEN_SHARE * limit) & limit_tokens))
    return f"{failed[0]} ran out of memory" if failed else None


def _fit(found: Sequence[Measurement]) -> MemoryModel:
    """Return the model of what was measured, without a margin."""
    shapes = np.array([row.shape for row in found])
    peaks = np.array([float(row.peak_bytes or 0) for row in found])
    phases = (two_phases if len(found) >= MIN_SHAPES else one_phase)(shapes, peaks)
    return MemoryModel(phases[0], 0.0, phases[1] if len(phases) > 1 else None)


def _rows(levels: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield rows of lengths: all axes from short to long in step, then each at its longest beside short others."""
    for place in range(max(map(len, levels))):
        yield tuple(axis[min(place, len(axis) - 1)] for axis in levels)
    if len(levels) > 1:
        for long_axis in range(len(levels)):
            yield one_long(levels, long_axis, levels[long_axis][-1])


def _uneven_rows(levels: list[list[int]], columns: npt.NDArray[np.int32]) -> Iterator[tuple[int, ...]]:
    """Yield rows of lengths with one axis at a middle level or half its longest, the others at their shortest.

    Where an encoder takes more than its decoder only if the source is long, one length would not tell how it grows.
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
        while num and any(_is_as_large((num, *row), other) for other in failed):
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
        while num > ran and any(_is_as_large((num, *row), other) for other in failed):
            num = (num + ran) // 2
        if num > WORTHWHILE * ran:
            shapes.append((num, *row))
    yield from sorted(shapes, key=lambda shape: shape[0] * sum(shape[1:]))


def _is_as_large(shape: Shape, other: Shape) -> bool:
    return all(one >= two for one, two in zip(shape, other, strict=True))
