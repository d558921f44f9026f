"""Nested batches of tensors: walk through them, count their examples, take or split examples.

Two kinds of batch are cut into examples:

- ``take`` and ``split`` cut any nesting of tensors. The first axis of every tensor counts the examples.
- ``take_rows`` cuts the named inputs of a model. The axis of the examples is found per tensor, and a list or tuple with
  one entry per example is indexed, whatever it holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .errors import ArgumentError

# select(tensor, axis): the chosen examples of one tensor
_Select: TypeAlias = Callable[[Tensor, int], Tensor]


def leaves(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch, depth first.

    >>> [tensor.tolist() for tensor in leaves({"x": torch.arange(2), "more": (torch.arange(1), "a")})]
    [[0, 1], [0]]
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for item in dataclasses.fields(batch):
            yield from leaves(getattr(batch, item.name))


def map_leaves(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with every tensor replaced; all other values stay as they are.

    >>> map_leaves({"x": torch.arange(4), "name": "a"}, lambda x: x[:2])
    {'x': tensor([0, 1]), 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _rebuilt_mapping(batch, {key: map_leaves(value, function) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_leaves(value, function) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {item.name: map_leaves(getattr(batch, item.name), function) for item in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **values)
    return batch


def _rebuilt_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    try:
        return type(batch)(values)  # type: ignore[call-arg]  # BatchEncoding and the like take a dict
    except TypeError:
        return values


def num_examples(batch: Any) -> int:
    """Return the first dimension that all tensors share, or say which dimensions differ.

    >>> num_examples({"x": torch.zeros(3, 5), "y": torch.zeros(3)})
    3
    """
    sizes = []
    for tensor in leaves(batch):
        if tensor.ndim == 0:
            raise ArgumentError(
                "a tensor of the batch has no dimension to split on; keep scalars out of the batch or as Python numbers"
            )
        sizes.append(len(tensor))
    if not sizes:
        raise ArgumentError(f"the batch holds no tensor, got {type(batch).__name__}; a list of examples needs collate=")
    if len(set(sizes)) > 1:
        raise ArgumentError(
            f"the tensors of a batch must share their first dimension, got {sorted(set(sizes))}; "
            "put other values outside the batch"
        )
    if sizes[0] == 0:
        raise ArgumentError("the batch is empty; give at least one example")
    return sizes[0]


def take(batch: Any, indices: Sequence[int], *, num: int | None = None) -> Any:
    """Return some examples of a nested batch; neighbours are sliced without a copy.

    In a mapping, a list that holds one value per example and no tensor, such as texts or names, is cut too.

    Args:
        batch: nested tensors with the examples on their first axis.
        indices: a list, or a range of neighbours.
        num: the number of examples, where it is known.

    >>> take({"x": torch.arange(3), "texts": ["a", "b", "c"]}, [0, 2])
    {'x': tensor([0, 2]), 'texts': ['a', 'c']}
    """
    num = num_examples(batch) if num is None else num
    select = _selector(indices)
    if isinstance(batch, Mapping) and any(isinstance(value, list) for value in batch.values()):
        batch = {key: _cut_plain_list(value, indices, num) for key, value in batch.items()}
    return map_leaves(batch, lambda tensor: select(tensor, 0))


def _cut_plain_list(value: Any, indices: Sequence[int], num: int) -> Any:
    is_plain = isinstance(value, list) and len(value) == num and next(leaves(value), None) is None
    return [value[index] for index in indices] if is_plain else value


def split(batch: Any, sizes: Sequence[int]) -> list[Any] | None:
    """Return neighbouring parts of the given sizes, cut in one call per tensor.

    Returns None unless the batch is a plain dict, tuple or list that holds only tensors.

    >>> split({"x": torch.arange(3)}, [2, 1])
    [{'x': tensor([0, 1])}, {'x': tensor([2])}]
    """
    if type(batch) not in (dict, tuple, list):  # a subclass may need to be built in its own way
        return None
    values = list(batch.values()) if isinstance(batch, dict) else batch
    if not all(isinstance(value, Tensor) for value in values):
        return None
    parts = zip(*(value.split(sizes) for value in values), strict=True)
    if isinstance(batch, dict):
        return [dict(zip(batch, part, strict=True)) for part in parts]
    return list(map(type(batch), parts))


def take_rows(batch: Mapping[str, Any], rows: Sequence[int], num: int) -> dict[str, Any]:
    """Return some of the ``num`` examples of a model's inputs; values that belong to no example stay whole.

    Tensors are cut along their first axis, or along the second if only that one counts the examples. Lists and tuples
    with ``num`` entries are indexed. Tensors without an axis and all other values are kept.

    >>> take_rows({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 2.0}, [1, 2], 4)
    {'x': tensor([1, 2]), 'names': ['b', 'c'], 'scale': 2.0}
    """
    select = _selector(rows)
    return {name: _rows_of(name, value, rows, num, select) for name, value in batch.items()}


def _rows_of(name: str, value: Any, rows: Sequence[int], num: int, select: _Select) -> Any:
    if isinstance(value, Tensor):
        axis = _row_axis(name, value, num)
        return value if axis is None else select(value, axis)
    if isinstance(value, Mapping):
        return {key: _rows_of(f"{name}.{key}", item, rows, num, select) for key, item in value.items()}
    if isinstance(value, list | tuple) and len(value) == num:
        return type(value)(value[row] for row in rows)
    return value


def _row_axis(name: str, value: Tensor, num: int) -> int | None:
    if value.ndim == 0:
        return None
    # Positions of several kinds have shape (kinds, B, L). The name decides, as there may be as many examples as kinds.
    if name.endswith("position_ids") and value.ndim == 3 and value.shape[1] == num:
        return 1
    if value.shape[0] == num:
        return 0
    if value.ndim > 1 and value.shape[1] == num:
        return 1
    raise ArgumentError(
        f"the tensor {name!r} of shape {tuple(value.shape)} cannot be cut into pieces of {num} examples; its first or "
        "second axis must be the examples"
    )


def _selector(indices: Sequence[int]) -> _Select:
    """Return what selects examples along an axis: a view for neighbours, a copy for others."""
    start, num = indices[0], len(indices)
    if isinstance(indices, range) or indices == list(range(start, start + num)):
        return lambda tensor, axis: tensor.narrow(axis, start, num)
    index = torch.tensor(indices)
    return lambda tensor, axis: tensor.index_select(axis, index.to(tensor.device, non_blocking=True))
