"""The inputs of a model as rows of examples: count them, take some of them, cut their padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError

_IGNORED = -100
# Tensors whose second axis runs along the input, and along the labels of a model with a decoder of its own.
_ALONG_INPUT = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask"}
_ALONG_LABELS = {"labels", "decoder_input_ids", "decoder_attention_mask"}


def num_rows(batch: Mapping[str, Any], key: str) -> int:
    """Return the number of examples: the length of one value."""
    value = batch.get(key)
    if value is None:
        raise KeyError(f"Batch size key `{key}` not found in inputs, only {sorted(batch)}; pass batch_size_key=...")
    return len(value)


def take_rows(batch: Mapping[str, Any], rows: list[int], num: int) -> dict[str, Any]:
    """Return some of the ``num`` examples of a batch; what does not belong to examples is handed on whole.

    >>> take_rows({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "scale": 2.0}, [1, 2], 4)
    {'x': tensor([1, 2]), 'names': ['b', 'c'], 'scale': 2.0}
    """
    return {name: _rows_of(name, value, rows, num) for name, value in batch.items()}


def _rows_of(name: str, value: Any, rows: list[int], num: int) -> Any:
    if isinstance(value, Tensor):
        axis = _row_axis(name, value, num)
        return value if axis is None else _selected(value, rows, axis)
    if isinstance(value, Mapping):
        return {key: _rows_of(f"{name}.{key}", item, rows, num) for key, item in value.items()}
    if isinstance(value, list | tuple) and len(value) == num:
        return type(value)(value[row] for row in rows)
    return value


def _row_axis(name: str, value: Tensor, num: int) -> int | None:
    if value.ndim == 0:
        return None
    # Several kinds of position for each token, (kinds, B, L), even where there are as many examples as kinds.
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


def _selected(value: Tensor, rows: list[int], axis: int) -> Tensor:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return value.narrow(axis, rows[0], len(rows))  # neighbours need no copy
    return value.index_select(axis, torch.tensor(rows, device=value.device))


def trim_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """Cut columns on the right that are padding in every row; where it is not sure what a tensor means, cut nothing.

    >>> batch = {"input_ids": torch.tensor([[5, 0, 0]]), "attention_mask": torch.tensor([[1, 0, 0]])}
    >>> trim_padding(batch)["input_ids"].tolist()
    [[5]]
    """
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not (isinstance(mask, Tensor) and mask.ndim == 2):
        return batch
    width = _last_used(mask != 0)
    has_labels = isinstance(labels, Tensor) and labels.ndim == 2
    target = _last_used(labels != _IGNORED) if isinstance(labels, Tensor) and has_labels else None
    if target is not None and labels is not None and labels.shape[1] == mask.shape[1]:
        # Perhaps one sequence with its labels: they stay side by side.
        width = target = max(width, target)
    cut = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim < 2:
            continue
        if name in _ALONG_INPUT and value.shape == mask.shape:
            cut[name] = value[:, :width].contiguous()  # models call view() on their inputs
        elif name in _ALONG_LABELS and has_labels and labels is not None and value.shape == labels.shape:
            cut[name] = value[:, :target].contiguous()
        elif name in _ALONG_INPUT | _ALONG_LABELS or mask.shape[1] in value.shape[1:]:
            return batch
    return cut


def _last_used(used: Tensor) -> int:
    """Return the number of columns up to the last one that any row uses, at least one."""
    columns = used.any(dim=0).nonzero()
    return int(columns[-1]) + 1 if len(columns) else 1
