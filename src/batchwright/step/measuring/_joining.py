"""Joining: the examples of several batches as one batch, or None where nobody can tell how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._containers import fields_of, is_plain, rebuilt
from ..._tree import num_examples
from .._settings import Settings
from ..splitting import ExampleBatch, TensorBatch

_CANNOT = object()


def join(batches: Sequence[Any], settings: Settings) -> Any | None:
    """Return one batch of the examples of several in their order, None if they cannot be joined.

    Lists of examples are joined if ``collate`` makes batches of them. Tensors and arrays are joined along their first
    axis if they are alike otherwise, and lists if they have one entry per example. Single values must be equal.
    """
    if len(batches) == 1:
        return batches[0]
    logical = [settings.wrap(batch) for batch in batches]
    if all(isinstance(one, ExampleBatch) for one in logical):
        return [example for batch in batches for example in batch]
    if not all(isinstance(one, TensorBatch) for one in logical):
        return None
    joined = _joined(batches, [one.num_examples for one in logical], is_batch=True)
    if joined is _CANNOT or num_examples(joined) != sum(one.num_examples for one in logical):
        return None
    return joined


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
