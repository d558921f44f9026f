"""From places in a data set to the tensors of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ArgumentError
from ._records import PADDING, Array, Dataset, Ids, Part, Split

Batch: TypeAlias = tuple[Tensor, Tensor]
Places: TypeAlias = "Sequence[int] | npt.NDArray[np.signedinteger[Any]]"
Collate: TypeAlias = Callable[[Places], Batch]


def collate_for(dataset: Dataset, *, part: Part = "train", device: torch.device | str = "cpu") -> Collate:
    """Return a function from a list of places in a part to ``(inputs, targets)``, texts padded to the longest.

    It is the ``collate`` of a ``Stepper`` whose examples are places; its ``lengths`` is then ``dataset.lengths.item``.

    Args:
        dataset: the data set.
        part: ``"train"`` or ``"validation"``.
        device: where the tensors go.

    >>> from batchwright.lab.datasets import load
    >>> inputs, targets = collate_for(load("digits"))([0, 5, 9])
    >>> inputs.shape, targets.shape
    (torch.Size([3, 1, 8, 8]), torch.Size([3]))
    """
    if part not in ("train", "validation"):
        raise ArgumentError(f"part must be 'train' or 'validation', got {part!r}")
    split: Split = getattr(dataset, part)
    features, labels = split.features, split.labels

    def collate(places: Places) -> Batch:
        rows = np.asarray(places, dtype=np.int64)
        if not rows.size:
            raise ArgumentError("a batch needs at least one example, got none")
        inputs = _padded([features[row] for row in rows]) if isinstance(features, list) else _taken(features, rows)
        return inputs.to(device), _taken(labels, rows).to(device)

    return collate


def _taken(array: Array, rows: Ids) -> Tensor:
    return torch.from_numpy(array[rows])


def _padded(texts: list[Ids]) -> Tensor:
    lengths = np.array([len(ids) for ids in texts])
    padded = np.full((len(texts), lengths.max()), PADDING, dtype=np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(texts)
    return torch.from_numpy(padded)
