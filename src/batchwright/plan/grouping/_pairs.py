"""A grid of lengths per axis: bounds of the first axis, and bounds of the second within each of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..._random import Purpose
from ..._types import MAX_INT32, IntArray
from ._bounds import least_padding_bounds
from ._cutting import cut_rest, fill_cells
from ._sort_keys import sort_examples
from .base import Catalogue, Groups, Problem, UInt64Array, distinct, stratum_lookup, to_units

_Part: TypeAlias = tuple[npt.NDArray[np.int32], IntArray, IntArray]  # examples of batches in turn, sizes, shapes


@final
class Grid(NamedTuple):
    """Bounds of the first axis, those of the second within each row, and shapes of their own for the misfits.

    A cell may be too large for the budget though each of its examples fits by itself (one is long on the first axis,
    the other on the second). Such examples are misfits: they are batched at their own lengths.
    """

    row_bounds: IntArray  # (rows,)
    cell_bounds: list[IntArray]  # for each row, ascending; only cells that fit
    misfits: IntArray  # (shapes, 2)

    def cells(self) -> IntArray:
        """Return every static shape, in units of padding."""
        rows = [
            np.stack([np.full(len(cells), row), cells], axis=1)
            for row, cells in zip(self.row_bounds, self.cell_bounds, strict=True)
        ]
        return np.concatenate([*rows, self.misfits])


# Below about one batch per cell, leftovers moved up cost more padding than finer bounds save.
_BATCHES_PER_CELL = 1.0


def make_grid(problem: Problem, counts: tuple[int, int]) -> Grid:
    """Bound the first axis, then the second within each row, by the least padding."""
    first, second = _axes(problem)
    useful = max(1.0, problem.num_batches / _BATCHES_PER_CELL)
    row_bounds = least_padding_bounds(*distinct(first), max(1, min(counts[0], round(math.sqrt(useful)))))
    row_of = stratum_lookup(row_bounds, int(row_bounds[-1]))(first).astype(np.int64)
    cell_bounds, tops = [], []
    for bound, (values, numbers) in zip(row_bounds, _by_row(row_of, second, len(row_bounds)), strict=True):
        share = max(1, round(useful * int(numbers.sum()) / problem.num_examples))
        cells = least_padding_bounds(values, numbers, min(counts[1], share))
        fits = problem.budget.max_items(_shapes(problem, int(bound), cells)) > 0
        # Budgets grow with length, so the cells that fit come first and the misfits lie above the last of them.
        tops.append(int(cells[fits][-1]) if fits.any() else 0)
        cell_bounds.append(cells[fits])
    above = second > np.array(tops)[row_of]
    return Grid(row_bounds, cell_bounds, _unpack(np.unique(_pack(first[above], second[above]))))


def _axes(problem: Problem) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return both axes in units of padding, each in an array of its own."""
    first, second = (to_units(problem.lengths[:, axis], problem.pad_multiple_of) for axis in (0, 1))
    return np.ascontiguousarray(first, dtype=np.int32), np.ascontiguousarray(second, dtype=np.int32)


