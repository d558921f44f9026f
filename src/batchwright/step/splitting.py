"""Splitting: logical batches in the forms they come in, cut by number, by budget, or by what has fitted so far."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .._checks import as_whole
from .._containers import fields_of
from .._lengths import as_lengths
from .._tree import CannotCutError, Rows
from ..errors import ArgumentError
from ..plan import Budget, PadTo
from ..plan.budget import check_budget
from .shape_splitting import is_within, split_by_shapes

Lengths: TypeAlias = npt.NDArray[np.int32]
Part: TypeAlias = Sequence[int]  # the places of a micro-batch's examples; a range where they are neighbours
# split(batch, None) is the number of examples, split(batch, indices) the micro-batch of some of them
SplitFunction: TypeAlias = Callable[[Any, list[int] | None], Any]

_GIVE_SPLIT = "give split=, a function of (batch, indices) that returns the micro-batch of some examples"


def split_by_budget(
    lengths: npt.ArrayLike, budget: Budget, *, order: npt.ArrayLike | None = None, least_parts: int = 1
) -> list[list[int]]:
    """Cut the examples of one update into micro-batches that fit a budget, for a training loop of your own.

    ``Stepper(micro_batch=budget)`` cuts its batches like this. An example that is over the budget is cut off alone.

    Args:
        lengths: of the examples, ``(B,)`` or ``(B, axes)``, as they will be padded.
        budget: what one micro-batch may cost.
        order: a permutation of the examples to cut in; None sorts them by length, longest first, for little padding.
        least_parts: make at least this many micro-batches, if there are that many examples.

    Returns:
        The indices of the examples of each micro-batch.

    >>> from batchwright import MaxTokens
    >>> split_by_budget([3, 9, 4, 8], MaxTokens(20))  # 2 × 9 tokens, then 2 × 4
    [[1, 3], [2, 0]]
    """
    rows = as_lengths(lengths)
    if order is None:
        places = _longest_first(rows)
    else:
        places = np.asarray(order)
        if not np.array_equal(np.sort(places), np.arange(len(rows))):
            raise ArgumentError(f"order must be a permutation of the {len(rows)} examples, each index once")
    most = _most_items(len(rows), as_whole("least_parts", least_parts, least=1))
    return _cut(rows, places, check_budget(budget), 1.0, most)


def split(
    batch: LogicalBatch,
    *,
    budget: Budget | None,
    limit: float,
    order: npt.NDArray[np.int64] | None = None,
    least_parts: int = 1,
    pad_to: PadTo | None = None,
) -> Sequence[Part]:
    """Cut a logical batch so that every micro-batch costs at most ``limit``; one example may cost more.

    Args:
        batch: the logical batch.
        budget: counts the cost as a share of the budget; None counts tokens if lengths are known, else items.
        limit: the most that a micro-batch may cost.
        order: the order to cut in; None sorts by length, longest first, where that makes micro-batches narrower.
        least_parts: make at least this many micro-batches, if there are that many examples.
        pad_to: cut examples that will be collated into its static shapes, unless one of them is over the limit or
            ``order`` or ``least_parts`` ask for something else.

    Returns:
        The places of the examples of each micro-batch.

    Raises:
        ArgumentError: the batch only runs whole, and one micro-batch is too large.
    """
    parts = None
    if pad_to is not None and pad_to.shapes and order is None and is_within(pad_to, budget, limit):
        parts = _static_parts(batch, pad_to)
    if parts is None or len(parts) < least_parts:
        parts = _parts_of(batch, budget, limit, order, least_parts)
    if len(parts) > 1 and batch.refusal is not None:
        raise batch.refusal
    return parts


def _static_parts(batch: LogicalBatch, pad_to: PadTo) -> Sequence[Part] | None:
    """Return micro-batches of static shapes; None for a batch of tensors, whose width is settled."""
    if not isinstance(batch, ExampleBatch) or batch.lengths is None:
        return None
    return split_by_shapes(batch.lengths, pad_to)


def _parts_of(
    batch: LogicalBatch, budget: Budget | None, limit: float, order: npt.NDArray[np.int64] | None, least_parts: int
) -> Sequence[Part]:
    if batch.is_flat and order is None and least_parts == 1 and math.isinf(limit):
        return [range(batch.num_examples)]  # without a look at lengths, which may lie on the device
    if order is None and batch.gains_from_sorting:
        assert batch.lengths is not None
        order = _longest_first(batch.lengths)
    most = _most_items(batch.num_examples, least_parts)
    if batch.lengths is None:
        most = min(most, batch.num_examples if math.isinf(limit) else max(1, math.floor(limit)))
        return near_equal(order, batch.num_examples, -(-batch.num_examples // most))
    order = np.arange(batch.num_examples) if order is None else order
    return _cut(batch.lengths, order, budget, limit, most, is_flat=batch.is_flat)


def _cut(
    lengths: Lengths,
    order: npt.NDArray[np.int64],
    budget: Budget | None,
    limit: float,
    most: int,
    is_flat: bool = False,
) -> list[list[int]]:
    """Take as many examples as fit off the front of an order, at most ``most``, until none is left."""
    parts = []
    place = 0
    while place < len(order):
        over = _costs(lengths[order[place : place + most]], budget, is_flat) > limit
        # argmax finds the first example that is too much; it is the first of the next part, or alone in this one.
        size = max(1, int(np.argmax(over))) if over.any() else len(over)
        parts.append(order[place : place + size].tolist())
        place += size
    return parts


def _most_items(num: int, least_parts: int) -> int:
    """Return the most examples of a part, so that there are at least that many parts."""
    most = -(-num // least_parts)
    # 4 examples in 3 parts: parts of 2 would be only 2.
    return most if -(-num // most) >= least_parts else max(1, num // least_parts)


def cost_of(batch: LogicalBatch, part: Part, budget: Budget | None) -> float:
    """Return the cost of a micro-batch in the unit of ``split``."""
    if batch.lengths is None:
        return float(len(part))
    return float(_costs(batch.lengths[part], budget, batch.is_flat)[-1])


def _costs(lengths: Lengths, budget: Budget | None, is_flat: bool) -> npt.NDArray[np.float64]:
    """Return the cost of the first 1, 2, … examples, padded to the longest; flat ones count as if equally long."""
    counts = np.arange(1, len(lengths) + 1)
    tops = np.maximum.accumulate(lengths, axis=0).astype(np.int64)
    if is_flat:
        tops = -(-lengths.cumsum(axis=0, dtype=np.int64) // counts[:, None])
    if budget is None:
        return (counts * tops.sum(axis=1)).astype(np.float64)
    return np.asarray(budget.fraction(counts, tops), dtype=np.float64)


def _longest_first(lengths: Lengths) -> npt.NDArray[np.int64]:
    return np.argsort(-lengths.sum(axis=1), kind="stable")


def near_equal(order: npt.NDArray[np.int64] | None, num: int, num_parts: int) -> list[Part]:
    """Return parts that differ by at most one example, larger ones first, in an order or in that of the batch."""
    places: Part = range(num) if order is None else order.tolist()
    size, rest = divmod(num, num_parts)
    stops = [size * place + min(place, rest) for place in range(num_parts + 1)]
    return [places[start:stop] for start, stop in pairwise(stops)]


class LogicalBatch(ABC):
    """The examples of one update, which can be taken apart and put together in any order."""

    source: Any  # the batch as it came
    num_examples: int
    lengths: Lengths | None  # (B, axes), as the micro-batch will be padded
    is_flat: bool = False  # micro-batches have no padding
    refusal: ArgumentError | None = None  # what to raise instead of a cut, for a batch that only runs whole

    @abstractmethod
    def take(self, indices: Part) -> Any:
        """Return the micro-batch of some examples."""

    def take_all(self, parts: Sequence[Part]) -> Iterable[Any]:
        """Return the micro-batches of all parts, each made when it is needed."""
        return map(self.take, parts)

    @property
    def num_tokens(self) -> int | None:
        """Return the sum of lengths, None if they are not known."""
        return None if self.lengths is None else int(self.lengths.sum(dtype=np.int64))

    def shape_of(self, part: Part, pad_to: PadTo) -> tuple[int, ...] | None:
        """Return the number of examples of a micro-batch and its padded lengths, None if these are not known."""
        return None if self.lengths is None else (len(part), *pad_to(self.lengths[part]))

    def versions(self) -> list[int]:
        """Return numbers that change when the batch is changed in place."""
        return _marks_of(self.source)

    @property
    @abstractmethod
    def gains_from_sorting(self) -> bool:
        """Return whether micro-batches of short examples are narrower."""


@final
class TensorBatch(LogicalBatch):
    """Nested fields with one row per example; they keep their width unless ``trim`` is given."""

    def __init__(self, batch: Any, *, lengths: Callable[[Any], Any] | None, trim: Callable[[Any], Any] | None) -> None:
        self.source = batch
        self._rows = Rows(batch)
        self._trim = trim
        self.num_examples = self._rows.num
        self.lengths = None if lengths is None else checked_lengths(lengths(batch), self.num_examples)
        if self.lengths is not None and trim is None:
            # Every row keeps the width of the whole batch, so each costs that much.
            self.lengths = np.broadcast_to(self.lengths.max(axis=0), self.lengths.shape)

    def take(self, indices: Part) -> Any:
        """Return a slice or selection of every field, trimmed."""
        part = self._rows.take(indices)
        return part if self._trim is None else self._trim(part)

    def take_all(self, parts: Sequence[Part]) -> Iterable[Any]:
        """Return the micro-batches of all parts; neighbours are cut in one go, without a copy."""
        if self._trim is None and len(parts) > 1 and all(isinstance(part, range) for part in parts):
            found = self._rows.split(list(map(len, parts)))
            if found is not None:
                return found
        return map(self.take, parts)

    @property
    def gains_from_sorting(self) -> bool:
        """Return whether rows are trimmed."""
        return self._trim is not None and self.lengths is not None


@final
class ExampleBatch(LogicalBatch):
    """A list of examples and the function that collates some of them."""

    def __init__(
        self, examples: Sequence[Any], collate: Callable[[list[Any]], Any], lengths: Callable[[Any], Any] | None
    ) -> None:
        if not examples:
            raise ArgumentError("the batch is empty; give at least one example")
        self.source = self._examples = examples
        self._collate = collate
        self.num_examples = len(examples)
        found = None if lengths is None else [lengths(example) for example in examples]
        self.lengths = None if found is None else checked_lengths(found, self.num_examples)

    def take(self, indices: Part) -> Any:
        """Return the collated examples."""
        return self._collate([_held_apart(self._examples[index]) for index in indices])

    @property
    def gains_from_sorting(self) -> bool:
        """Return whether lengths are known."""
        return self.lengths is not None


@final
class WholeBatch(LogicalBatch):
    """A batch that is not made of rows: it runs in one piece, and is refused when it has to be cut.

    Args:
        batch: anything.
        reason: why it cannot be cut, and how many examples it has, if that is known.
        lengths: of the examples of the batch; they also say how many there are.
        trim: cuts padding off.
    """

    def __init__(
        self,
        batch: Any,
        reason: CannotCutError,
        *,
        lengths: Callable[[Any], Any] | None,
        trim: Callable[[Any], Any] | None,
    ) -> None:
        num = reason.num_examples
        if num is None and isinstance(batch, list):
            raise reason  # a list of examples lacks collate=, and lengths would be those of an example
        if num is None and lengths is None:
            raise ArgumentError(f"{reason}. If that is how the batch is meant, {_GIVE_SPLIT}") from reason
        self.source = self._batch = batch
        self._trim = trim
        self.lengths = None if lengths is None else checked_lengths(lengths(batch), num)
        self.num_examples = len(self.lengths) if self.lengths is not None else num or 0  # one of them is known
        self.refusal = ArgumentError(
            f"the batch has to be cut into micro-batches, but {reason}. If it cannot run whole, {_GIVE_SPLIT}"
        )

    def take(self, indices: Part) -> Any:
        """Return the whole batch, for all of its examples."""
        if len(indices) != self.num_examples and self.refusal is not None:
            raise self.refusal
        return self._batch if self._trim is None else self._trim(self._batch)

    @property
    def gains_from_sorting(self) -> bool:
        """Return False, as there is one micro-batch."""
        return False


@final
class CustomBatch(LogicalBatch):
    """A batch and the function that cuts it: graphs, patches of images, packed sequences.

    Args:
        batch: anything.
        split: ``split(batch, None)`` returns the number of examples, ``split(batch, indices)`` the micro-batch of some.
        lengths: of the examples of the batch, as ``split`` and ``trim`` leave them.
        trim: cuts padding off a micro-batch.
    """

    def __init__(
        self,
        batch: Any,
        split: SplitFunction,
        *,
        lengths: Callable[[Any], Any] | None,
        trim: Callable[[Any], Any] | None,
    ) -> None:
        self.source = self._batch = batch
        self._split = split
        self._trim = trim
        self.num_examples = as_whole("split(batch, None), the number of examples,", split(batch, None), least=1)
        self.lengths = None if lengths is None else checked_lengths(lengths(batch), self.num_examples)

    def take(self, indices: Part) -> Any:
        """Return what ``split`` makes of some examples; all of them in order are the batch itself."""
        places = list(indices)
        is_whole = places == list(range(self.num_examples))
        part = _held_apart(self._batch) if is_whole else self._own_part(places)
        return part if self._trim is None else self._trim(part)

    def _own_part(self, places: list[int]) -> Any:
        part = self._split(self._batch, places)
        if part is self._batch or part is None:
            returned = "None" if part is None else "the whole batch"
            raise ArgumentError(
                f"split(batch, indices) returned {returned} for {len(places)} of {self.num_examples} examples; return "
                "a new micro-batch of these examples"
            )
        return part

    @property
    def gains_from_sorting(self) -> bool:
        """Return whether lengths are known."""
        return self.lengths is not None


def _held_apart(value: Any) -> Any:
    """Return a shallow copy of a dict or list, so that who pops or sets an entry leaves that of a second attempt."""
    return value.copy() if type(value) in (dict, list) else value


def _marks_of(batch: Any, depth: int = 3) -> list[int]:
    """Return numbers that show a write to a batch: counts of tensors, checksums of arrays, and lengths of lists."""
    if isinstance(batch, Tensor):
        return [] if batch.is_inference() else [batch._version]
    if isinstance(batch, np.ndarray):  # some of its values, as all of them would take long
        return [zlib.crc32(batch.flat[:: batch.size // 256 + 1].tobytes())]
    is_list = type(batch) in (list, tuple)
    values = batch if is_list else list((fields_of(batch) or {}).values())
    marks = [len(values)] if is_list else []
    # A list of numbers or texts would take long too.
    if depth > 0 and not (is_list and values and isinstance(values[0], int | float | str | np.generic)):
        marks += [mark for value in values for mark in _marks_of(value, depth - 1 - is_list)]
    return marks


def checked_lengths(lengths: Any, num: int | None) -> Lengths:
    """Return lengths as an array with a row per example."""
    array = as_lengths(lengths)
    if num is not None and len(array) != num:
        raise ArgumentError(f"lengths must have one row per example, {num}, got {len(array)}")
    return array
