"""A corpus as token ids in one file, with the orders of peers, and batches made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from batchwright.step.filler import ROW_WEIGHT

IntArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Batch: TypeAlias = "dict[str, Tensor]"

START, PAD, END, UNKNOWN, IGNORED = 0, 1, 2, 3, -100


@final
@dataclass(frozen=True)
class Texts:
    """Token ids, one text after another; text ``i`` is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: np.ndarray[Any, Any]
    offsets: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Texts:
        """Join texts."""
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        return cls(np.concatenate([np.asarray(row, dtype=np.uint16) for row in rows]), offsets)

    @property
    def lengths(self) -> IntArray:
        """Return the tokens of each text."""
        return np.diff(self.offsets)

    def rows(self, indices: IntArray, shape: tuple[int, int], fill: int) -> IntArray:
        """Return texts as rows of one width, further rows all ``fill``."""
        lengths = np.zeros(shape[0], dtype=np.int64)
        lengths[: len(indices)] = self.lengths[indices]
        starts = np.zeros(shape[0], dtype=np.int64)
        starts[: len(indices)] = self.offsets[indices]
        places = np.arange(shape[1])
        is_real = places < lengths[:, None]
        found = np.full(shape, fill, dtype=np.int64)
        found[is_real] = self.ids[(starts[:, None] + places)[is_real]]
        return found


class Part(NamedTuple):
    """What runs at once: examples, and the static shape they are padded to, None for their own longest lengths."""

    indices: IntArray
    shape: tuple[int, ...] | None = None


Update: TypeAlias = "tuple[Part, ...]"  # one part, or several whose gradients are added


class Made(NamedTuple):
    """One part as tensors, with what it counts."""

    batch: Batch
    num_labels: int
    num_examples: int
    real_tokens: int
    padded_tokens: int


@final
@dataclass(frozen=True)
class Corpus:
    """Texts of a task; the last ``num_held_out`` are not trained on.

    Args:
        task: ``"translation"`` with two columns, ``"decoder"`` with one.
        columns: the texts.
        vocabulary: number of token ids.
        num_held_out: texts at the end that the validation loss is taken on.
        orders: updates of an epoch that other packages planned, by ``name/seed/epoch``.
    """

    task: str
    columns: tuple[Texts, ...]
    vocabulary: int
    num_held_out: int
    orders: Mapping[str, list[Update]] = field(default_factory=dict)

    @property
    def lengths(self) -> IntArray:
        """Return ``(N, axes)`` of the texts that are trained on."""
        return self.all_lengths[: -self.num_held_out]

    @property
    def all_lengths(self) -> IntArray:
        """Return ``(N, axes)`` of all texts."""
        return np.stack([texts.lengths for texts in self.columns], axis=1)

    def make(self, part: Part) -> Made:
        """Pad a part and count it; rows that fill a static shape up are copies of the first, without labels."""
        indices, lengths = part.indices, self.all_lengths_of(part.indices)
        shape = part.shape or (len(indices), *lengths.max(axis=0).tolist())
        if len(indices) > shape[0] or (lengths.max(axis=0) > shape[1:]).any():
            raise ValueError(f"{len(indices)} texts of {lengths.max(axis=0).tolist()} tokens do not fit {shape}")
        batch = self._tensors(indices, shape)
        if part.shape is not None:
            weight = torch.zeros(shape[0])
            weight[: len(indices)] = 1
            batch[ROW_WEIGHT] = weight
        num_labels = int(lengths[:, -1].sum()) - (len(indices) if self.task == "decoder" else 0)
        return Made(batch, num_labels, len(indices), int(lengths.sum()), shape[0] * sum(shape[1:]))

    def all_lengths_of(self, indices: IntArray) -> IntArray:
        """Return ``(n, axes)`` of some texts."""
        return np.stack([texts.offsets[indices + 1] - texts.offsets[indices] for texts in self.columns], axis=1)

    def _tensors(self, indices: IntArray, shape: tuple[int, ...]) -> Batch:
        filled = np.concatenate([indices, np.repeat(indices[:1], shape[0] - len(indices))])
        ids = self.columns[0].rows(filled, (shape[0], shape[1]), PAD)
        labels = self.columns[-1].rows(indices, (shape[0], shape[-1]), IGNORED)
        lengths = self.all_lengths_of(filled)[:, :1]
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy((np.arange(shape[1]) < lengths).astype(np.int64)),
            "labels": torch.from_numpy(labels),
        }

    def held_out(self, max_tokens: int) -> list[Made]:
        """Return the validation batches, sorted by length, of at most about ``max_tokens`` padded tokens."""
        lengths = self.all_lengths
        places = np.arange(len(lengths) - self.num_held_out, len(lengths))
        order = places[np.argsort(lengths[places].sum(axis=1), kind="stable")]
        batches: list[Made] = []
        while len(order):
            longest = np.maximum.accumulate(lengths[order], axis=0).sum(axis=1)
            num = max(1, int((np.arange(1, len(order) + 1) * longest <= max_tokens).sum()))
            batches.append(self.make(Part(order[:num])))
            order = order[num:]
        return batches

    def save(self, path: Path) -> None:
        """Write one compressed file of arrays."""
        arrays: dict[str, Any] = {
            "task": self.task, "vocabulary": self.vocabulary, "num_held_out": self.num_held_out,
        }  # fmt: skip
        for place, texts in enumerate(self.columns):
            arrays |= {f"ids.{place}": texts.ids, f"offsets.{place}": texts.offsets}
        for name, updates in self.orders.items():
            parts = [part.indices for update in updates for part in update]
            arrays[f"order.{name}.indices"] = np.concatenate(parts).astype(np.uint16)
            arrays[f"order.{name}.sizes"] = np.array([len(part) for part in parts], dtype=np.uint16)
            arrays[f"order.{name}.parts"] = np.array([len(update) for update in updates], dtype=np.uint16)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what ``save`` wrote."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        columns = tuple(
            Texts(arrays[f"ids.{place}"], arrays[f"offsets.{place}"]) for place in range(2) if f"ids.{place}" in arrays
        )
        names = [name[len("order.") : -len(".indices")] for name in arrays if name.endswith(".indices")]
        orders = {
            name: _updates(*(arrays[f"order.{name}.{key}"] for key in ("indices", "sizes", "parts"))) for name in names
        }
        return cls(str(arrays["task"]), columns, int(arrays["vocabulary"]), int(arrays["num_held_out"]), orders)


def _updates(indices: IntArray, sizes: IntArray, parts: IntArray) -> list[Update]:
    cuts = np.split(indices.astype(np.int64), np.cumsum(sizes.astype(np.int64))[:-1])
    ends = np.cumsum(parts.astype(np.int64))
    return [tuple(Part(cut) for cut in cuts[end - num : end]) for end, num in zip(ends, parts.tolist(), strict=True)]
