"""Nested batches: walk through their tensors, count their examples, take some of their rows, join several.

One rule says what the rows of a batch of B examples are:

- A tensor or an array has its rows on axis 0, one per example.
- A mapping, a named tuple, a dataclass, and the tuple that is a batch itself hold fields. Every field has B rows.
- A list inside a tuple or a dataclass holds one entry per example, whatever the entries are.
- Other lists and tuples inside a batch hold one entry per example too, or fields of B rows each, as ``default_collate``
  makes them. If both are possible, entries that differ in type or number of axes are fields, and entries that look
  alike are refused.
- Lists and tuples of one length that are all of a batch are read alike, so one that cannot hold fields decides for all.
- A list that is a batch itself holds fields, as ``default_collate`` makes it. Entries that look alike could be
  examples, so they are refused: fields are given as a tuple, examples with ``collate=``.
- A single value that is no tensor, such as a number, a text, None or a path, belongs to no example and stays whole.

Everything else is refused: a tensor without axes, a list of another length, packed, nested and compressed sparse
tensors, objects that are none of these and hold more than single values. The error names the place, such as
``batch[1]['boxes']``. ``take_rows`` keeps the same rule for the named inputs of a model, of which ``position_ids``
may have their examples on axis 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ._containers import fields_of, is_plain, rebuilt
from ._rows import CannotCutError as CannotCutError
from ._rows import Reader, Selection, are_unlike, input_axis, num_rows, own_rows, place_of
from .errors import ArgumentError

# A list of more tensors of one kind is no list of fields.
_MOST_FIELDS = 4
_CANNOT = object()  # be joined
_NEEDS_COLLATE = (
    "a list of examples needs collate=, e.g. torch.utils.data.default_collate (list hands them on as they are)"
)


def leaves(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch, depth first.

    >>> [tensor.tolist() for tensor in leaves({"x": torch.arange(2), "more": (torch.arange(1), "a")})]
    [[0, 1], [0]]
    """
    if isinstance(batch, Tensor):
        yield batch
        return
    fields = fields_of(batch)
    if fields is not None or isinstance(batch, list | tuple):
        for value in batch if fields is None else fields.values():
            yield from leaves(value)


