"""Nested batches: walk through their tensors, count their examples, take some of their rows.

One rule says what the rows of a batch of B examples are:

- A tensor or an array has its rows on axis 0, one per example.
- A mapping, a named tuple, a dataclass, and the tuple that is a batch itself hold fields. Every field has B rows.
- A list or a tuple inside a batch holds one entry per example, whatever the entries are, or it holds fields of B rows
  each, such as the layers of a model. If both are possible, fields differ in type or number of axes; entries that look
  alike are refused.
- A list that is a batch itself holds fields, as ``default_collate`` makes it. Entries that look alike could be
  examples, so they are refused: fields are given as a tuple, examples with ``collate=``.
- A single value that is no tensor, such as a number, a text, None or a path, belongs to no example and stays whole.

Everything else is refused: a tensor without axes, a list of another length, packed, nested and compressed sparse
tensors, objects that are none of these and hold more than single values. The error names the place, such as
``batch[1]['boxes']``. ``take_rows`` keeps the same rule for the named inputs of a model, whose examples may also lie on
axis 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ._containers import fields_of, rebuilt
from ._rows import CannotCutError as CannotCutError
from ._rows import Reader, Selection, count_rows, input_axis, may_be_examples


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

    Tensors are cut along their first axis, or along the second if only that one counts the examples; a tensor without
    axes stays whole. Lists and tuples hold one entry per example, or tensors with such an axis each.

    >>> take_rows({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 2.0}, [1, 2], 4)
    {'x': tensor([1, 2]), 'names': ['b', 'c'], 'scale': 2.0}
    """
    reader, selection = Reader(num, input_axis), Selection(rows)
    return {name: reader.read(value, f"batch[{name!r}]")(selection) for name, value in batch.items()}


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
            self.num = count_rows(batch)
            self._cut = Reader(self.num).read_batch(batch)

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
        if num not in (0, rows):
            return 0
        num = rows
    return 0 if type(batch) is list and may_be_examples(batch) else num
