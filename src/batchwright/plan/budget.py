"""What a batch may cost: a number of items, of padded tokens, or any cost that grows with the batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from .._checks import float_of, is_number, is_whole
from .._types import MAX_INT32, FloatArray, IntArray
from ..errors import ArgumentError, BudgetError
from ._cost import Cost, evaluate, name_of, with_values

_MAX_INT64 = 2**63 - 1


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

    A saved state knows the function by its name and its values at some shapes, and is not continued with others. While
    a sampler lives, the function must keep its values: later epochs are planned with it.

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
        """Return the text with the values of the cost, taken when it is first asked for."""
        return self._state

    @cached_property
    def _state(self) -> str:
        return with_values(repr(self), self.cost)


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


def _parts(budget: Budget) -> tuple[Budget, ...]:
    return budget.parts if isinstance(budget, AllOf) else (budget,)


def as_limit(name: str, limit: Any) -> Any:
    """Return a limit as a plain number above 0: an ``int`` where it is whole by type, else a ``float``."""
    # Compared as floats: a number beyond every float, or too small for one, is no limit to divide by.
    if not is_number(limit) or not 0 < float_of(limit) < math.inf:
        raise BudgetError(f"{name} needs a finite limit above 0, got {limit!r}")
    return int(limit) if is_whole(limit) else float(limit)
