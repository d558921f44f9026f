"""The order of the examples in an epoch, before any batch size cuts it: the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, BudgetError, LengthsError
from ._arrays import MAX_INT32, as_lengths, as_whole
from ._oversize import fits
from ._plan import plan_epoch
from ._random import Purpose, bit_stream, permutation
from ._settings import PlanSettings
from .budget import Budget, check_budget

Int32Array = npt.NDArray[np.int32]


class HasPrefix(Protocol):
    """A curriculum: which examples an epoch covers."""

    @property
    def num_examples(self) -> int:
        """Return how many examples there are in all."""

    def prefix(self, epoch: int) -> npt.ArrayLike:
        """Return the indices that an epoch covers, each once."""


@final
class EpochOrder(NamedTuple):
    """The examples of one epoch in order, and a fingerprint of the curriculum's choice, None without one."""

    epoch: int
    indices: Int32Array
    curriculum: str | None


@final
@dataclass(frozen=True, eq=False)
class Ordering:
    """Puts the examples of an epoch in order.

    Without lengths the order is shuffled. With them the epoch is planned into micro-batches of similar lengths under
    the budget, and these stand one behind the other in random order, each from its longest example to its shortest.
    """

    num_examples: int
    settings: PlanSettings
    lengths: Int32Array | None
    budget: Budget | None
    curriculum: HasPrefix | None

    def of(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        if self.curriculum is None:
            return EpochOrder(epoch, self._order(self.num_examples, self.lengths, epoch), None)
        prefix = _check_prefix(self.curriculum.prefix(epoch), epoch, self.num_examples)
        lengths = None if self.lengths is None else self.lengths[prefix]
        return EpochOrder(epoch, prefix[self._order(len(prefix), lengths, epoch)], fingerprint(prefix))

    def _order(self, num: int, lengths: Int32Array | None, epoch: int) -> Int32Array:
        if lengths is not None and self.budget is not None:
            return plan_epoch(lengths, self.budget, self.settings, epoch).indices
        if not self.settings.shuffle:
            return np.arange(num, dtype=np.int32)
        stream = bit_stream(self.settings.seed, epoch, Purpose.ORDER)
        return permutation(num, stream).astype(np.int32)


def make_ordering(
    num_examples: int,
    lengths: npt.ArrayLike | None,
    budget: Budget | None,
    curriculum: HasPrefix | None,
    settings: PlanSettings,
) -> Ordering:
    """Check what an order is made of."""
    num = as_whole("num_examples", num_examples, least=1)
    if num > MAX_INT32:
        raise ArgumentError(f"num_examples must be at most {MAX_INT32}, got {num}")
    if (lengths is None) != (budget is None):
        missing = "budget" if budget is None else "lengths"
        raise ArgumentError(
            f"lengths and budget go together, {missing} is missing; give both, or neither for a plain shuffle"
        )
    if curriculum is not None:
        _check_curriculum(curriculum, num)
    if lengths is None or budget is None:
        return Ordering(num, settings, None, None, curriculum)
    array = as_lengths(lengths).copy()  # a change of the caller's array must not change later epochs
    _check_lengths(array, num, check_budget(budget), settings)
    return Ordering(num, settings, array, budget, curriculum)


def fingerprint(array: Int32Array) -> str:
    """Return a hash of an array's shape and values.

    >>> fingerprint(np.array([1, 2], dtype=np.int32)) == fingerprint(np.array([2, 1], dtype=np.int32))
    False
    """
    digest = hashlib.blake2b(repr(array.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()


def _check_lengths(lengths: Int32Array, num_examples: int, budget: Budget, settings: PlanSettings) -> None:
    if len(lengths) != num_examples:
        raise LengthsError(f"there are {len(lengths)} lengths but num_examples is {num_examples}; give one an example")
    over = np.flatnonzero(~fits(lengths, budget, settings))
    if len(over):
        length = lengths[over[0]].tolist()
        shown = length[0] if len(length) == 1 else tuple(length)
        more = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
        raise BudgetError(
            f"example {over[0]}{more} of length {shown} is over {budget} alone; raise the budget or leave it out"
        )


def _check_curriculum(curriculum: HasPrefix, num_examples: int) -> None:
    if not callable(getattr(curriculum, "prefix", None)) or not hasattr(curriculum, "num_examples"):
        raise ArgumentError(
            f"curriculum must have num_examples and prefix(epoch), as size.Curriculum has, got {curriculum!r}"
        )
    if curriculum.num_examples != num_examples:
        raise ArgumentError(
            f"the curriculum has {curriculum.num_examples} examples but num_examples is {num_examples}; "
            "give one difficulty an example"
        )


def _check_prefix(prefix: npt.ArrayLike, epoch: int, num_examples: int) -> Int32Array:
    array = np.asarray(prefix)
    name = f"curriculum.prefix({epoch})"
    if array.ndim != 1 or len(array) == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ArgumentError(f"{name} must be one or more whole numbers, got {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= num_examples:
        raise ArgumentError(
            f"{name} must hold indices from 0 to {num_examples - 1}, got {array.min()} to {array.max()}"
        )
    counts = np.bincount(array, minlength=num_examples)
    if counts.max() > 1:
        raise ArgumentError(f"{name} must hold every index once, got {int(counts.argmax())} {counts.max()} times")
    return array.astype(np.int32)
