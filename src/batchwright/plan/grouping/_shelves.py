"""Static shapes: those that are needed, the examples that go to each, and the leftovers that move up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..._random import Purpose
from ..._types import FloatArray, IntArray
from ._boxes import Merging, Moving, least_padding_bounds, make_cells
from ._covering import cover
from ._cutting import cut_rest
from ._sort_keys import sort_examples
from .base import Catalogue, Groups, Lookup, Problem, SizeRounding, UInt64Array, stratum_lookup, to_units

_MAX_TABLE = 1 << 22  # regions between the bounds of all axes; more are not worth a table
_Int32 = npt.NDArray[np.int32]


@final
class Flow(NamedTuple):
    """How many full batches each shape has, and how many examples are left at it in the end."""

    totals: IntArray  # examples that reach the shape, leftovers of others included
    full: IntArray
    rests: IntArray  # not 0 only where no other shape holds this one


@final
@dataclass(frozen=True)
class Shelves:
    """Static shapes in ascending order: a shape comes after every other one that it holds."""

    problem: Problem
    units: IntArray  # (shapes, axes), lengths in units of padding
    sizes: IntArray  # full numbers of items
    equal_rests: bool = False  # what is left in the end is cut into equal batches

    @staticmethod
    def of(problem: Problem, units: IntArray) -> Shelves:
        """Put boxes of units in order, each with as many items as the budget and the rounding allow."""
        units = np.unique(units.astype(np.int64), axis=0)
        units = units[np.argsort(units.sum(axis=1), kind="stable")]
        return Shelves(problem, units, problem.sizes(units * problem.pad_multiple_of))

    @property
    def catalogue(self) -> Catalogue:
        """Return the shapes as a plan knows them."""
        return Catalogue(self.units * self.problem.pad_multiple_of, self.sizes)

    @cached_property
    def costs(self) -> FloatArray:
        """Return what an example costs at each shape."""
        return self.problem.cost_per_item(self.units * self.problem.pad_multiple_of)

    @cached_property
    def parents(self) -> IntArray:
        """Return the cheapest other shape that holds each, -1 where none does: there leftovers go."""
        if self.units.shape[1] == 1:
            return np.append(np.arange(1, len(self.units)), -1)
        holds = np.ones((len(self.units), len(self.units)), dtype=bool)
        for column in self.units.T:
            holds &= column >= column[:, None]
        np.fill_diagonal(holds, val=False)
        parents = np.where(holds, self.costs, np.inf).argmin(axis=1)
        return np.where(holds.any(axis=1), parents, -1)

    def place(self, units: IntArray) -> UInt64Array:
        """Return the cheapest shape that holds each example ``(M, axes)``; one must."""
        if self.units.shape[1] == 1:
            return self._lookups[0](units[:, 0])
        if self._table is not None:
            return self._table[tuple(find(units[:, axis]) for axis, find in enumerate(self._lookups))]
        found = np.zeros(len(units), dtype=np.uint64)
        for shape in self._dearest_first:
            found[(units <= self.units[shape]).all(axis=1)] = shape
        return found

    @cached_property
    def _lookups(self) -> list[Lookup]:
        return [self._lookup(np.unique(column)) for column in self.units.T]

    def _lookup(self, bounds: IntArray) -> Lookup:
        longest = int(bounds[-1])
        if longest > max(65_536, 4 * self.problem.num_examples):  # a table would take longer than it saves
            return lambda units: np.searchsorted(bounds, units).astype(np.uint64)
        return stratum_lookup(bounds, longest)

    @cached_property
    def _dearest_first(self) -> list[int]:
        return np.argsort(self.costs, kind="stable")[::-1].tolist()  # of equal ones the first in order is the cheapest

    @cached_property
    def _table(self) -> UInt64Array | None:
        """Return the cheapest shape of every region between the bounds of the axes, None where they are too many."""
        bounds = [np.unique(column) for column in self.units.T]
        if math.prod(map(len, bounds)) > _MAX_TABLE:
            return None
        table = np.zeros(tuple(map(len, bounds)), dtype=np.uint64)
        places = [np.searchsorted(some, column) for some, column in zip(bounds, self.units.T, strict=True)]
        for shape in self._dearest_first:  # the cheapest is written last
            table[tuple(slice(0, int(column[shape]) + 1) for column in places)] = shape
        return table

    def flow(self, counts: IntArray) -> Flow:
        """Fill the shapes with given numbers of examples: leftovers move up, whoever they are."""
        totals, full = counts.tolist(), [0] * len(counts)
        rests = [0] * len(counts)
        for shape, (size, parent) in enumerate(zip(self.sizes.tolist(), self.parents.tolist(), strict=True)):
            full[shape], rest = divmod(totals[shape], size)
            if parent >= 0:
                totals[parent] += rest
            else:
                rests[shape] = rest
        return Flow(*(np.array(numbers, dtype=np.int64) for numbers in (totals, full, rests)))

    def short_sizes(self, rest: int, size: int) -> list[int]:
        """Return the sizes of the short batches that the leftovers of a shape make."""
        rounding = self.problem.rounding
        if not self.equal_rests or rest == 0:
            return cut_rest(rest, size, rounding)
        share = largest_divisor(rest, size, rounding)
        return [share] * (rest // share)

    def num_shapes(self, flow: Flow) -> int:
        """Return how many shapes a plan may have at the most: rows and lengths, short batches included."""
        num = int((flow.full > 0).sum())
        if self.problem.drop_last:
            return num
        for shape in np.flatnonzero(flow.rests).tolist():
            size = int(self.sizes[shape])
            short = self.short_sizes(int(flow.rests[shape]), size)
            num += min(len(short), len(self.units)) if self.equal_rests else len(short)
            # A full batch of another shape with as many items may be padded to this one.
            num += int(flow.full[shape] == 0 and (self.sizes == size).sum() > 1)
        return num

    def group(self) -> Groups:
        """Deal the examples at random within each shape into full batches; what is left in the end is short."""
        problem = self.problem

        def fields(start: int, stop: int, chance: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
            units = to_units(problem.lengths[start:stop], problem.pad_multiple_of)
            return self.place(units), np.zeros(stop - start, dtype=np.uint64)

        keys = sort_examples(
            problem.num_examples,
            fields,
            num_groups=len(self.units),
            max_value=0,
            stream=problem.stream(Purpose.GROUP),
        )
        return self._lay_out(keys.indices, keys.group_offsets)

    def _lay_out(self, indices: _Int32, offsets: IntArray) -> Groups:
        waiting: list[list[_Int32]] = [[] for _ in self.units]
        parts, short_parts = [], []
        runs: list[tuple[int, int, int, bool]] = []  # shape, size, batches, whether no leftovers of others are in them
        short: list[tuple[int, int, int, bool]] = []
        parents, sizes = self.parents.tolist(), self.sizes.tolist()
        for shape, size in enumerate(sizes):
            own = indices[offsets[shape] : offsets[shape + 1]]
            num_moved = sum(map(len, waiting[shape]))
            own = np.concatenate([*waiting[shape], own]) if num_moved else own
            num = len(own) // size
            parts.append(own[: num * size])
            num_mixed = min(num, -(-num_moved // size))
            runs += [(shape, size, num_mixed, False), (shape, size, num - num_mixed, True)]
            rest = own[num * size :]
            if parents[shape] >= 0:
                waiting[parents[shape]].append(rest)
            else:
                short_parts.append(rest)
                short.extend((shape, num_items, 1, False) for num_items in self.short_sizes(len(rest), size))
        shapes, items, counts, own_only = np.array(runs + short, dtype=np.int64).reshape(-1, 4).T
        # No shape of fewer tokens holds an example that went to its cheapest, and a full batch of such examples keeps
        # its shape by the rule. Where time chose the shapes, fewer tokens may do.
        settled = own_only.astype(bool) & (self.problem.cost is None)
        sizes_of = np.repeat(items, counts)
        return Groups(
            indices=np.concatenate(parts + short_parts),
            starts=np.cumsum(sizes_of) - sizes_of,
            sizes=sizes_of,
            padded=self.catalogue.lengths[np.repeat(shapes, counts)],
            num_short=len(short),
            catalogue=self.catalogue,
            settled=np.repeat(settled, counts),
        )


class Search(ABC):
    """Proposes shapes: those that hold everything, and some more that save the most."""

    problem: Problem
    num_reserved = 0  # shapes that are left for short batches from the first try on

    @property
    @abstractmethod
    def num_needed(self) -> int:
        """Return the fewest shapes that hold every example; where they are too many, perhaps only some of them."""

    @abstractmethod
    def propose(self, num_more: int) -> IntArray:
        """Return shapes in units of padding: at most ``num_more`` beside those that are needed."""

    @abstractmethod
    def count(self, shelves: Shelves) -> IntArray:
        """Return how many examples go to each shape."""


@final
class Line(Search):
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
class Space(Search):
    """Several axes: boxes merged from cells of examples, then moved."""

    num_reserved = 1  # the search takes time, and one short batch is usual

    def __init__(self, problem: Problem, count: int) -> None:
        self.problem = problem
        self._units = to_units(problem.lengths, problem.pad_multiple_of)
        self._needed = cover(problem, self._units, count)
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
        # NumPy 1.26 does not count unsigned numbers.
        return np.bincount(shelves.place(self._units).astype(np.int64), minlength=len(shelves.units))


def largest_divisor(num_items: int, most: int, rounding: SizeRounding) -> int:
    """Return the largest allowed size up to ``most`` that divides a number of items; 1 always does.

    >>> largest_divisor(90, 40, SizeRounding()), largest_divisor(90, 40, SizeRounding(ladder="pow2"))
    (30, 2)
    """
    small = np.arange(1, math.isqrt(num_items) + 1)
    small = small[num_items % small == 0]
    divisors = np.concatenate([small, num_items // small])
    divisors = divisors[divisors <= most]
    return int(divisors[rounding.round(divisors) == divisors].max())
