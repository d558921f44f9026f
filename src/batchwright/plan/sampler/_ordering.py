"""The order of the examples of an epoch: shuffled, or planned into micro-batches of similar lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole
from ..._lengths import as_lengths
from ..._random import Purpose, bit_stream, permutation
from ..._types import MAX_INT32
from ...errors import ArgumentError, BudgetError, LengthsError
from .._oversize import fits
from .._settings import PlanSettings
from ..budget import Budget, check_budget
from ..collating import PadTo
from ..plan import plan_epoch
from ._progress import fingerprint

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

    Without a budget the order is shuffled. With lengths and one the epoch is planned into micro-batches of similar
    lengths under it, and these follow each other in random order, each from its longest example to its shortest.
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
        if self.settings.grouping.is_static:
            # Planned with the others, so that every epoch has the same static shapes.
            order = self._order(self.num_examples, self.lengths, epoch)
            return EpochOrder(epoch, order[np.isin(order, prefix)], fingerprint(prefix))
        lengths = None if self.lengths is None else self.lengths[prefix]
        return EpochOrder(epoch, prefix[self._order(len(prefix), lengths, epoch)], fingerprint(prefix))

    def _order(self, num: int, lengths: Int32Array | None, epoch: int) -> Int32Array:
        if lengths is not None and self.budget is not None:
            return plan_epoch(lengths, self.budget, self.settings, epoch).indices
        if not self.settings.shuffle:
            return np.arange(num, dtype=np.int32)
        stream = bit_stream(self.settings.seed, epoch, Purpose.ORDER)
        return permutation(num, stream).astype(np.int32)

    def pad_to(self) -> PadTo:
        """Return what a collator pads with: the static shapes of the grouping and what fits at each, if it has any."""
        if self.lengths is None or self.budget is None:
            return PadTo()
        return plan_epoch(self.lengths, self.budget, self.settings, 0).pad_to


def make_ordering(
    num_examples: int,
    lengths: npt.ArrayLike | None,
    budget: Budget | None,
    curriculum: HasPrefix | None,
    settings: PlanSettings,
    *,
    counts_tokens: bool,
) -> Ordering:
    """Check what an order is made of.

    Args:
        num_examples: indices are ``range(num_examples)``.
        lengths: of the examples; they need a budget, unless tokens are counted by them.
        budget: of a micro-batch.
        curriculum: chooses the examples of an epoch.
        settings: of the plan.
        counts_tokens: whether the sizes of batches count tokens.
    """
    num = as_whole("num_examples", num_examples, least=1)
    if num > MAX_INT32:
        raise ArgumentError(f"num_examples must be at most {MAX_INT32}, got {num}")
    if counts_tokens and lengths is None:
        raise ArgumentError('size_unit="tokens" counts the tokens of examples by their lengths; give lengths')
    if (lengths is None) != (budget is None) and not counts_tokens:
        missing = "budget" if budget is None else "lengths"
        raise ArgumentError(
            f"lengths and budget go together, {missing} is missing; give both, or neither for a plain shuffle"
        )
    if curriculum is not None:
        _check_curriculum(curriculum, num)
    if lengths is None:
        return Ordering(num, settings, None, None, curriculum)
    array = as_lengths(lengths).copy()  # a change of the caller's array must not change later epochs
    if len(array) != num:
        raise LengthsError(f"there are {len(array)} lengths but num_examples is {num}; give one per example")
    if budget is not None:
        settings.grouping.check_axes(array.shape[1])
        _check_fit(array, check_budget(budget), settings)
    return Ordering(num, settings, array, budget, curriculum)


def _check_fit(lengths: Int32Array, budget: Budget, settings: PlanSettings) -> None:
    over = np.flatnonzero(~fits(lengths, budget, settings))
    if len(over):
        length = lengths[over[0]].tolist()
        shown = length[0] if len(length) == 1 else tuple(length)
        more = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
        raise BudgetError(
            f"example {over[0]}{more} of length {shown} is over {budget} by itself; raise the budget, or leave the "
            "example out"
        )


def _check_curriculum(curriculum: HasPrefix, num_examples: int) -> None:
    if not callable(getattr(curriculum, "prefix", None)) or not hasattr(curriculum, "num_examples"):
        raise ArgumentError(
            f"curriculum must have num_examples and prefix(epoch), as size.Curriculum has, got {curriculum!r}"
        )
    if curriculum.num_examples != num_examples:
        raise ArgumentError(
            f"the curriculum has {curriculum.num_examples} examples but num_examples is {num_examples}; "
            "give one difficulty per example"
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
        raise ArgumentError(f"{name} must hold every index once, got index {int(counts.argmax())} {counts.max()} times")
    return array.astype(np.int32)
