"""The rows of a value in a batch, by the rule that ``_tree`` states: how to take them, or why nothing can."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from ._containers import fields_of, is_open, is_plain, rebuilt
from .errors import ArgumentError

# cut(selection): the chosen examples of one value of a batch
Cut: TypeAlias = "Callable[[Selection], Any]"
# axis_of(tensor or array, num, place): where its examples lie, None if it belongs to no example, -1 if nowhere
_AxisOf: TypeAlias = Callable[[Any, int, str], int | None]

# Rows of these can be taken exactly: compressed sparse tensors cannot be indexed.
_LAYOUTS = (torch.strided, torch.sparse_coo)
_OUTSIDE = "keep what belongs to no example out of the batch"


@final
class CannotCutError(ArgumentError):
    """A batch is not made of rows, so it can only run whole.

    Args:
        reason: which part of the batch, and why.
        num_examples: how many examples the batch holds, if the rest of it says so.
    """

    def __init__(self, reason: str, num_examples: int | None = None) -> None:
        super().__init__(reason)
        self.num_examples = num_examples


@final
class Selection:
    """The places of some examples: a slice of neighbours, or an index."""

    def __init__(self, indices: Sequence[int]) -> None:
        start, num = indices[0], len(indices)
        self._indices = indices
        self._start, self._num = start, num
        self._is_slice = isinstance(indices, range) or indices == list(range(start, start + num))
        self._index: Tensor | None = None

    def of_tensor(self, tensor: Tensor, axis: int) -> Tensor:
        """Return rows: a view of neighbours, a copy of others."""
        if self._is_slice and tensor.layout is torch.strided:
            return tensor.narrow(axis, self._start, self._num)
        if self._index is None:
            self._index = torch.tensor(self._indices)
        return tensor.index_select(axis, self._index.to(tensor.device, non_blocking=True))

    def of_array(self, array: Any, axis: int) -> Any:
        """Return rows: a view of neighbours, a copy of others."""
        rows = slice(self._start, self._start + self._num) if self._is_slice else list(self._indices)
        return array[(slice(None),) * axis + (rows,)]

    def of_sequence(self, values: Any) -> Any:
        """Return entries as a list or tuple."""
        if self._is_slice:
            return values[self._start : self._start + self._num]
        return type(values)([values[index] for index in self._indices])


@final
class Reader:
    """Reads what the rows of each value are.

    Args:
        num: the number of examples.
        axis_of: finds the axis of the examples of a tensor; None takes the first.
        entries_only: every list or tuple has one entry per example, and none holds fields.
        unlike_are_fields: a list or tuple whose entries are of several kinds holds fields.
    """

    def __init__(
        self,
        num: int,
        axis_of: _AxisOf | None = None,
        *,
        entries_only: bool = False,
        unlike_are_fields: bool = False,
    ) -> None:
        self.num = num
        self._axis_of = first_axis if axis_of is None else axis_of
        self._entries_only = entries_only
        self._unlike_are_fields = unlike_are_fields

    def read_batch(self, batch: Any) -> Cut:
        """Return what cuts a batch; a list or tuple that is one holds fields."""
        return self._fields(batch, "batch") if type(batch) in (list, tuple) else self.read(batch, "batch")

    def read(self, value: Any, place: str, parent: Any = None) -> Cut:
        """Return what cuts a value inside a parent, or say why nothing can."""
        if isinstance(value, Tensor | np.ndarray):
            return self._array(value, place)
        if isinstance(value, PackedSequence):
            raise self._complaint(f"{place} is a PackedSequence, whose rows are steps of several examples")
        if type(value) in (list, tuple):
            return self._sequence(value, place, parent)
        fields = fields_of(value)
        if fields is not None and is_open(value):
            return self._named(value, fields, place)
        if is_plain(value):
            return lambda selection: value
        if isinstance(value, Dataset | DataLoader):
            raise self._complaint(
                f"{place} is a {type(value).__name__}, not a batch; give the batches of a DataLoader one by one, "
                "for batch in loader: stepper.step(batch)"
            )
        raise self._complaint(f"{place} is a {type(value).__name__}, and it is not known what a row of it is")

    def _array(self, value: Any, place: str) -> Cut:
        if isinstance(value, Tensor) and (value.is_nested or value.layout not in _LAYOUTS):
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise self._complaint(f"{place} is a {kind} tensor, which cannot be cut into rows")
        axis = self._axis_of(value, self.num, place)
        if axis is None:
            return lambda selection: value
        if axis >= 0:
            of = Selection.of_tensor if isinstance(value, Tensor) else Selection.of_array
            return lambda selection: of(selection, value, axis)
        if value.ndim == 0:
            raise self._complaint(
                f"{place} has no dimension to split on; keep scalars out of the batch or as Python numbers"
            )
        raise self._complaint(
            f"{place} of shape {tuple(value.shape)} cannot be cut into pieces of {self.num} examples, as it has no "
            f"row per example; {_OUTSIDE}"
        )

    def _named(self, value: Any, fields: dict[Any, Any], place: str) -> Cut:
        cuts = {name: self.read(item, place_of(value, name, place), value) for name, item in fields.items()}
        if self.has_rows(value) is None:
            return lambda selection: value
        try:
            rebuilt(value, fields)
        except (ArgumentError, TypeError, ValueError) as error:
            raise self._complaint(f"{place} cannot be made of fewer rows: {error}") from error
        return lambda selection: rebuilt(value, {name: cut(selection) for name, cut in cuts.items()})

    def _sequence(self, value: Any, place: str, parent: Any) -> Cut:
        if not value:
            return lambda selection: value
        are_entries = len(value) == self.num
        are_fields = self._may_hold_fields(value, parent) and self.holds_fields(value) is True
        if are_entries and are_fields and self.num > 1 and not are_unlike(value):
            raise self._complaint(
                f"{place} may be one entry per example or {len(value)} fields of {self.num} rows each; name fields in "
                "a dict, or give a list of examples and collate="
            )
        if self._may_hold_fields(value, parent) and self._are_broken_fields(value):
            return self._fields(value, place)  # says which field has no row per example
        if are_fields and not (are_entries and self.num == 1):
            return self._fields(value, place)
        if are_entries:
            return lambda selection: selection.of_sequence(value)
        raise self._complaint(
            f"{place} is a {type(value).__name__} of {len(value)} entries in a batch of {self.num} examples; give one "
            f"entry per example, name fields in a dict, and {_OUTSIDE}"
        )

    def _may_hold_fields(self, value: Any, parent: Any) -> bool:
        # default_collate makes lists of fields, but puts them into no tuple and no dataclass.
        hand_made = type(parent) is tuple or dataclasses.is_dataclass(parent)
        return not self._entries_only and not (type(value) is list and hand_made)

    def _are_broken_fields(self, value: Any) -> bool:
        """Say whether some, but not all, values of several kinds have a row per example; entries would be alike."""
        if self.holds_fields(value) is not False:
            return False
        filled = [item for item in value if not is_plain(item)]
        return are_unlike(filled) and any(self.has_rows(item, value) for item in filled)

    def _fields(self, value: Any, place: str) -> Cut:
        cuts = [self.read(item, f"{place}[{index}]", value) for index, item in enumerate(value)]
        return lambda selection: type(value)([cut(selection) for cut in cuts])

    def has_rows(self, value: Any, parent: Any = None) -> bool | None:
        """Say whether a value inside a parent may have a row per example; None if it belongs to none."""
        if isinstance(value, Tensor | np.ndarray):
            axis = first_axis(value, self.num, "") if _is_ragged(value) else self._axis_of(value, self.num, "")
            return None if axis is None else axis >= 0
        if type(value) in (list, tuple):
            return self._sequence_has_rows(value, parent)
        if is_plain(value):
            return None
        if (rows := own_rows(value)) is not None:
            return rows == self.num
        fields = fields_of(value)
        return self.holds_fields(value) if fields is not None and is_open(value) else False

    def _sequence_has_rows(self, value: Any, parent: Any) -> bool | None:
        if not value:
            return None
        if len(value) == self.num and not (self._unlike_are_fields and are_unlike(value)):
            return True
        return self._may_hold_fields(value, parent) and self.holds_fields(value) is True

    def holds_fields(self, container: Any) -> bool | None:
        """Say whether a container may hold fields: all have a row per example, but for those that belong to none."""
        fields = fields_of(container)
        found: bool | None = None
        for value in container if fields is None else fields.values():
            has_rows = self.has_rows(value, container)
            if has_rows is False:
                return False
            found = found or has_rows
        return found

    def has_rows_in_batch(self, batch: Any) -> bool | None:
        """Say whether a batch may have a row per example; a list or tuple that is one holds fields."""
        return self.holds_fields(batch) if type(batch) in (list, tuple) else self.has_rows(batch)

    def _complaint(self, reason: str) -> CannotCutError:
        return CannotCutError(reason, self.num)


def first_axis(value: Any, num: int, place: str) -> int:
    """Return axis 0 if it counts the examples, else -1."""
    return 0 if value.ndim and num_rows(value) == num else -1


def input_axis(value: Any, num: int, place: str) -> int | None:
    """Return the axis of the examples of a model's input, None for a tensor without axes, else -1."""
    if value.ndim == 0:
        return None
    # Positions of several kinds have shape (kinds, B, L). The name decides: any other second axis is as long by chance.
    if place.endswith("position_ids']") and value.ndim == 3 and value.shape[1] == num:
        return 1
    return 0 if value.shape[0] == num else -1


