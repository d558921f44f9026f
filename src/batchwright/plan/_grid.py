"""Static shapes on two axes: the second axis is bounded within each bucket of the first."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ._arrays import IntArray
from ._buckets import fill_cells
from ._cut import cut_rest
from ._keys import UInt64Array, sort_examples
from ._problem import Groups, Problem, distinct, to_units
from ._random import Purpose
from .shapes import least_padding_bounds

_Part: TypeAlias = tuple[npt.NDArray[np.int32], IntArray, IntArray]  # examples of batches in turn, sizes, shapes


@final
class Grid(NamedTuple):
    """Bounds of the first axis, those of the second within each row, and shapes of their own for the misfits.

    A cell may be too large for the budget though each of its examples fits alone (one is long on the first axis, the
    other on the second). Such examples are misfits: they are batched at their own lengths.
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


def make_grid(problem: Problem, counts: tuple[int, int], batches_per_bucket: float) -> Grid:
    """Bound the first axis, then the second within each row, by the least padding."""
    units = to_units(problem.lengths, problem.pad_multiple_of)
    useful = max(1.0, problem.num_batches / batches_per_bucket)
    row_bounds = least_padding_bounds(*distinct(units[:, 0]), max(1, min(counts[0], round(math.sqrt(useful)))))
    row_of = np.searchsorted(row_bounds, units[:, 0])
    cell_bounds, misfits = [], [np.empty((0, 2), dtype=np.int64)]
    for row, bound in enumerate(row_bounds):
        members = units[row_of == row]
        share = max(1, round(useful * len(members) / problem.num_examples))
        cells = least_padding_bounds(*distinct(members[:, 1]), min(counts[1], share))
        fits = problem.budget.max_items(_shapes(problem, int(bound), cells)) > 0
        # Budgets grow with length, so the cells that fit come first and the misfits lie above the last of them.
        top = int(cells[fits][-1]) if fits.any() else 0
        misfits.append(np.unique(members[members[:, 1] > top], axis=0).astype(np.int64))
        cell_bounds.append(cells[fits])
    return Grid(row_bounds, cell_bounds, np.concatenate(misfits))


def group_grid(problem: Problem, grid: Grid) -> Groups:
    """Batch the examples cell by cell; leftovers join the next cell of the row, the last of a row stay short."""

    def fields(start: int, stop: int, chance: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
        units = to_units(problem.lengths[start:stop, 0], problem.pad_multiple_of)
        row = np.searchsorted(grid.row_bounds, units)
        return row.astype(np.uint64), np.zeros(stop - start, dtype=np.uint64)

    keys = sort_examples(
        problem.num_examples,
        fields,
        num_groups=len(grid.row_bounds),
        max_value=0,
        stream=problem.stream(Purpose.GROUP),
    )
    layout = _Layout(problem)
    strays = []
    for row, (start, stop) in enumerate(zip(keys.group_offsets[:-1], keys.group_offsets[1:], strict=True)):
        strays.append(_fill_row(layout, grid, row, keys.indices[start:stop]))
    _fill_misfits(layout, np.concatenate(strays))
    return layout.groups()


@final
class _Layout:
    """Collects batches: the examples of each in turn, its size and its static shape."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._parts: tuple[list[_Part], list[_Part]] = ([], [])  # full batches, short ones

    def units(self, indices: npt.NDArray[np.int32]) -> IntArray:
        return to_units(self.problem.lengths[indices], self.problem.pad_multiple_of)

    def fill(self, indices: npt.NDArray[np.int32], counts: IntArray, shapes: IntArray) -> None:
        """Cut cells that lie one behind the other; what is left at the end becomes short batches."""
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

    def groups(self) -> Groups:
        full, short = self._parts
        indices, sizes, padded = (np.concatenate(part) for part in zip(*full, *short, strict=True))
        num_short = sum(len(sizes) for _, sizes, _ in short)
        return Groups(indices, np.cumsum(sizes) - sizes, sizes, padded, num_short=num_short)


def _fill_row(layout: _Layout, grid: Grid, row: int, indices: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Fill the cells of a row and return the examples that fit none of them."""
    bounds = grid.cell_bounds[row]
    cell = np.searchsorted(bounds, layout.units(indices)[:, 1])
    inside = indices[cell < len(bounds)]
    if len(inside):
        cell_inside = cell[cell < len(bounds)]
        by_cell = inside[np.argsort(cell_inside, kind="stable")]
        shapes = _shapes(layout.problem, int(grid.row_bounds[row]), bounds)
        layout.fill(by_cell, np.bincount(cell_inside, minlength=len(bounds)), shapes)
    return indices[cell == len(bounds)]


def _fill_misfits(layout: _Layout, indices: npt.NDArray[np.int32]) -> None:
    """Batch examples of equal lengths."""
    shapes, which, counts = np.unique(layout.units(indices), axis=0, return_inverse=True, return_counts=True)
    shapes = shapes.astype(np.int64) * layout.problem.pad_multiple_of
    sizes = layout.problem.sizes(shapes)
    by_shape = indices[np.argsort(which.reshape(-1), kind="stable")]
    full = counts // sizes
    place = np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)
    in_full = place < np.repeat(full * sizes, counts)
    layout.add(by_shape[in_full], np.repeat(sizes, full), np.repeat(shapes, full, axis=0))
    rests = [layout.cut_rest(rest, size) for rest, size in zip(counts - full * sizes, sizes, strict=True)]
    num_short = [len(rest) for rest in rests]
    short = np.concatenate([np.empty(0, dtype=np.int64), *rests])
    layout.add(by_shape[~in_full], short, np.repeat(shapes, num_short, axis=0), short=True)


def _shapes(problem: Problem, row_bound: int, cell_bounds: IntArray) -> IntArray:
    cells = np.stack([np.full(len(cell_bounds), row_bound), cell_bounds], axis=1)
    return cells.astype(np.int64) * problem.pad_multiple_of