def _by_row(row_of: IntArray, second: IntArray, num_rows: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the distinct units of the second axis in each row, and how often each stands there."""
    width = int(second.max()) + 1
    found, counts = distinct(row_of * width + second)
    edges = np.searchsorted(found, np.arange(num_rows + 1) * width)
    for row, (start, stop) in enumerate(pairwise(edges)):
        yield found[start:stop] - row * width, counts[start:stop]


def _pack(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> IntArray:
    """Return pairs as one number each, in the same order: far faster to sort."""
    return first.astype(np.int64) << 32 | second


def _unpack(pairs: IntArray) -> IntArray:
    return np.stack([pairs >> 32, pairs & MAX_INT32], axis=1)


def group_grid(problem: Problem, grid: Grid) -> Groups:
    """Batch the examples cell by cell; leftovers join the next cell of the row, the last of a row stay short."""

    first, second = _axes(problem)
    row_of = stratum_lookup(grid.row_bounds, int(grid.row_bounds[-1]))
    no_value = np.zeros(problem.num_examples, dtype=np.uint64)

    def fields(start: int, stop: int, chance: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
        return row_of(first[start:stop]), no_value[start:stop]

    keys = sort_examples(
        problem.num_examples,
        fields,
        num_groups=len(grid.row_bounds),
        max_value=0,
        stream=problem.stream(Purpose.GROUP),
    )
    layout = _Layout(problem)
    seconds = second.take(keys.indices)
    strays = []
    for row, (start, stop) in enumerate(pairwise(keys.group_offsets)):
        strays.append(_fill_row(layout, grid, row, keys.indices[start:stop], seconds[start:stop]))
    stray = np.concatenate(strays)
    _fill_misfits(layout, stray, _pack(first[stray], second[stray]))
    shapes = grid.cells() * problem.pad_multiple_of
    return replace(layout.groups(), catalogue=Catalogue(shapes, problem.sizes(shapes)))


@final
class _Layout:
    """Collects batches: the examples of each in turn, its size and its static shape."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._parts: tuple[list[_Part], list[_Part]] = ([], [])  # full batches, short ones

    def fill(self, indices: npt.NDArray[np.int32], counts: IntArray, shapes: IntArray) -> None:
        """Cut consecutive cells; what is left at the end becomes short batches."""
        sizes = self.problem.sizes(shapes)
        cut = fill_cells(counts, sizes)
        num_full = len(indices) - cut.rest
        self.add(indices[:num_full], cut.sizes, shapes[cut.cells])
        short = self.cut_rest(cut.rest, sizes[-1])
        self.add(indices[num_full:], short, shapes[np.full(len(short), -1)], short=True)

    def add(self, indices: npt.NDArray[np.int32], sizes: IntArray, shapes: IntArray, *, short: bool = False) -> None:
        self._parts[short].append((indices, sizes, shapes))

    def cut_rest(self, num_items: int, size: int) -> IntArray:
        return np.array(cut_rest(int(num_items), int(size), self.problem.rounding), dtype=np.int64)

    def cut_rests(self, rests: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray]:
        """Return the sizes of the short batches of all rests, and how many each rest takes."""
        if (self.problem.rounding.round(rests) == rests).all():  # each is one batch
            return rests[rests > 0], (rests > 0).astype(np.int64)
        cut = [self.cut_rest(rest, size) for rest, size in zip(rests, sizes, strict=True)]
        return np.concatenate(cut), np.array([len(short) for short in cut])

    def groups(self) -> Groups:
        full, short = self._parts
        indices, sizes, padded = (np.concatenate(part) for part in zip(*full, *short, strict=True))
        num_short = sum(len(sizes) for _, sizes, _ in short)
        return Groups(indices, np.cumsum(sizes) - sizes, sizes, padded, num_short=num_short)


def _fill_row(
    layout: _Layout, grid: Grid, row: int, indices: npt.NDArray[np.int32], units: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Fill the cells of a row with examples, given by their units on the second axis; return those that fit none."""
    bounds = grid.cell_bounds[row]
    cell = stratum_lookup(bounds, int(units.max()))(units)
    if len(bounds) < 1 << 16:
        cell = cell.astype(np.uint16)  # sorted by radix
    by_cell = indices[np.argsort(cell, kind="stable")]
    counts = np.bincount(cell.astype(np.int64), minlength=len(bounds) + 1)
    num_inside = len(indices) - int(counts[-1])
    if num_inside:
        shapes = _shapes(layout.problem, int(grid.row_bounds[row]), bounds)
        layout.fill(by_cell[:num_inside], counts[:-1], shapes)
    return by_cell[num_inside:]


def _fill_misfits(layout: _Layout, indices: npt.NDArray[np.int32], pairs: IntArray) -> None:
    """Batch examples of equal lengths."""
    order = np.argsort(pairs, kind="stable")
    by_shape = indices[order]
    distinct_pairs, counts = np.unique(pairs, return_counts=True)
    shapes = _unpack(distinct_pairs) * layout.problem.pad_multiple_of
    sizes = layout.problem.sizes(shapes)
    full, rest = np.divmod(counts, sizes)
    place = np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)
    in_full = place < np.repeat(full * sizes, counts)
    layout.add(by_shape[in_full], np.repeat(sizes, full), np.repeat(shapes, full, axis=0))
    short, num_short = layout.cut_rests(rest, sizes)
    layout.add(by_shape[~in_full], short, np.repeat(shapes, num_short, axis=0), short=True)


def _shapes(problem: Problem, row_bound: int, cell_bounds: IntArray) -> IntArray:
    cells = np.stack([np.full(len(cell_bounds), row_bound), cell_bounds], axis=1)
    return cells.astype(np.int64) * problem.pad_multiple_of
