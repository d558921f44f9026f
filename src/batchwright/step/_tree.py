"""Logical batches of any form: nested tensors, or a list of examples, cut into micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError


def leaves(batch: Any) -> Iterator[Tensor]:
    """Return the tensors of a nested batch, depth first."""
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
    """Return the batch with every tensor replaced; what is no tensor is handed through.

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
    """Return the common first dimension of the tensors, or say which differ.

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
    """Return the examples at some places; neighbours are sliced without a copy.

    ``indices`` is a list, or a range of neighbours; ``num`` the number of examples, where it is known. A list of one
    value an example that holds no tensor, such as texts or names, is cut as the tensors are.

    >>> take({"x": torch.arange(3), "texts": ["a", "b", "c"]}, [0, 2])
    {'x': tensor([0, 2]), 'texts': ['a', 'c']}
    """
    num = num_examples(batch) if num is None else num
    start, stop = indices[0], indices[0] + len(indices)
    if isinstance(indices, range) or indices == list(range(start, stop)):
        return _cut(batch, num, indices, lambda tensor: tensor[start:stop])
    index = torch.tensor(indices)
    return _cut(batch, num, indices, lambda tensor: tensor.index_select(0, index.to(tensor.device, non_blocking=True)))


def split(batch: Any, sizes: Sequence[int]) -> list[Any] | None:
    """Return neighbouring parts of the given sizes, cut in one go; None for a batch that is more than a row of tensors.

    >>> split({"x": torch.arange(3)}, [2, 1])
    [{'x': tensor([0, 1])}, {'x': tensor([2])}]
    """
    if type(batch) not in (dict, tuple, list):  # others may want to be built in their own way
        return None
    values = list(batch.values()) if isinstance(batch, dict) else batch
    if not all(isinstance(value, Tensor) for value in values):
        return None
    parts = zip(*(value.split(sizes) for value in values), strict=True)
    if isinstance(batch, dict):
        return [dict(zip(batch, part, strict=True)) for part in parts]
    return list(map(type(batch), parts))


def _cut(batch: Any, num: int, indices: Sequence[int], function: Callable[[Tensor], Tensor]) -> Any:
    def cut_lists(value: Any) -> Any:
        is_plain = isinstance(value, list) and len(value) == num and next(leaves(value), None) is None
        return [value[index] for index in indices] if is_plain else value

    if isinstance(batch, Mapping):
        batch = {key: cut_lists(value) for key, value in batch.items()} if _has_lists(batch) else batch
    return map_leaves(batch, function)


def _has_lists(batch: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, list) for value in batch.values())
