"""What a grouping is, what it receives and what it returns."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, final, get_args

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole
from ..._lengths import pad_up
from ..._random import Purpose, bit_stream
from ..._types import FloatArray, IntArray
from ...errors import ArgumentError
from .._cost import Cost, evaluate, refuse_infinite
from .._order import order_batches, step_cost
from ..budget import Budget

UInt64Array = npt.NDArray[np.uint64]
Lookup = Callable[[IntArray], UInt64Array]

_SAMPLE = 32_768
MAX_TABLE = 1 << 20  # a table with an entry for each length up to this is faster than bisection


@final
@dataclass(frozen=True)
class Problem:
    """Examples that each fit the budget by themselves, and the rules their batches keep."""

    lengths: npt.NDArray[np.int32]  # (N, axes)
    budget: Budget
    rounding: SizeRounding
    pad_multiple_of: int
    shuffle: bool
    seed: int
    epoch: int
    rules: int  # of the plan: an epoch that began under earlier rules ends under them
    drop_last: bool = False
    cost: Cost | None = None  # work of a batch; None counts padded tokens
    weights: IntArray | None = None  # how many each counts for, None where that is one

    @property
    def num_examples(self) -> int:
        """Return how many examples there are."""
        return len(self.lengths)

    @property
    def num_axes(self) -> int:
        """Return how many lengths an example has."""
        return self.lengths.shape[1]

    def stream(self, purpose: Purpose) -> np.random.PCG64 | None:
        """Return the random bits of a purpose, None without shuffling."""
        return bit_stream(self.seed, self.epoch, purpose) if self.shuffle else None

    def order(
        self, num_items: IntArray, padded: IntArray, demand: FloatArray, *, run_length: int, keep_first: int
    ) -> IntArray:
        """Return a random order of batches in which neighbours cost about the same, for a grouping that orders its own.

        Args:
            num_items: items of each batch.
            padded: the lengths that each pads to, ``(batches, axes)``.
            demand: what the ``keep_first`` batches have most of.
            run_length: how many batches of near-equal cost stay together.
            keep_first: how many batches come first.
        """
        stream = bit_stream(self.seed, self.epoch, Purpose.ORDER)
        cost = step_cost(num_items, padded)
        return order_batches(cost, demand, stream, run_length=run_length, keep_first=keep_first)

    def sizes(self, padded: IntArray) -> IntArray:
        """Return the allowed number of items at padded lengths ``(M, axes)``, at least one."""
        return np.maximum(self.rounding.round(self.budget.max_items(padded)), 1)

    def fits(self, padded: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether one item of each padded lengths ``(M, axes)`` is within the budget."""
        return self.budget.fraction(np.ones(len(padded), dtype=np.int64), padded) <= 1

    def cost_per_item(self, padded: IntArray) -> FloatArray:
        """Return what an item of a full batch costs at padded lengths ``(M, axes)``: work, or padded tokens.

        Raises:
            BudgetError: the cost is infinite for a batch that the budget allows.
        """
        if self.cost is None:
            return padded.sum(axis=1).astype(np.float64)
        sizes = self.sizes(padded)
        costs = evaluate(self.cost, sizes, padded)
        is_infinite = np.isinf(costs)
        if is_infinite.any():
            refuse_infinite(is_infinite & self.fits(padded), sizes, padded)
        return costs / sizes

    def padded(self, lengths: IntArray) -> IntArray:
        """Return lengths as a batch pads them."""
        return pad_up(lengths, self.pad_multiple_of)

    @cached_property
    def num_batches(self) -> float:
        """Return about how many batches the examples need; with several axes, from a sample."""
        if self.num_axes == 1 and self.weights is None:
            return self.table.num_batches
        step = max(1, self.num_examples // _SAMPLE)
        weights = 1 if self.weights is None else self.weights[::step]
        return float((weights / self.sizes(self.padded(self.lengths[::step]))).mean()) * self.num_examples

    @cached_property
    def table(self) -> LengthTable:
        """Return the distinct padded lengths of the first axis and what fits at each."""
        return LengthTable.of(self)


@final
@dataclass(frozen=True)
class LengthTable:
    """The distinct padded lengths of one axis, in units of ``pad_multiple_of``, and the items that fit at each."""

    values: IntArray
    counts: IntArray
    sizes: IntArray

    @staticmethod
    def of(problem: Problem) -> LengthTable:
        """Count the units of a problem with one axis."""
        units = to_units(problem.lengths[:, 0], problem.pad_multiple_of)
        values, counts = distinct(units)
        padded = (values * problem.pad_multiple_of)[:, None]
        return LengthTable(values, counts, problem.sizes(padded))

    @property
    def num_batches(self) -> float:
        """Return the batches needed if none had a gap: every example takes 1 / size of one."""
        return float((self.counts / self.sizes).sum())

    def sizes_of(self, units: IntArray) -> IntArray:
        """Return the items that fit at each of some units: all must be among the values."""
        if self._sizes_by_unit is None:
            return self.sizes[np.searchsorted(self.values, units)]
        return self._sizes_by_unit[units]

    @cached_property
    def _sizes_by_unit(self) -> IntArray | None:
        """Return a table of the sizes at all units, None where it would be large."""
        if self.values[-1] > MAX_TABLE:
            return None
        table = np.zeros(int(self.values[-1]) + 1, dtype=np.int64)
        table[self.values] = self.sizes
        return table


@final
class Catalogue(NamedTuple):
    """The static shapes of a plan: lengths, and the full number of items at each."""

    lengths: IntArray  # (shapes, axes)
    sizes: IntArray  # (shapes,)


@final
@dataclass(frozen=True)
class Groups:
    """Batches as slices of ``indices``, in no particular order.

    A batch is ``indices[starts[i] : starts[i] + sizes[i]]``, padded to ``padded[i]``. The last ``num_short`` ended
    because the data ended. For packed rows the slices are rows, and ``rows[i]`` of them in turn form batch ``i``.
    """

    indices: npt.NDArray[np.int32]
    starts: IntArray
    sizes: IntArray
    padded: IntArray  # (batches, axes)
    num_short: int = 0
    rows: IntArray | None = None  # (batches,)
    catalogue: Catalogue | None = None  # of a static grouping: the rule of ``PadTo`` over it decides, not ``padded``
    settled: npt.NDArray[np.bool_] | None = None  # (batches,) where that rule is known to give ``padded``


def to_units(lengths: IntArray, multiple: int) -> IntArray:
    """Return how many units of padding each length takes: ``ceil(length / multiple)``."""
    return lengths if multiple == 1 else -(-lengths // multiple)


def stratum_lookup(bounds: IntArray, longest: int) -> Lookup:
    """Return the function from units, up to the longest, to how many bounds lie below each.

    >>> stratum_lookup(np.array([2, 5]), 9)(np.array([1, 2, 3, 9])).tolist()
    [0, 0, 1, 2]
    """
    if longest > MAX_TABLE:
        return lambda units: np.searchsorted(bounds, units).astype(np.uint64)
    table = np.searchsorted(bounds, np.arange(longest + 1)).astype(np.uint64)
    return lambda units: table[units]


def distinct(values: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct values, ascending, and how often each stands; by counting where that is small."""
    if int(values.max()) <= max(4 * len(values), 65_536):
        counts = np.bincount(values)
        found = np.flatnonzero(counts)
        return found, counts[found]
    found, counts = np.unique(values, return_counts=True)
    return found.astype(np.int64), counts


SizeLadder = Literal["pow2", "pow2x3"]


@final
@dataclass(frozen=True)
class SizeRounding:
    """Round a number of items down to one the hardware likes, never to zero.

    ``multiple_of=8`` allows 8, 16, 24, …; ``ladder="pow2"`` allows 1, 2, 4, 8, …; ``"pow2x3"`` adds 3, 6, 12, ….
    With both, a size is on the ladder and a multiple. Where fewer than ``multiple_of`` items fit, the multiple cannot
    hold, and only the ladder counts.

    >>> SizeRounding(multiple_of=8).round(np.array([5, 8, 30])).tolist()
    [5, 8, 24]
    >>> SizeRounding(ladder="pow2x3").round(np.array([5, 8, 30])).tolist()
    [4, 8, 24]
    """

    multiple_of: int = 1
    ladder: SizeLadder | None = None

    def __post_init__(self) -> None:
        multiple_of = as_whole("size_multiple_of", self.multiple_of, least=1)
        object.__setattr__(self, "multiple_of", min(multiple_of, 2**63 - 1))  # above every size all are alike
        if self.ladder is not None and self.ladder not in get_args(SizeLadder):
            allowed = ", ".join(map(repr, get_args(SizeLadder)))
            raise ArgumentError(f"size_ladder must be one of None, {allowed}, got {self.ladder!r}")
        if self.ladder is not None and len(self._multiples) == 0:
            raise ArgumentError(
                f"no size on the ladder {self.ladder!r} is a multiple of {self.multiple_of}; "
                "choose size_multiple_of on the ladder, or one of the two options"
            )

    def round(self, num_items: IntArray) -> IntArray:
        """Return the largest allowed size up to each number; zeros stay zero."""
        num_items = np.asarray(num_items, dtype=np.int64)
        if self.ladder is not None:
            return self._on_ladder(num_items)
        floor = num_items // self.multiple_of * self.multiple_of
        return np.where(floor > 0, floor, num_items)

    def round_one(self, num_items: int) -> int:
        """Round a single number."""
        if self.ladder is None:
            return num_items // self.multiple_of * self.multiple_of or num_items
        return int(self._on_ladder(np.array([num_items]))[0])

    def per_group(self, size: int) -> SizeRounding:
        """Return the rounding of a number of groups of ``size`` examples each, by the number of their examples.

        Where no number of groups has a size on the ladder, there is no ladder.

        >>> SizeRounding(multiple_of=8).per_group(2), SizeRounding(ladder="pow2x3").per_group(3)
        (SizeRounding(multiple_of=4, ladder=None), SizeRounding(multiple_of=1, ladder='pow2'))
        """
        odd = size // (size & -size)
        ladder = self.ladder if odd == 1 else None
        if odd == 3 and self.ladder == "pow2x3":
            ladder = "pow2"
        return SizeRounding(self.multiple_of // math.gcd(self.multiple_of, size), ladder)

    def best_of(self, sums: IntArray) -> int:
        """Return which of ascending sums is the largest allowed size, of at least half the last; else the last.

        >>> SizeRounding(multiple_of=4).best_of(np.array([4, 7, 12, 13])), SizeRounding(4).best_of(np.array([4, 7, 13]))
        (2, 2)
        """
        if self.multiple_of == 1 and self.ladder is None:
            return len(sums) - 1
        least = max(-(-sums[-1] // 2), self.multiple_of if sums[-1] >= self.multiple_of else 1)
        allowed = np.flatnonzero((sums >= least) & (self.round(sums) == sums))
        return int(allowed[-1]) if len(allowed) else len(sums) - 1

    def _on_ladder(self, num_items: IntArray) -> IntArray:
        place = np.searchsorted(self._multiples, num_items, side="right") - 1
        any_rung = np.searchsorted(self._rungs, num_items, side="right") - 1
        size = np.where(place >= 0, self._multiples[place], self._rungs[any_rung])
        return np.where(num_items > 0, size, 0)

    @cached_property
    def _rungs(self) -> IntArray:
        powers = 2 ** np.arange(32, dtype=np.int64)
        return np.unique(np.concatenate([powers, 3 * powers])) if self.ladder == "pow2x3" else powers

    @cached_property
    def _multiples(self) -> IntArray:
        return self._rungs[self._rungs % self.multiple_of == 0]


class Grouping(ABC):
    """How examples are divided into batches; the budget says how large a batch may be."""

    # The rules that epochs may follow; the last are those of today. Add one when the same settings begin to give other
    # batches, and keep the earlier ones: a state names those of its epoch, so that an epoch begun under earlier rules
    # ends under them.
    _rules: ClassVar[range] = range(1, 3)

    @abstractmethod
    def group(self, problem: Problem) -> Groups:
        """Divide the examples into batches."""

    def check_axes(self, num_axes: int) -> None:  # noqa: B027 - most groupings take any number
        """Refuse lengths with more axes than this grouping can handle."""

    def static_shapes(self, problem: Problem) -> IntArray | None:
        """Return the padded lengths ``(K, axes)`` batches are padded to, None where they follow the longest example."""
        return None

    @property
    def is_static(self) -> bool:
        """Return whether the padded length of a batch is fixed in advance, whatever its examples."""
        return False

    @property
    def takes_weights(self) -> bool:
        """Return whether ``problem.weights`` are counted; otherwise groups of several sizes are refused."""
        return False

    @property
    def keeps_order(self) -> bool:
        """Return whether batches stay in the order of the data."""
        return False

    @property
    def row_capacity(self) -> int | None:
        """Return the tokens of a packed row, None where every example has a row of its own."""
        return None


def check_grouping(grouping: Grouping) -> Grouping:
    """Return the grouping, or say what a grouping is."""
    if isinstance(grouping, type) and issubclass(grouping, Grouping):
        raise ArgumentError(f"grouping must be an object, got the class; write {grouping.__name__}()")
    if not isinstance(grouping, Grouping):
        raise ArgumentError(
            f"grouping must be one of InOrder(), Sorted(), WindowSort(), Buckets(), Packed(capacity), got {grouping!r}"
        )
    return grouping
