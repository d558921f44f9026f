"""Logical batches in the forms they come in: tensors, lists of examples, flat rows, and what only runs whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .._checks import as_whole
from .._containers import fields_of
from .._lengths import as_lengths
from .._packed import PackedRow, flat_lengths, is_flat, num_sequences
from .._tree import CannotCutError, Rows
from ..errors import ArgumentError
from ..plan import PadTo

Lengths: TypeAlias = npt.NDArray[np.int32]
Part: TypeAlias = Sequence[int]  # the places of a micro-batch's examples; a range where they are neighbours
# split(batch, None) is the number of examples, split(batch, indices) the micro-batch of some of them
SplitFunction: TypeAlias = Callable[[Any, list[int] | None], Any]

_GIVE_SPLIT = "give split=, a function of (batch, indices) that returns the micro-batch of some examples"


def wrap_batch(
    batch: Any,
    *,
    collate: Callable[[list[Any]], Any] | None,
    lengths: Callable[[Any], Any] | None,
    trim: Callable[[Any], Any] | None,
    split: SplitFunction | None,
) -> LogicalBatch:
    """Return a batch as something that can be cut, or that runs whole.

    Args:
        batch: nested fields with one row per example, or a list of examples with ``collate``; anything with ``split``.
        collate: makes a micro-batch from a list of examples.
        lengths: of the examples of a batch, or of one example of a list.
        trim: cuts padding off a micro-batch.
        split: ``split(batch, None)`` returns the number of examples, ``split(batch, indices)`` some of them.

    >>> import torch
    >>> batch = wrap_batch((torch.zeros(3), ["a", "b", "c"]), collate=None, lengths=None, trim=None, split=None)
    >>> batch.take([1])
    (tensor([0.]), ['b'])
    """
    if split is not None:
        if collate is not None:
            raise ArgumentError("give collate= for lists of examples or split= for other batches, not both")
        return CustomBatch(batch, split, lengths=lengths, trim=trim)
    if is_flat(batch):
        return FlatBatch(batch, lengths=lengths)
    if collate is not None and isinstance(batch, list):
        return ExampleBatch(batch, collate, lengths)
    if collate is not None and not isinstance(batch, Tensor) and fields_of(batch) is None:
        raise ArgumentError(f"with collate= a batch is a list of examples, got {type(batch).__name__}; use list(batch)")
    try:
        return TensorBatch(batch, lengths=lengths, trim=trim)
    except CannotCutError as error:
        return WholeBatch(batch, error, lengths=lengths, trim=trim)


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
        """Return numbers that change when a tensor of the batch is changed in place."""
        return [tensor._version for tensor in _tensors_of(self.source) if not tensor.is_inference()]

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
        self.lengths = None if lengths is None else _checked(lengths(batch), self.num_examples)
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
        self.lengths = None if found is None else _checked(found, self.num_examples)

    def take(self, indices: Part) -> Any:
        """Return the collated examples."""
        return self._collate([self._examples[index] for index in indices])

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
        self.lengths = None if lengths is None else _checked(lengths(batch), num)
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
        self.lengths = None if lengths is None else _checked(lengths(batch), self.num_examples)

    def take(self, indices: Part) -> Any:
        """Return what ``split`` makes of some examples; all of them in order are the batch itself."""
        places = list(indices)
        is_whole = places == list(range(self.num_examples))
        part = self._batch if is_whole else self._own_part(places)
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


@final
class FlatBatch(LogicalBatch):
    """A row of examples without padding, with their bounds."""

    is_flat = True
    gains_from_sorting = False

    def __init__(self, batch: Any, *, lengths: Callable[[Any], Any] | None) -> None:
        self.source = self._batch = batch
        self.num_examples = num_sequences(batch)
        self._lengths = None if lengths is None else _checked(lengths(batch), self.num_examples)

    @cached_property
    def lengths(self) -> Lengths:  # type: ignore[override]  # read from the device only where they are needed
        """Return the tokens of every example."""
        return as_lengths(flat_lengths(self._batch)) if self._lengths is None else self._lengths

    @property
    def num_tokens(self) -> int:
        """Return the length of the row."""
        tokens = self._batch["input_ids"] if "input_ids" in self._batch else self._batch["inputs_embeds"]
        return int(tokens.shape[1])

    def shape_of(self, part: Part, pad_to: PadTo) -> tuple[int, ...]:
        """Return the number of examples of a micro-batch, and the length they would have if all were equally long."""
        return len(part), -(-int(self.lengths[part].sum()) // len(part))

    def take(self, indices: Part) -> Any:
        """Return the row of some examples; all of them in order are the batch itself."""
        is_whole = list(indices) == list(range(self.num_examples))
        return self._batch if is_whole else self._row.take(indices)

    @cached_property
    def _row(self) -> PackedRow:
        return PackedRow(self._batch)


def _tensors_of(batch: Any, depth: int = 2) -> list[Tensor]:
    """Return the tensors near the surface of a batch; lists of numbers below would take long to walk through."""
    if isinstance(batch, Tensor):
        return [batch]
    if depth == 0:
        return []
    values = batch if type(batch) in (list, tuple) else (fields_of(batch) or {}).values()
    return [tensor for value in values for tensor in _tensors_of(value, depth - 1)]


def _checked(lengths: Any, num: int | None) -> Lengths:
    array = as_lengths(lengths)
    if num is not None and len(array) != num:
        raise ArgumentError(f"lengths must have one row per example, {num}, got {len(array)}")
    return array
