"""In which order shapes are probed: a list, or batches that grow until they fill the memory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..plan import Budget, MaxItems, MaxTokens, MemoryModel
from ..plan._arrays import as_lengths
from ..plan._features import MIN_ROWS
from ..plan._phases import MIN_SHAPES, Phases, one_phase, peak_of, two_phases
from ._probe_shapes import default_shapes, levels_of
from .calibration import Measurement, Shape

# Yields a shape, is sent what it took (None: memory ran out), and returns why shapes were left out, None if none were.
Strategy: TypeAlias = Generator[Shape, Measurement | None, str | None]
Explore: TypeAlias = Callable[[int | None], Strategy]

# A first look at small batches, then up to the memory that is there, but no further than this.
FIRST_LOOK = MaxItems(4)
MOST_TOKENS = MaxTokens(2**18)
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
        if limit is not None and len(found) >= MIN_ROWS and float(peak_of(_fit(found), [shape])[0]) > limit:
            return f"{shape} is predicted over {limit} bytes"
        row = yield shape
        if row is None:
            return f"{shape} ran out of memory"
        found.append(row)
    return None


def growing(lengths: npt.ArrayLike, limit: int | None) -> Strategy:
    """Probe small batches, then larger ones at a few lengths, until all come near the limit.

    In each round every row of lengths runs with as many items as are predicted to fit, but at most ``GROWTH`` times as
    many as have run. So no shape is far from what was measured, and in the end each row was measured at the limit,
    where a budget will use it. Of several axes, rows that are long on one alone come last, below the limit: rows whose
    axes are long together tell how much memory all of them take, but not which. A shape that runs out of memory is not
    the end: no batch as large in all its sides is tried again.
    """
    found: list[Measurement] = []
    failed: list[Shape] = []
    wanted = default_shapes(lengths, FIRST_LOOK)
    levels = [levels_of(column) for column in as_lengths(lengths).T]
    rows, uneven = list(dict.fromkeys(_rows(levels))), list(dict.fromkeys(_uneven_rows(levels)))
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
        wanted = list(_larger(rows, found, failed, limit))
        if not wanted and uneven:
            wanted, uneven = _filling(uneven, found, int(UNEVEN_SHARE * limit)), []
    return f"{failed[0]} ran out of memory" if failed else None


def _fit(found: Sequence[Measurement]) -> Phases:
    shapes = np.array([row.shape for row in found])
    peaks = np.array([float(row.peak_bytes or 0) for row in found])
    return (two_phases if len(found) >= MIN_SHAPES else one_phase)(shapes, peaks)


def _rows(levels: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield rows of lengths: all axes from short to long in step, then each at its longest beside short others."""
    for place in range(max(map(len, levels))):
        yield tuple(axis[min(place, len(axis) - 1)] for axis in levels)
    if len(levels) > 1:
        for long_axis in range(len(levels)):
            yield tuple(axis[-1 if place == long_axis else 0] for place, axis in enumerate(levels))


def _uneven_rows(levels: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Yield rows of lengths with one axis at a middle level, the others at their shortest."""
    if len(levels) > 1:
        for long_axis, chosen in enumerate(levels):
            for level in chosen[1:-1]:
                yield tuple(level if place == long_axis else axis[0] for place, axis in enumerate(levels))


def _fitting(rows: list[tuple[int, ...]], found: list[Measurement], limit: int) -> list[int]:
    """Return how many items of each row are predicted to fit."""
    phases = _fit(found)
    model = MemoryModel(phases[0], 0.0, phases[1] if len(phases) > 1 else None)
    budget: Budget = model.budget(limit) & MOST_TOKENS
    most: list[int] = budget.max_items(np.array(rows)).tolist()
    return most


def _filling(rows: list[tuple[int, ...]], found: list[Measurement], limit: int) -> list[Shape]:
    return [(most, *row) for row, most in zip(rows, _fitting(rows, found, limit), strict=True) if most > 0]


def _larger(rows: list[tuple[int, ...]], found: list[Measurement], failed: list[Shape], limit: int) -> Iterator[Shape]:
    """Yield the next shape of every row that can still grow, fewest tokens first."""
    shapes = []
    for row, most in zip(rows, _fitting(rows, found, limit), strict=True):
        ran = max((probe.shape[0] for probe in found if probe.shape[1:] == row), default=0)
        num = min(max(GROWTH * ran, FIRST_LOOK.limit), most)
        while num > ran and any(_is_as_large((num, *row), other) for other in failed):
            num = (num + ran) // 2
        if num > WORTHWHILE * ran:
            shapes.append((num, *row))
    yield from sorted(shapes, key=lambda shape: shape[0] * sum(shape[1:]))


def _is_as_large(shape: Shape, other: Shape) -> bool:
    return all(one >= two for one, two in zip(shape, other, strict=True))
