"""The rows of a value in a batch, by the rule that ``_tree`` states: how to take them, or why nothing can."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._containers import fields_of, is_open, is_plain, rebuilt
from .errors import ArgumentError

# cut(selection): the chosen examples of one value of a batch
Cut: TypeAlias = "Callable[[Selection], Any]"
# axis_of(tensor or array, num, place): where its examples lie, None if it belongs to no example, -1 if nowhere
_AxisOf: TypeAlias = Callable[[Any, int, str], int | None]

# Rows of these can be taken exactly: compressed sparse tensors cannot be indexed.
_LAYOUTS = (torch.strided, torch.sparse_coo)
_OUTSIDE = "keep what belongs to no example out of the batch"
_NEEDS_COLLATE = "a list of examples needs collate= (collate=list hands them on as they are)"


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
        unlike_are_fields: take no list for one entry per example whose entries are of several kinds.
    """

    def __init__(self, num: int, axis_of: _AxisOf | None = None, *, unlike_are_fields: bool = False) -> None:
        self._num = num
        self._axis_of = first_axis if axis_of is None else axis_of
        self._unlike_are_fields = unlike_are_fields

    def read_batch(self, batch: Any) -> Cut:
        """Return what cuts a batch; a list or tuple that is one holds fields."""
        return self._fields(batch, "batch") if type(batch) in (list, tuple) else self.read(batch, "batch")

    def read(self, value: Any, place: str) -> Cut:
        """Return what cuts a value, or say why nothing can."""
        if isinstance(value, Tensor | np.ndarray):
            return self._array(value, place)
        if isinstance(value, PackedSequence):
            raise self._complaint(f"{place} is a PackedSequence, whose rows are steps of several examples")
        if type(value) in (list, tuple):
            return self._sequence(value, place)
        fields = fields_of(value)
        if fields is not None and is_open(value):
            return self._named(value, fields, place)
        if is_plain(value):
            return lambda selection: value
        raise self._complaint(f"{place} is a {type(value).__name__}, of which it is not known what a row is")

    def _array(self, value: Any, place: str) -> Cut:
        if isinstance(value, Tensor) and (value.is_nested or value.layout not in _LAYOUTS):
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise self._complaint(f"{place} is a {kind} tensor, which cannot be cut into rows")
        axis = self._axis_of(value, self._num, place)
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
            f"{place} of shape {tuple(value.shape)} cannot be cut into pieces of {self._num} examples, as it has no "
            f"row per example; {_OUTSIDE}"
        )

    def _named(self, value: Any, fields: dict[Any, Any], place: str) -> Cut:
        cuts = {name: self.read(item, _inside(value, name, place)) for name, item in fields.items()}
        if self.has_rows(value) is None:
            return lambda selection: value
        try:
            rebuilt(value, fields)
        except (ArgumentError, TypeError, ValueError) as error:
            raise self._complaint(f"{place} cannot be made of fewer rows: {error}") from error
        return lambda selection: rebuilt(value, {name: cut(selection) for name, cut in cuts.items()})

    def _sequence(self, value: Any, place: str) -> Cut:
        if not value:
            return lambda selection: value
        are_entries, are_fields = len(value) == self._num, self._agree(value) is True
        if are_entries and are_fields and self._num > 1 and not _are_unlike(value):
            raise self._complaint(
                f"{place} may be one entry per example or {len(value)} fields of {self._num} rows each; name fields in "
                "a dict, or give a list of examples and collate="
            )
        if are_fields and not (are_entries and self._num == 1):
            return self._fields(value, place)
        if are_entries:
            return lambda selection: selection.of_sequence(value)
        raise self._complaint(
            f"{place} is a {type(value).__name__} of {len(value)} entries in a batch of {self._num} examples; give one "
            f"entry per example, and {_OUTSIDE}"
        )

    def _fields(self, value: Any, place: str) -> Cut:
        cuts = [self.read(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return lambda selection: type(value)([cut(selection) for cut in cuts])

    def has_rows(self, value: Any, *, is_batch: bool = False) -> bool | None:
        """Say whether a value may have a row per example; None if it belongs to none."""
        if isinstance(value, Tensor | np.ndarray):
            axis = first_axis(value, self._num, "") if _is_ragged(value) else self._axis_of(value, self._num, "")
            return None if axis is None else axis >= 0
        if type(value) in (list, tuple):
            if len(value) == self._num and not is_batch and not (self._unlike_are_fields and _are_unlike(value)):
                return True
            return self._agree(value) or (False if value else None)
        if is_plain(value):
            return None
        if (rows := _own_rows(value)) is not None:
            return rows == self._num
        fields = fields_of(value)
        return self._agree(fields.values()) if fields is not None and is_open(value) else False

    def _agree(self, values: Iterable[Any]) -> bool | None:
        """Say whether values may be fields: all have a row per example, but for those that belong to none."""
        found: bool | None = None
        for value in values:
            has_rows = self.has_rows(value)
            if has_rows is False:
                return False
            found = found or has_rows
        return found

    def _complaint(self, reason: str) -> CannotCutError:
        return CannotCutError(reason, self._num)


def first_axis(value: Any, num: int, place: str) -> int:
    """Return axis 0 if it counts the examples, else -1."""
    return 0 if value.ndim and _num_rows(value) == num else -1


def input_axis(value: Any, num: int, place: str) -> int | None:
    """Return the axis of the examples of a model's input, None for a tensor without axes, else -1."""
    if value.ndim == 0:
        return None
    # Positions of several kinds have shape (kinds, B, L). The name decides, as there may be as many examples as kinds.
    if place.endswith("position_ids']") and value.ndim == 3 and value.shape[1] == num:
        return 1
    if value.shape[0] == num:
        return 0
    return 1 if value.ndim > 1 and value.shape[1] == num else -1


def _num_rows(value: Any) -> int:
    return int(value.size(0) if _is_ragged(value) else value.shape[0])


def _is_ragged(value: Any) -> bool:
    """Say whether a tensor holds rows of different lengths, and so has no shape."""
    return isinstance(value, Tensor) and value.is_nested


def _inside(value: Any, name: Any, place: str) -> str:
    if isinstance(value, Mapping):
        return f"{place}[{name!r}]"
    return f"{place}{name}" if name.startswith("[") else f"{place}.{name}"


def _own_rows(value: Any) -> int | None:
    """Return the number of examples of what cannot be cut but knows it: packed sequences, batches of graphs."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    num = None if is_plain(value) else getattr(value, "num_graphs", None)
    return num if isinstance(num, int) else None


# Batches


def may_be_examples(batch: list[Any]) -> bool:
    """Say whether the entries of a list could as well be examples as fields of a batch.

    Entries of several kinds are fields, and so are tensors whose rows differ in shape. But three-dimensional ones with
    3 or 4 rows are more likely images of different sizes.
    """
    if len(batch) < 2 or _are_unlike(batch):
        return len(batch) == 1 and not isinstance(batch[0], Tensor | np.ndarray)
    shapes = {tuple(value.shape) for value in batch if isinstance(value, Tensor | np.ndarray)}
    return len(shapes) < 2 or _look_like_images(shapes)


def _look_like_images(shapes: set[tuple[int, ...]]) -> bool:
    return all(len(shape) == 3 and shape[0] in (3, 4) for shape in shapes)


def _are_unlike(values: Sequence[Any]) -> bool:
    """Say whether values are of several kinds, as the fields of a batch are and its examples are not."""
    return not any(map(is_plain, values)) and len(set(map(_kind, values))) > 1


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return Tensor, str(value.dtype), value.ndim
    if isinstance(value, list | tuple) and value:
        return Sequence, _kind(value[0])
    return Mapping if isinstance(value, Mapping) else type(value)


def count_rows(batch: Any) -> int:
    """Return the number of examples of a batch, or say why it is not known.

    Raises:
        CannotCutError: fields have different numbers of rows, or rows can be counted in two ways.
        ArgumentError: there is nothing to count, or the batch is empty.
    """
    if type(batch) is list and may_be_examples(batch):
        raise CannotCutError(
            f"the batch is a list of {len(batch)} entries that may be fields or examples; give fields as a tuple, "
            f"tuple(batch), while {_NEEDS_COLLATE}"
        )
    places: dict[int, str] = {}
    for place, rows in _counted(batch, "batch"):
        places.setdefault(rows, place)
    if not places:
        return _count_entries(batch)
    if len(places) > 1:
        found = ", ".join(f"{place} has {rows}" for rows, place in places.items())
        advice = _NEEDS_COLLATE if type(batch) is list else _OUTSIDE
        raise CannotCutError(
            f"the fields of a batch must share their first dimension, got {sorted(places)}: {found}; {advice}",
            _num_texts(batch),
        )
    (num,) = places
    if num == 0:
        raise ArgumentError("the batch is empty; give at least one example")
    return num


def _counted(value: Any, place: str) -> Iterator[tuple[str, int]]:
    """Yield the places of a batch that count its examples for certain, and their numbers of rows."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield place, _num_rows(value)
    elif (rows := _own_rows(value)) is not None:
        yield place, rows
    elif (fields := fields_of(value)) is not None:
        for name, item in fields.items():
            yield from _counted(item, _inside(value, name, place))
    elif place == "batch" and type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _counted(item, f"batch[{index}]")


def _num_texts(batch: Any) -> int | None:
    """Return the number of rows of token ids: images and other parts of a text may be more or fewer."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return len(ids) if isinstance(ids, Tensor) and ids.ndim == 2 else None


def _count_entries(batch: Any) -> int:
    """Count the examples of a batch that has them only in lists: the number must fit all of them, in one way."""
    guesses = _guesses(batch, is_batch=True)
    fitting = [num for num in guesses if num > 0 and Reader(num).has_rows(batch, is_batch=True)]
    if len(fitting) > 1:
        likely = [num for num in fitting if Reader(num, unlike_are_fields=True).has_rows(batch, is_batch=True)]
        fitting = likely or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CannotCutError(
            f"the batch may hold {' or '.join(map(str, fitting))} examples, as its lists may be entries or fields; "
            f"name fields in a dict, while {_NEEDS_COLLATE}"
        )
    try:
        Reader(guesses[0] if guesses else 1).read_batch(batch)
    except CannotCutError as error:
        raise CannotCutError(str(error)) from error  # the number of examples was a guess
    raise ArgumentError(
        f"the batch holds no tensor, got {type(batch).__name__}; give nested tensors, or lists with one row per example"
    )


def _guesses(value: Any, *, is_batch: bool = False) -> list[int]:
    """Return every number of examples that the first list may stand for: its own length, or that of its entries."""
    if isinstance(value, Tensor | np.ndarray):
        return [_num_rows(value)] if value.ndim else []
    fields = fields_of(value)
    holds_entries = fields is None and type(value) in (list, tuple)
    if fields is None and not holds_entries:
        return []
    own = [len(value)] if holds_entries and not is_batch and value else []
    for item in value if holds_entries else fields.values():
        if found := _guesses(item):
            return list(dict.fromkeys(own + found))
    return own
