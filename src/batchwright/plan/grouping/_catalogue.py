"""The search for a catalogue: at most K shapes in all, chosen so that they cost the least."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple, final

import numpy as np

from ..._types import FloatArray, IntArray
from ...errors import BudgetError
from ._bounds import least_padding_bounds
from ._boxes import Merging, Moving, make_cells
from ._covering import cover
from ._shelves import Flow, Shelves, largest_divisor
from .base import Problem, to_units

# Below about one batch per shape, leftovers moved up cost more padding than finer shapes save.
_BATCHES_PER_SHAPE = 1.0


def find_shelves(problem: Problem, count: int) -> Shelves:
    """Return the shapes of a plan that has at most ``count`` in all, the same in every epoch.

    The short batches at the end of the data have shapes of their own, which count. So the fewest shapes that hold
    everything come first, and others are added as long as all fit into ``count``.

    Raises:
        BudgetError: more shapes are needed.
    """
    search = _Line(problem) if problem.num_axes == 1 else _Space(problem)
    num_needed = search.num_needed
    if num_needed > count:
        raise BudgetError(
            f"Buckets(count={count}) is too few shapes: {num_needed} are needed, because examples that are long on "
            f"different axes fit {problem.budget} alone but not padded to one shape; raise count or the budget, or use "
            "WindowSort()"
        )
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


class _Search(ABC):
    """Proposes shapes: those that hold everything, and some more that save the most."""

    problem: Problem
    num_reserved = 0  # shapes that are left for short batches from the first try on

    @property
    @abstractmethod
    def num_needed(self) -> int:
        """Return the fewest shapes that hold every example."""

    @abstractmethod
    def propose(self, num_more: int) -> IntArray:
        """Return shapes in units of padding: at most ``num_more`` beside those that are needed."""

    @abstractmethod
    def count(self, shelves: Shelves) -> IntArray:
        """Return how many examples go to each shape."""


@final
class _Line(_Search):
    """One axis: bounds of least cost by dynamic programming; the longest example is the last of them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @property
    def num_needed(self) -> int:
        return 1

    def propose(self, num_more: int) -> IntArray:
        table = self.problem.table
        cost_of = None if self.problem.cost is None else self._cost_of
        return least_padding_bounds(table.values, table.counts, 1 + num_more, cost_of)[:, None]

    def _cost_of(self, bounds: IntArray) -> FloatArray:
        return self.problem.cost_per_item(bounds[:, None] * self.problem.pad_multiple_of)

    def count(self, shelves: Shelves) -> IntArray:
        table = self.problem.table
        owner = np.searchsorted(shelves.units[:, 0], table.values)
        return np.bincount(owner, weights=table.counts, minlength=len(shelves.units)).astype(np.int64)


@final
class _Space(_Search):
    """Several axes: boxes merged from cells of examples, then moved."""

    num_reserved = 1  # the search takes time, and one short batch is usual

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._units = to_units(problem.lengths, problem.pad_multiple_of)
        self._needed = cover(problem, self._units)
        self._cells = make_cells(problem, self._units)
        self._merging = Merging(self._cells) if len(self._cells.places) else None

    @property
    def num_needed(self) -> int:
        return len(self._needed)

    def propose(self, num_more: int) -> IntArray:
        if num_more == 0 or self._merging is None:
            return self._needed
        moving = Moving(self._cells, self._merging.down_to(num_more), self._cost_in_needed())
        moving.drop_to(num_more)
        moving.improve()
        moving.exchange(self._merging.cells_merged)
        return self._shrunk(np.concatenate([self._needed, self._cells.lengths(moving.boxes)]))

    def _cost_in_needed(self) -> FloatArray:
        """Return what an example of each cell costs in the shapes that are needed anyway."""
        costs = np.rint(self.problem.cost_per_item(self._needed * self.problem.pad_multiple_of) / self._cells.scale)
        holds = (self._cells.places[None] <= self._cells.below(self._needed)[:, None]).all(axis=2)
        # A cell may reach beyond each of them while every example in it is within one.
        return np.where(holds, costs[:, None], costs.max()).min(axis=0)

    def _shrunk(self, units: IntArray) -> IntArray:
        """Return boxes as long as the examples that go to each, beside those that are needed."""
        shelves = Shelves.of(self.problem, units)
        owner = shelves.place(self._units)
        longest = np.zeros(shelves.units.T.shape, dtype=np.int64)
        for axis, column in enumerate(longest):
            np.maximum.at(column, owner, self._units[:, axis].astype(np.int64))
        return np.concatenate([self._needed, longest.T[longest[0] > 0]])

    def count(self, shelves: Shelves) -> IntArray:
        return np.bincount(shelves.place(self._units), minlength=len(shelves.units))


def _without_empty(search: _Search, units: IntArray) -> _Filled:
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
    rounding = shelves.problem.rounding
    sizes = [
        largest_divisor(total, size, rounding)
        for total, size in zip(flow.totals.tolist(), shelves.sizes.tolist(), strict=True)
    ]
    return replace(shelves, sizes=np.array(sizes))
