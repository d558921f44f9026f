"""What a batch may cost: a number of items, of padded tokens, or any cost that grows with the batch."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt

from .._checks import float_of, is_number, is_whole
from .._types import MAX_INT32, FloatArray, IntArray
from ..errors import ArgumentError, BudgetError

Cost = Callable[[IntArray, IntArray], npt.NDArray[Any]]

_MAX_INT64 = 2**63 - 1

# Before the fingerprint of a cost in the text of a budget.
_MARK = " #"
_GRID_ITEMS = np.array([1, 2, 3, 17, 64, 1000])
_GRID_LENGTHS = np.array([1, 2, 7, 50, 128, 513, 2000, 20_000])


class Budget(ABC):
    """A hard limit on a batch, as a function of its shape ``(num_items, padded length per axis)``.

    A budget answers two questions, both for many shapes at once: which share of the limit a shape uses, and how
    many items fit at given padded lengths. Combine budgets with ``&``: all of them hold.
    """

    @abstractmethod
    def fraction(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        """Return the share of the limit that each shape uses; above 1 it does not fit.

        Args:
            num_items: items in the batch, shape ``(M,)``.
            lengths: padded lengths, shape ``(M, axes)``.
        """

    @abstractmethod
    def max_items(self, lengths: IntArray) -> IntArray:
        """Return the most items that fit at each padded length, 0 where not even one does.

        Args:
            lengths: padded lengths, shape ``(M, axes)``.
        """

    def __and__(self, other: Budget) -> Budget:
        if not isinstance(other, Budget):
            return NotImplemented
        return AllOf((*_parts(self), *_parts(other)))

    def __bool__(self) -> bool:
        # Python's `and` and `or` would ask this, and silently keep one of two budgets.
        raise ArgumentError(
            f"a budget is neither true nor false: combine budgets with &, as in {self} & MaxItems(64), "
            "and ask `budget is None` whether there is one"
        )

    def to_state(self) -> str:
        """Return the text by which a saved state knows the budget; the same in every run."""
        return repr(self)


@dataclass(frozen=True, repr=False)
class _Counted(Budget):
    """A budget that counts: its limit is a whole number."""

    limit: int

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not is_whole(self.limit):
            raise BudgetError(f"{name} needs a whole number, got {self.limit!r}")
        object.__setattr__(self, "limit", as_limit(name, self.limit))

    def _per_item(self, lengths: IntArray) -> IntArray:
        """Return what one item of each padded length ``(M, axes)`` counts: 1."""
        return np.ones(len(lengths), dtype=np.int64)

    def fraction(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        """Return ``num_items × count of one item / limit``."""
        return np.asarray(num_items) * self._per_item(lengths) / float(self.limit)

    def max_items(self, lengths: IntArray) -> IntArray:
        """Return ``limit // count of one item``."""
        return np.minimum(min(self.limit, _MAX_INT64) // self._per_item(lengths), MAX_INT32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.limit})"


@final
@dataclass(frozen=True, repr=False)
class MaxItems(_Counted):
    """At most ``limit`` examples per batch.

    >>> MaxItems(64).max_items(np.array([[10], [500]])).tolist()
    [64, 64]
    """


@final
@dataclass(frozen=True, repr=False)
class MaxTokens(_Counted):
    """At most ``limit`` padded tokens per batch: ``num_items × sum over axes of the padded length``.

    >>> MaxTokens(8192).max_items(np.array([[512], [100]])).tolist()
    [16, 81]
    """

    def _per_item(self, lengths: IntArray) -> IntArray:
        """Return the padded tokens of an item, summed over the axes."""
        return np.asarray(lengths).sum(axis=1, dtype=np.int64)


@final
@dataclass(frozen=True, repr=False)
class MaxCost(Budget):
    """Any cost that grows with the batch: ``cost(num_items, padded_lengths) <= limit``.

    Args:
        cost: takes ``num_items`` of shape ``(M,)`` and ``padded_lengths`` of shape ``(M, axes)``, returns ``(M,)``;
            it must not shrink when the items or any length grow.
        limit: the most a batch may cost.

    The number of items is found by doubling and bisection over all lengths at once, about 60 calls of ``cost``.

    A saved state knows the function by its name and its values, see ``fingerprint_of``; it is not continued with other
    values. While a sampler lives, the function must keep its values: later epochs are planned with it.

    >>> quadratic = MaxCost(lambda n, lengths: n * lengths[:, 0] ** 2, 1_000_000)
    >>> quadratic.max_items(np.array([[100], [1000], [1001]])).tolist()
    [100, 1, 0]
    """

    cost: Cost
    limit: float

    def __post_init__(self) -> None:
        if not callable(self.cost):
            raise ArgumentError(f"MaxCost needs a function of (num_items, padded_lengths), got {self.cost!r}")
        object.__setattr__(self, "limit", as_limit("MaxCost", self.limit))

    def fraction(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        """Return ``cost(num_items, lengths) / limit``."""
        return evaluate(self.cost, num_items, lengths) / float(self.limit)

    def max_items(self, lengths: IntArray) -> IntArray:
        """Return the largest ``n`` with ``cost(n, lengths) <= limit``."""
        lengths = np.asarray(lengths)
        self._check_grows(lengths)
        low = np.zeros(len(lengths), dtype=np.int64)
        high = np.ones(len(lengths), dtype=np.int64)
        while True:  # double until every length has a number of items that is too many, or the ceiling
            fits = (evaluate(self.cost, high, lengths) <= self.limit) & (high > low)
            low = np.where(fits, high, low)
            high = np.where(fits, np.minimum(high * 2, MAX_INT32), high)
            if not (fits & (high > low)).any():
                break
        while True:
            middle = (low + high) // 2
            open_ = middle > low
            if not open_.any():
                return low
            fits = evaluate(self.cost, np.maximum(middle, 1), lengths) <= self.limit
            low = np.where(open_ & fits, middle, low)
            high = np.where(open_ & ~fits, middle, high)

    def _check_grows(self, lengths: IntArray) -> None:
        """Refuse a cost that shrinks when the batch grows, on the lengths at hand."""
        for num_items in (1, 2, 7, 64, 1024):
            count = np.full(len(lengths), num_items, dtype=np.int64)
            here = evaluate(self.cost, count, lengths)
            more = evaluate(self.cost, count + 1, lengths)
            self._check_no_less(here, more, count, lengths, "one item more")
            for axis in range(lengths.shape[1]):
                longer = lengths.astype(np.int64)
                longer[:, axis] += 1
                there = evaluate(self.cost, count, longer)
                self._check_no_less(here, there, count, lengths, f"one more on axis {axis}")

    def _check_no_less(
        self, here: FloatArray, there: FloatArray, count: IntArray, lengths: IntArray, what: str
    ) -> None:
        # A rounding error is not a falling cost; written so that infinite costs compare too.
        shrinks = there < np.where(here > 0, here * (1 - 1e-9), here * (1 + 1e-9))
        if shrinks.any():
            row = int(np.argmax(shrinks))
            raise BudgetError(
                f"cost must not shrink when the batch grows: {here[row]:g} for {count[row]} items of length "
                f"{lengths[row].tolist()}, {there[row]:g} with {what}"
            )

    def __repr__(self) -> str:
        return f"MaxCost({name_of(self.cost)}, {self.limit})"

    def to_state(self) -> str:
        """Return the text with a fingerprint of the cost, taken when it is first asked for."""
        return f"{self!r}{_MARK}{self._fingerprint}"

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_of(self.cost)


@final
@dataclass(frozen=True, repr=False)
class AllOf(Budget):
    """Several budgets that all hold; what ``a & b`` makes.

    >>> (MaxTokens(8192) & MaxItems(32)).max_items(np.array([[512], [100]])).tolist()
    [16, 32]
    """

    parts: tuple[Budget, ...]

    def fraction(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        """Return the largest share over the parts."""
        return np.max([part.fraction(num_items, lengths) for part in self.parts], axis=0)

    def max_items(self, lengths: IntArray) -> IntArray:
        """Return the least over the parts."""
        return np.min([part.max_items(lengths) for part in self.parts], axis=0)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))

    def to_state(self) -> str:
        """Return the texts of the parts."""
        return " & ".join(part.to_state() for part in self.parts)


def check_budget(budget: Budget) -> Budget:
    """Return the budget, or say what a budget is."""
    if isinstance(budget, Budget):
        return budget
    hint = f"; write MaxItems({budget}) or MaxTokens({budget})" if is_whole(budget) else ""
    raise ArgumentError(f"budget must be a Budget such as MaxTokens(8192), got {budget!r}{hint}")


def evaluate(cost: Cost, num_items: IntArray, lengths: IntArray) -> FloatArray:
    """Call a cost with 64-bit integers, in which squares of lengths fit, and check what it returns."""
    num_items, lengths = np.asarray(num_items, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
    costs = np.asarray(cost(num_items, lengths), dtype=np.float64)
    if costs.shape != num_items.shape:
        raise BudgetError(
            f"cost must return one number per shape, {num_items.shape}, got {costs.shape}; "
            "it receives num_items (M,) and padded_lengths (M, axes) and returns (M,)"
        )
    if np.isnan(costs).any():
        row = int(np.argmax(np.isnan(costs)))
        raise BudgetError(f"cost is NaN for {num_items[row]} items of length {lengths[row].tolist()}")
    return costs


def fingerprint_of(cost: Cost) -> str:
    """Return a hash of a cost's values on fixed shapes: the same for the same values, however they are computed.

    The shapes have 1 to 1000 items, lengths of 1 to 20,000, and one to three axes; a number of axes that the cost
    does not take counts as such. Six digits count, so that another machine's rounding does not. Functions that
    differ only elsewhere are not told apart.

    >>> tokens = fingerprint_of(lambda n, lengths: n * lengths[:, 0])
    >>> fingerprint_of(lambda n, lengths: lengths[:, 0] * n) == tokens
    True
    >>> fingerprint_of(lambda n, lengths: n * lengths[:, 0] ** 2) == tokens
    False
    """
    values = hashlib.blake2b(digest_size=6)
    for num_axes in (1, 2, 3):
        values.update(_values_on_grid(cost, num_axes))
    return values.hexdigest()


def text_of_cost(cost: Cost) -> str:
    """Return the text by which a saved state knows a cost: its name and the fingerprint of its values."""
    return f"{name_of(cost)}{_MARK}{fingerprint_of(cost)}"


def as_saved(mine: Any, saved: Any) -> Any:
    """Return our part of a state as the version that wrote ``saved`` would have: older ones wrote no fingerprints.

    >>> as_saved("MaxCost(f, 9) #0123456789ab", "MaxCost(f, 9)")
    'MaxCost(f, 9)'
    >>> as_saved("MaxCost(f, 9) #0123456789ab", "MaxCost(f, 9) #ba9876543210")
    'MaxCost(f, 9) #0123456789ab'
    """
    if isinstance(mine, dict) and isinstance(saved, Mapping):
        return {name: as_saved(value, saved.get(name)) for name, value in mine.items()}
    if isinstance(mine, str) and isinstance(saved, str) and _MARK not in saved:
        return re.sub(rf"{_MARK}[0-9a-f]{{12}}", "", mine)
    return mine


def _values_on_grid(cost: Cost, num_axes: int) -> bytes:
    num_items, first = (grid.ravel() for grid in np.meshgrid(_GRID_ITEMS, _GRID_LENGTHS, indexing="ij"))
    # The axes differ within a shape, so that exchanging them is seen.
    lengths = np.stack([np.roll(first, axis) for axis in range(num_axes)], axis=1)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            costs = evaluate(cost, num_items, lengths)
    except Exception as error:  # a function for other numbers of axes raises nearly anything
        return type(error).__name__.encode()
    mantissa, exponent = np.frexp(np.nan_to_num(costs))
    # Not rint: whole numbers often lie exactly between two roundings, and the smallest error would decide.
    return np.stack([np.floor(mantissa * 2**20 + math.sqrt(0.1)), exponent]).astype("<i8").tobytes()


def name_of(cost: Cost) -> str:
    """Return a name that is the same in every run: never the address of an object."""
    name = getattr(cost, "__qualname__", None) or repr(cost)
    return type(cost).__qualname__ if " at 0x" in name else name


def _parts(budget: Budget) -> tuple[Budget, ...]:
    return budget.parts if isinstance(budget, AllOf) else (budget,)


def as_limit(name: str, limit: Any) -> Any:
    """Return a limit as a plain number above 0: an ``int`` where it is whole by type, else a ``float``."""
    # Compared as floats: a number beyond every float, or too small for one, is no limit to divide by.
    if not is_number(limit) or not 0 < float_of(limit) < math.inf:
        raise BudgetError(f"{name} needs a finite limit above 0, got {limit!r}")
    return int(limit) if is_whole(limit) else float(limit)