def map_leaves(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with every tensor replaced; all other values stay as they are.

    >>> map_leaves({"x": torch.arange(4), "name": "a"}, lambda x: x[:2])
    {'x': tensor([0, 1]), 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    fields = fields_of(batch)
    if fields is not None:
        return rebuilt(batch, {name: map_leaves(value, function) for name, value in fields.items()})
    if isinstance(batch, list | tuple):
        return type(batch)(map_leaves(value, function) for value in batch)
    return batch


def num_examples(batch: Any) -> int:
    """Return the number of rows that all fields share, or say which field has none or others.

    >>> num_examples({"x": torch.zeros(3, 5), "names": ["a", "b", "c"]})
    3
    """
    return Rows(batch).num


def take(batch: Any, indices: Sequence[int]) -> Any:
    """Return some examples of a nested batch; neighbours are sliced without a copy.

    >>> take({"x": torch.arange(3), "texts": ["a", "b", "c"]}, [0, 2])
    {'x': tensor([0, 2]), 'texts': ['a', 'c']}
    """
    return Rows(batch).take(indices)


def take_rows(batch: Mapping[str, Any], rows: Sequence[int], num: int) -> dict[str, Any]:
    """Return some of the ``num`` examples of a model's inputs; values that belong to no example stay whole.

    Tensors are cut along their first axis, ``position_ids`` of several kinds along their second; a tensor without axes
    stays whole. Lists and tuples hold one entry per example, or tensors with such an axis each; a list of another
    number of single values, such as tokens to suppress, is a setting and stays whole.

    >>> take_rows({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 2.0}, [1, 2], 4)
    {'x': tensor([1, 2]), 'names': ['b', 'c'], 'scale': 2.0}
    """
    reader, selection = Reader(num, input_axis), Selection(rows)
    return {
        name: value if _is_setting(value, num) else reader.read(value, f"batch[{name!r}]")(selection)
        for name, value in batch.items()
    }


def join(batches: Sequence[Any]) -> Any | None:
    """Return one nested batch of the examples of several in their order, None if nobody can tell how.

    Tensors and arrays are joined along their first axis if they are alike otherwise, and lists of single values if they
    have one entry per example. Single values must be equal.

    >>> join([(torch.arange(2), ["a", "b"], 0.5), (torch.arange(1), ["c"], 0.5)])
    (tensor([0, 1, 0]), ['a', 'b', 'c'], 0.5)
    >>> join([torch.zeros(1, 3), torch.zeros(1, 4)]) is None
    True
    """
    nums = [num_examples(batch) for batch in batches]
    joined = _joined(batches, nums, is_batch=True)
    return None if joined is _CANNOT or num_examples(joined) != sum(nums) else joined


def _joined(values: Sequence[Any], nums: Sequence[int], *, is_batch: bool = False) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return _CANNOT
    if isinstance(first, Tensor):
        return torch.cat(list(values)) if _are_alike(values) else _CANNOT
    if isinstance(first, np.ndarray):
        return np.concatenate(values) if _are_alike(values) else _CANNOT
    if is_plain(first):
        return first if all(value == first for value in values) else _CANNOT
    fields = fields_of(first)
    if fields is not None:
        return _of_fields(values, nums)
    if is_batch and type(first) is tuple and len({len(value) for value in values}) == 1:
        parts = [_joined(part, nums) for part in zip(*values, strict=True)]
        return _CANNOT if any(part is _CANNOT for part in parts) else tuple(parts)
    return _of_entries(values, nums)


def _of_fields(values: Sequence[Any], nums: Sequence[int]) -> Any:
    found = [fields_of(value) or {} for value in values]
    if any(one.keys() != found[0].keys() for one in found):
        return _CANNOT
    parts = {name: _joined([one[name] for one in found], nums) for name in found[0]}
    return _CANNOT if any(part is _CANNOT for part in parts.values()) else rebuilt(values[0], parts)


def _of_entries(values: Sequence[Any], nums: Sequence[int]) -> Any:
    """Join lists of single values, one per example; lists of tensors may as well hold fields."""
    is_list = all(type(value) is list and all(map(is_plain, value)) for value in values)
    if not is_list or [len(value) for value in values] != list(nums):
        return _CANNOT
    return [entry for value in values for entry in value]


def _are_alike(values: Sequence[Any]) -> bool:
    kinds = {(value.dtype, getattr(value, "device", None), tuple(value.shape[1:])) for value in values}
    return len(kinds) == 1 and values[0].ndim > 0


def _is_setting(value: Any, num: int) -> bool:
    return type(value) in (list, tuple) and len(value) != num and all(map(is_plain, value))


@final
class Rows:
    """A batch that was read once: how many examples it has, and any of them.

    >>> rows = Rows((torch.arange(3), ["a", "b", "c"]))
    >>> rows.num, rows.take([2, 0])
    (3, (tensor([2, 0]), ['c', 'a']))
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.num = _flat_rows(batch)
        self._is_flat = self.num > 0
        if not self._is_flat:
            reader = _reader_of(batch)
            self.num = reader.num
            self._cut = reader.read_batch(batch)

    def take(self, indices: Sequence[int]) -> Any:
        """Return some examples in the given order; neighbours without a copy."""
        selection = Selection(indices)
        return self._take_flat(selection) if self._is_flat else self._cut(selection)

    def split(self, sizes: Sequence[int]) -> list[Any] | None:
        """Return neighbouring parts of the given sizes, cut in one call per tensor.

        Returns None unless the batch is a plain dict, tuple or list that holds only tensors.

        >>> Rows({"x": torch.arange(3)}).split([2, 1])
        [{'x': tensor([0, 1])}, {'x': tensor([2])}]
        """
        if not self._is_flat:
            return None
        is_dict = type(self._batch) is dict
        tensors = self._batch.values() if is_dict else self._batch
        parts = zip(*[tensor.split(sizes) for tensor in tensors], strict=True)
        if is_dict:
            return [dict(zip(self._batch, part, strict=True)) for part in parts]
        return list(map(type(self._batch), parts))

    def _take_flat(self, selection: Selection) -> Any:
        if type(self._batch) is dict:
            return {name: selection.of_tensor(tensor, 0) for name, tensor in self._batch.items()}
        return type(self._batch)([selection.of_tensor(tensor, 0) for tensor in self._batch])


def _flat_rows(batch: Any) -> int:
    """Return the number of rows of a dict, tuple or list that holds only plain tensors, 0 for all other batches."""
    if type(batch) not in (dict, tuple, list):  # a subclass may need to be built in its own way
        return 0
    num = 0
    for value in batch.values() if type(batch) is dict else batch:
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested or value.ndim == 0:
            return 0
        rows = value.shape[0]
        if rows == 0 or num not in (0, rows):
            return 0
        num = rows
    return 0 if type(batch) is list and _may_be_examples(batch) else num


def _may_be_examples(batch: list[Any]) -> bool:
    """Say whether the entries of a list could as well be examples as fields of a batch.

    Entries of several kinds are fields, and so are a few tensors whose rows differ in shape. But many of them are more
    likely examples of different lengths, and three-dimensional ones with 3 or 4 rows images of different sizes.
    """
    if len(batch) < 2 or are_unlike(batch):
        return len(batch) == 1 and not isinstance(batch[0], Tensor | np.ndarray)
    shapes = {tuple(value.shape) for value in batch if isinstance(value, Tensor | np.ndarray)}
    return len(batch) > _MOST_FIELDS or len(shapes) < 2 or _look_like_images(shapes)


def _look_like_images(shapes: set[tuple[int, ...]]) -> bool:
    return all(len(shape) == 3 and shape[0] in (3, 4) for shape in shapes)


def _reader_of(batch: Any) -> Reader:
    """Return what reads the rows of a batch, or say why their number is not known.

    Raises:
        CannotCutError: fields have different numbers of rows, or rows can be counted in two ways.
        ArgumentError: there is nothing to count, or the batch is empty.
    """
    if type(batch) is list and _may_be_examples(batch):
        raise CannotCutError(
            f"the batch is a list of {len(batch)} entries that may be fields or examples; give fields as a tuple, "
            f"tuple(batch), while {_NEEDS_COLLATE}"
        )
    places: dict[int, str] = {}
    for place, rows in _counted(batch, "batch"):
        places.setdefault(rows, place)
    if not places:
        return _reader_of_lists(batch)
    if len(places) > 1:
        found = ", ".join(f"{place} has {rows}" for rows, place in places.items())
        advice = _NEEDS_COLLATE if type(batch) is list else "keep what belongs to no example out of the batch"
        raise CannotCutError(
            f"the fields of a batch must share their first dimension, got {sorted(places)}: {found}; {advice}",
            _num_texts(batch),
        )
    (num,) = places
    if num == 0:
        raise ArgumentError("the batch is empty; give at least one example")
    return Reader(num)


def _counted(value: Any, place: str) -> Iterator[tuple[str, int]]:
    """Yield the places of a batch that count its examples for certain, and their numbers of rows."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield place, num_rows(value)
    elif (rows := own_rows(value)) is not None:
        yield place, rows
    elif (fields := fields_of(value)) is not None:
        for name, item in fields.items():
            yield from _counted(item, place_of(value, name, place))
    elif place == "batch" and type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _counted(item, f"batch[{index}]")


def _num_texts(batch: Any) -> int | None:
    """Return the number of rows of token ids: images and other parts of a text may be more or fewer."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return len(ids) if isinstance(ids, Tensor) and ids.ndim == 2 else None


def _reader_of_lists(batch: Any) -> Reader:
    """Read a batch that has its examples only in lists: their number must fit all lists, in one way."""
    guesses = _guesses(batch, is_batch=True)
    fitting = [num for num in guesses if num > 0 and Reader(num).has_rows_in_batch(batch)]
    columns = [] if not guesses else _columns(batch)
    if columns and not any(all(map(Reader(num).holds_fields, columns)) for num in fitting):
        # Lists of one length are read alike. As some cannot hold fields, all have one entry per example.
        return Reader(len(columns[0]), entries_only=True)
    likely = [num for num in fitting if Reader(num, unlike_are_fields=True).has_rows_in_batch(batch)]
    fitting = likely or fitting
    if len(fitting) == 1:
        return Reader(fitting[0])
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


def _columns(batch: Any) -> list[Any]:
    """Return the lists and tuples of a batch that holds only these, of one length, and single values.

    Lists of single values are left out: ``default_collate`` makes them of texts, whatever the other lists hold.
    """
    fields = fields_of(batch)
    values = [value for value in (batch if fields is None else fields.values()) if not is_plain(value)]
    if any(type(value) not in (list, tuple) for value in values) or len(set(map(len, values))) != 1:
        return []
    return [value for value in values if not all(map(is_plain, value))]


def _guesses(value: Any, *, is_batch: bool = False) -> list[int]:
    """Return every number of examples that the first list may stand for: its own length, or that of its entries."""
    if isinstance(value, Tensor | np.ndarray):
        return [num_rows(value)] if value.ndim else []
    fields = fields_of(value)
    if fields is not None:
        values, own = list(fields.values()), []
    elif type(value) in (list, tuple):
        values, own = value, [] if is_batch or not value else [len(value)]
    else:
        return []
    found = next(filter(None, map(_guesses, values)), [])
    return list(dict.fromkeys(own + found))
