"""Buckets: a few static lengths with bounds of least padding, for one axis or two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..._checks import as_whole
from ..._random import Purpose
from ..._types import MAX_INT32, IntArray
from ...errors import ArgumentError
from ._cutting import cut_rest, fill_cells
from ._sort_keys import sort_examples
from .base import Grouping, Groups, Problem, UInt64Array, distinct, stratum_lookup, to_units


def bucket_bounds(problem: Problem, count: int, batches_per_bucket: float) -> IntArray:
    """Return bounds in units of padding, fewer than ``count`` where a bucket would hold too few batches."""
    table = problem.table
    useful = max(1, int(table.num_batches / batches_per_bucket))
    return least_padding_bounds(table.values, table.counts, min(count, useful))


def group_buckets(problem: Problem, bounds: IntArray) -> Groups:
    """Batch the examples of one axis bucket by bucket, from the shortest bound up.

    Buckets follow each other, so what does not fill a batch in one simply begins the next.
    """
    bucket_of = stratum_lookup(bounds, int(bounds[-1]))

    def fields(start: int, stop: int, chance: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
        units = to_units(problem.lengths[start:stop, 0], problem.pad_multiple_of)
        return bucket_of(units), np.zeros(stop - start, dtype=np.uint64)

    keys = sort_examples(
        problem.num_examples,
        fields,
        num_groups=len(bounds),
        max_value=0,
        stream=problem.stream(Purpose.GROUP),
    )
    padded = (bounds * problem.pad_multiple_of)[:, None]
    batches = fill_cells(np.diff(keys.group_offsets), problem.sizes(padded))
    return batches.to_groups(problem, keys.indices, padded)


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


def make_grid(problem: Problem, counts: tuple[int, int], batches_per_bucket: float) -> Grid:
    """Bound the first axis, then the second within each row, by the least padding."""
    first, second = _axes(problem)
    useful = max(1.0, problem.num_batches / batches_per_bucket)
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
    return layout.groups()


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


@final
@dataclass(frozen=True)
class Buckets(Grouping):
    """At most ``count`` static lengths, with bounds of least padding; rows are padded to the bound.

    Inside a bucket examples are drawn at random; what fills no batch moves up to the next bucket. With two axes each of
    ``count`` buckets of the first is divided into at most ``count`` of the second, with bounds of its own: up to
    ``count²`` shapes, or ``a × b`` where ``count`` is a pair. Few shapes are what
    ``torch.compile``, CUDA graphs and attention kernels with a plan per shape want.
    """

    count: int | tuple[int, int] = 64

    def __post_init__(self) -> None:
        if isinstance(self.count, tuple) and len(self.count) != 2:
            raise ArgumentError(f"Buckets: count must be one number, or a pair with one per axis, got {self.count!r}")
        first, second = (as_whole("Buckets: count", count, least=1) for count in self._pair())
        object.__setattr__(self, "count", (first, second) if isinstance(self.count, tuple) else first)

    def group(self, problem: Problem) -> Groups:
        """Find the bounds and fill the buckets."""
        if problem.num_axes == 2:
            return group_grid(problem, make_grid(problem, self._pair(), _BATCHES_PER_BUCKET))
        return group_buckets(problem, bucket_bounds(problem, self._pair()[0], _BATCHES_PER_BUCKET))

    def check_axes(self, num_axes: int) -> None:
        """Refuse more than two axes."""
        if num_axes > 2:
            raise ArgumentError(
                f"Buckets bounds one or two axes, got lengths with {num_axes}; use WindowSort() or Sorted()"
            )

    @property
    def is_static(self) -> bool:
        """Return True: batches are padded to the bound of their bucket."""
        return True

    def static_shapes(self, problem: Problem) -> IntArray | None:
        """Return the bounds, ``(K, axes)``."""
        if problem.num_axes == 2:
            grid = make_grid(problem, self._pair(), _BATCHES_PER_BUCKET)
            return grid.cells() * problem.pad_multiple_of
        bounds = bucket_bounds(problem, self._pair()[0], _BATCHES_PER_BUCKET)
        return bounds[:, None] * problem.pad_multiple_of

    def _pair(self) -> tuple[int, int]:
        return self.count if isinstance(self.count, tuple) else (self.count, self.count)


# Below about one batch per bucket, leftovers moved up cost more padding than finer bounds save.
_BATCHES_PER_BUCKET = 1.0


# Four candidates per bound, and at least 256, bring the padded tokens within two thousandths of what every length would
# give; the table of the dynamic programme has the square of this many entries.
_MIN_CANDIDATES = 256


_MAX_CANDIDATES = 512


def least_padding_bounds(values: IntArray, counts: IntArray, num_bounds: int) -> IntArray:
    """Return the bucket bounds that leave the fewest padded tokens, by dynamic programming.

    With bounds ``b_1 < … < b_K`` every length is padded to the next bound; the padded tokens are
    ``sum_k b_k × #(lengths in (b_{k-1}, b_k])``. The best last bound of ``k`` buckets up to length ``i`` is
    ``min_j cost_{k-1}(j) + b_i × (C_i − C_j)``, with ``C`` the number of examples up to a length.

    Args:
        values: distinct lengths, ascending.
        counts: examples of each length.
        num_bounds: how many bounds at the most.

    Returns:
        At most ``num_bounds`` bounds, ascending; the last is the longest length.

    >>> least_padding_bounds(np.array([1, 2, 10]), np.array([5, 5, 1]), 2).tolist()
    [2, 10]
    """
    if len(values) <= num_bounds:
        return values
    bounds, totals = _candidates(values, counts, min(_MAX_CANDIDATES, max(_MIN_CANDIDATES, 4 * num_bounds)))
    return _walk_back(bounds, _choices(bounds, totals, min(num_bounds, len(bounds))))


def _choices(bounds: IntArray, totals: IntArray, num_bounds: int) -> list[IntArray]:
    """Return, for 2, 3, … buckets, the best last bound but one below each bound, -1 where fewer buckets are as good.

    The last bucket becomes no wider with more buckets (the padded tokens satisfy the quadrangle inequality), so each
    round looks only as far back as the widest bucket of the round before.
    """
    num = len(bounds)
    places = np.arange(num)
    whole = (bounds * totals).astype(np.float64)  # one bucket
    # Column c of row i stands for the bound i - num + c; those below the first are infinitely dear.
    ahead = np.zeros(num, dtype=np.int64)
    saved = sliding_window_view(np.concatenate([ahead, totals]), num)[:num] * bounds[:, None].astype(np.float64)
    padded_cost = np.concatenate([np.full(num, np.inf), whole])
    costs, cost = sliding_window_view(padded_cost, num)[:num], padded_cost[num:]
    is_exact = whole[-1] < 2.0**53  # otherwise rounding errors could hide the best beyond the widest
    width, choices = num, []
    for _ in range(num_bounds - 1):
        table = costs[:, num - width :] - saved[:, num - width :]
        column = table.argmin(axis=1)
        best = table.ravel().take(places * width + column) + whole
        is_better = best < cost
        back = width - column  # how far below the bound
        choices.append(np.where(is_better, places - back, -1))
        np.minimum(best, cost, out=cost)
        if is_exact:
            width = max(1, int((back * is_better).max()))
    return choices


def _candidates(values: IntArray, counts: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Thin the lengths to those it would cost most to do without, the longest among them; count examples up to each.

    Lengths left out are padded to the next candidate. With candidates a distance h apart among f examples per length
    that adds about f × h² / 2 tokens each, least in all where their density follows sqrt(f); a length before a gap
    weighs as much as the gap is wide.
    """
    totals = np.cumsum(counts)
    if len(values) > most:
        weights = np.sqrt(counts * np.diff(values, append=values[-1] + 1).astype(np.float64))
        for _ in range(8):  # one length is one candidate, however much it weighs
            weights = np.minimum(weights, weights.sum() / most)
        shares = np.cumsum(weights)
        inner = np.searchsorted(shares, np.linspace(0, shares[-1], most + 1)[1:-1])
        chosen = np.unique(np.append(inner, len(values) - 1))
        values, totals = values[chosen], totals[chosen]
    return values.astype(np.int64), totals.astype(np.int64)


def _walk_back(bounds: IntArray, choices: list[IntArray]) -> IntArray:
    place = len(bounds) - 1
    taken = [place]
    for choice in reversed(choices):
        if choice[place] >= 0:
            place = int(choice[place])
            taken.append(place)
    return bounds[taken[::-1]]