def num_rows(value: Any) -> int:
    """Return the length of axis 0 of a tensor or array; nested tensors know it too."""
    return int(value.size(0) if _is_ragged(value) else value.shape[0])


def _is_ragged(value: Any) -> bool:
    """Say whether a tensor holds rows of different lengths, and so has no shape."""
    return isinstance(value, Tensor) and value.is_nested


def place_of(value: Any, name: Any, place: str) -> str:
    """Return how a field of a container is reached."""
    if isinstance(value, Mapping):
        return f"{place}[{name!r}]"
    return f"{place}{name}" if name.startswith("[") else f"{place}.{name}"


def own_rows(value: Any) -> int | None:
    """Return the number of examples of what cannot be cut but knows it: packed sequences, batches of graphs."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    num = None if is_plain(value) else getattr(value, "num_graphs", None)
    return num if isinstance(num, int) else None


def are_unlike(values: Sequence[Any]) -> bool:
    """Say whether values are of several kinds, as the fields of a batch are and its examples are not."""
    return not any(map(is_plain, values)) and len(set(map(_kind, values))) > 1


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return Tensor, str(value.dtype), value.ndim
    if isinstance(value, list | tuple) and value:
        return Sequence, _kind(value[0])
    return Mapping if isinstance(value, Mapping) else type(value)
