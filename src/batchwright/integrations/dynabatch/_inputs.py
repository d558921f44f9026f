"""Batches cut into pieces, and the results of pieces put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._checks import as_whole
from .._inputs import num_rows, take_rows


def split_batch(batch: Mapping[str, Any], chunk_size: int) -> list[dict[str, Any]]:
    """Split a batch into pieces of at most ``chunk_size`` examples, counted by ``input_ids``.

    >>> [piece["input_ids"].tolist() for piece in split_batch({"input_ids": torch.arange(5)}, 2)]
    [[0, 1], [2, 3], [4]]
    """
    return split_inputs_dict(batch, chunk_size)


def split_inputs_dict(
    batch: Mapping[str, Any], chunk_size: int, batch_size_key: str = "input_ids"
) -> list[dict[str, Any]]:
    """Split the inputs of a model into pieces of at most ``chunk_size`` examples.

    Tensors are cut along their first axis, or their second where that one has the examples; lists of one entry an
    example are cut too. Numbers, tensors without an axis and everything else go whole into every piece.

    Args:
        batch: what a model takes, by name.
        chunk_size: the most examples of a piece.
        batch_size_key: whose length is the number of examples.

    >>> pieces = split_inputs_dict({"input_ids": torch.zeros(3, 2), "scale": torch.tensor(2.0)}, 2)
    >>> [(len(piece["input_ids"]), float(piece["scale"])) for piece in pieces]
    [(2, 2.0), (1, 2.0)]
    """
    size = as_whole("chunk_size", chunk_size, least=1)
    num = num_rows(batch, batch_size_key)
    return [take_rows(batch, list(range(start, min(start + size, num))), num) for start in range(0, num, size)]


def merge_outputs(outputs: list[Tensor], pad_token_id: int) -> Tensor | None:
    """Join token ids of several pieces, shorter ones padded on the right; None for no pieces.

    >>> merge_outputs([torch.tensor([[1, 2]]), torch.tensor([[3]])], pad_token_id=0).tolist()
    [[1, 2], [3, 0]]
    """
    if not outputs:
        return None
    width = max(output.shape[1] for output in outputs)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=pad_token_id) for part in outputs]
    return torch.cat(padded)
