"""The inputs of a model: count the examples, take some of them, cut padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._tree import take_rows as take_rows

_IGNORED = -100
# Tensors whose second axis runs along the input, or along the labels of a model with a decoder.
_ALONG_INPUT = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask"}
_ALONG_LABELS = {"labels", "decoder_input_ids", "decoder_attention_mask"}


def num_rows(batch: Mapping[str, Any], key: str) -> int:
    """Return the number of examples: the length of the value under ``key``."""
    value = batch.get(key)
    if value is None:
        raise KeyError(f"Batch size key `{key}` not found in inputs, only {sorted(batch)}; pass batch_size_key=...")
    return len(value)


def trim_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """Cut the columns on the right that are padding in every row.

    If a tensor runs along the input in a way that is not known, nothing is cut.

    >>> import torch
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
        # Labels as wide as the input may belong to the same sequence: both keep the same width.
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
