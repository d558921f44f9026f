"""Buckets: a few static shapes that cost the least padding, for one axis or several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole
from ..._random import Purpose
from ..._types import MAX_INT32, IntArray
from ...errors import ArgumentError
from ._boxes import least_padding_bounds
from ._covering import check_enough
from ._cutting import cut_rest, fill_cells
from ._shelves import Flow, Line, Search, Shelves, Space, largest_divisor
from ._sort_keys import sort_examples
from .base import Catalogue, Grouping, Groups, Problem, UInt64Array, distinct, stratum_lookup, to_units

_MAX_AXES = 8  # the search has two candidate lengths per axis at the least, so the places double with each


@final
@dataclass(frozen=True)
class Buckets(Grouping):
    """At most ``count`` static shapes in all, rows included, chosen so that they cost the least padding.

    A shape is ``(num_items, padded length per axis)``. Inside a shape examples are drawn at random; what fills no batch
    moves up to the cheapest shape that holds it, and only what is left in the end makes short batches, whose shapes
    count too. The catalogue of shapes is the same in every epoch; which of them an epoch has, and what its short
    batches are padded to, may differ on several axes. They cost the least padded tokens, or the least of ``cost`` where
    the plan has one (a ``TimeModel`` gives seconds). Few shapes are what ``torch.compile``, CUDA graphs and attention
    kernels with a plan per shape want.

    Where ``count`` leaves no room for a short batch, as ``Buckets(1)`` does, all batches are as large as the largest
    allowed number that divides the examples, which may be too small for ``size_multiple_of``. ``drop_last=True``
    leaves the short ones out instead. Examples that run alone because they are over the budget, and
    the pieces of a last step on several ranks, have further shapes. There may be one to eight axes.

    A pair ``(a, b)`` counts lengths per axis and not shapes: ``a`` lengths of the first axis, each divided into at most
    ``b`` of the second.
    """

    _rules: ClassVar[range] = range(3, 4)  # those before the third are gone

    count: int | tuple[int, int] = 64

    def __post_init__(self) -> None:
        if isinstance(self.count, tuple) and len(self.count) != 2:
            raise ArgumentError(f"Buckets: count must be one number, or a pair with one per axis, got {self.count!r}")
        pair = self.count if isinstance(self.count, tuple) else (self.count, self.count)
        first, second = (as_whole("Buckets: count", count, least=1) for count in pair)
        object.__setattr__(self, "count", (first, second) if isinstance(self.count, tuple) else first)

    def group(self, problem: Problem) -> Groups:
        """Find the shapes and fill them."""
        if isinstance(self.count, tuple) and problem.num_axes == 2:
            return group_grid(problem, make_grid(problem, self.count))
        return find_shelves(problem, self._num_shapes).group()

    def check_axes(self, num_axes: int) -> None:
        """Refuse a pair of counts for more than two axes, and more axes than shapes can be searched on."""
        if isinstance(self.count, tuple) and num_axes > 2:
            raise ArgumentError(
                f"Buckets(count={self.count}) bounds two axes, got lengths with {num_axes}; give one number, which "
                f"counts shapes on up to {_MAX_AXES} axes"
            )
        if num_axes > _MAX_AXES:
            raise ArgumentError(
                f"Buckets takes lengths with up to {_MAX_AXES} axes, got {num_axes}; join axes that are padded alike, "
                "or use WindowSort()"
            )

    @property
    def is_static(self) -> bool:
        """Return True: batches are padded to one of the static shapes."""
        return True

    def static_shapes(self, problem: Problem) -> IntArray | None:
        """Return the lengths of the shapes, ``(K, axes)``."""
        if isinstance(self.count, tuple) and problem.num_axes == 2:
            return make_grid(problem, self.count).cells() * problem.pad_multiple_of
        return find_shelves(problem, self._num_shapes).catalogue.lengths

    @property
    def _num_shapes(self) -> int:
        return self.count[0] if isinstance(self.count, tuple) else self.count


# Below about one batch per shape, leftovers moved up cost more padding than finer shapes save.
_BATCHES_PER_SHAPE = 1.0


def find_shelves(problem: Problem, count: int) -> Shelves:
    """Return the catalogue of a plan that has at most ``count`` shapes in all, the same in every epoch.

    The short batches at the end of the data have shapes of their own, which count. So the fewest shapes that hold
    everything come first, and others are added as long as all fit into ``count``.

    Raises:
        BudgetError: more shapes are needed; on two axes it says how many, on more the search ends after ``count``.
    """
    search = Line(problem) if problem.num_axes == 1 else Space(problem, count)
    num_needed = search.num_needed
    check_enough(problem, count, num_needed)
    useful = max(1, int(problem.num_batches / _BATCHES_PER_SHAPE))
    num_more = max(0, min(count - search.num_reserved, useful) - num_needed)
    while True:
        filled = _without_empty(search, search.propose(num_more))
        excess = filled.num_shapes - count
        if excess <= 0:
            return filled.shelves
        if num_more == 0:
            return _with_equal_batches(filled, count)
        num_more = max(0, num_more - excess)


@final
class _Filled(NamedTuple):
    """Shapes, and what they hold."""

    shelves: Shelves
    flow: Flow

    @property
    def num_shapes(self) -> int:
        return self.shelves.num_shapes(self.flow)


def _without_empty(search: Search, units: IntArray) -> _Filled:
    """Return the shapes less those without a full batch, whose examples all move up."""
    while True:
        shelves = Shelves.of(search.problem, units)
        flow = shelves.flow(search.count(shelves))
        kept = (flow.full > 0) | ((shelves.parents < 0) & (flow.totals > 0))
        if kept.all():
            return _Filled(shelves, flow)
        units = shelves.units[kept]


def _with_equal_batches(filled: _Filled, count: int) -> Shelves:
    """Return the shapes that are needed, with batches of equal size where short ones would be too many shapes."""
    shelves, flow = filled
    if len(shelves.units) == 1 and count > 1:
        return replace(shelves, equal_rests=True)
    pairs = zip(flow.totals.tolist(), shelves.sizes.tolist(), strict=True)
    sizes = [largest_divisor(total, size, shelves.problem.rounding) for total, size in pairs]
    return replace(shelves, sizes=np.array(sizes))


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
