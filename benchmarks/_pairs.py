"""Pairs of sentences as lengths and random tokens: what a training benchmark needs of a corpus."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

IntArray = np.ndarray[Any, np.dtype[np.int64]]
PAD, IGNORED = 1, -100
FIRST_TOKEN = 5  # those below have a meaning


def make_lengths(num: int, *, longest: int = 512, seed: int = 0) -> IntArray:
    """Return (source, target) lengths: short sentences with a heavy tail, as translation corpora have."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(np.log(16), 0.95, num))
    target = source * np.exp(rng.normal(0, 0.25, num))
    return np.clip(np.round(np.stack([source, target], axis=1)), 3, longest).astype(np.int64)


def read_lengths(path: Path, num: int) -> IntArray:
    """Return ``num`` of the pairs of a .npy file ``(N, 2)``, drawn at random with a fixed seed."""
    found = np.load(path)
    if found.ndim != 2 or found.shape[1] != 2 or len(found) < num:
        raise SystemExit(f"{path} must hold at least {num} pairs of lengths, got an array of shape {found.shape}")
    chosen = np.random.default_rng(0).permutation(len(found))[:num]
    return np.clip(found[chosen], 1, 512).astype(np.int64)


def digest(lengths: IntArray) -> str:
    """Return a short name for exactly these lengths."""
    return hashlib.sha256(np.ascontiguousarray(lengths, dtype="<i8").tobytes()).hexdigest()[:16]


@final
class Pairs:
    """Examples of given lengths with random tokens, padded to the longest of a batch.

    Args:
        lengths: ``(N, 2)``.
        vocabulary: tokens are below this.
    """

    def __init__(self, lengths: IntArray, vocabulary: int) -> None:
        self.lengths = lengths
        # A text begins anywhere in one long row of random tokens.
        self._tokens = np.random.default_rng(1).integers(FIRST_TOKEN, vocabulary, 2**16 + 1024)

    def collate(self, indices: IntArray, shape: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        """Return the arguments of a sequence-to-sequence model.

        Args:
            indices: the examples.
            shape: (items, source, target) to pad to; further rows are copies of the first, without labels.
        """
        num, *widths = shape or shape_of(indices, self.lengths)
        filled = np.concatenate([indices, np.repeat(indices[:1], num - len(indices))])
        (source, target) = self.lengths[filled].T
        ids = self._rows(filled, source, widths[0], fill=PAD)
        labels = self._rows(filled + 7, target, widths[1], fill=IGNORED)
        labels[len(indices) :] = IGNORED
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy((ids != PAD).astype(np.int64)),
            "labels": torch.from_numpy(labels),
        }

    def _rows(self, starts: IntArray, lengths: IntArray, width: int, *, fill: int) -> IntArray:
        places = np.arange(width)
        tokens = self._tokens[(starts % 2**16)[:, None] + places]
        return np.where(places < lengths[:, None], tokens, fill)


def shape_of(indices: IntArray, lengths: IntArray) -> tuple[int, ...]:
    """Return (items, padded length per axis) of a batch."""
    return (len(indices), *lengths[indices].max(axis=0).tolist())
