"""From all examples to a data set: a split that never changes, the scale of the training part, the ids of texts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..._stdlib_source import tokenize
from ...errors import ArgumentError
from .dataset import PADDING, Array, Dataset, Ids, Split, Task

MIN_EXAMPLES = 10
# One example in this many is kept for validation.
VALIDATION_EVERY = 5
SPLIT_SEED = 20_240_229
# In a corpus of a few thousand texts few tokens share an id, and the table of a small model stays small.
VOCABULARY_SIZE = 4096


def split_rows(labels: Array, *, task: Task, limit: int | None = None) -> tuple[Ids, Ids]:
    """Return the rows of the training part and of the validation part, each in a random order that is always the same.

    Every fifth row along the sorted labels is kept for validation, so that every class, or every range of the target,
    has its share in both parts. A class with a single row stays in training.

    Args:
        labels: classes or targets, shape ``(N,)``.
        task: tells which of the two they are.
        limit: the most rows to take, both parts together; None for all.

    >>> train, validation = split_rows(np.repeat([0, 1], 10), task="classification")
    >>> len(train), len(validation), sorted((validation < 10).tolist())
    (16, 4, [False, False, True, True])
    """
    rng = np.random.default_rng(SPLIT_SEED)
    rows = rng.permutation(len(labels))[:limit]
    alone = _is_alone(labels[rows]) if task == "classification" else np.zeros(len(rows), dtype=bool)
    several = rows[~alone]
    several = several[np.argsort(labels[several], kind="stable")]
    kept = np.arange(len(several)) % VALIDATION_EVERY == VALIDATION_EVERY // 2
    if not kept.any():
        raise ArgumentError(
            f"{len(rows)} examples leave none for validation: nearly every class has only one; give more examples"
        )
    train = np.concatenate([rows[alone], several[~kept]])
    return rng.permutation(train), rng.permutation(several[kept])


def assemble(
    name: str,
    features: Array | list[Ids],
    labels: Array,
    *,
    task: Task,
    num_classes: int | None,
    limit: int | None = None,
    vocabulary_size: int | None = None,
) -> Dataset:
    """Return a data set of rows ``(N, columns)``, images ``(N, channels, height, width)``, or the ids of texts."""
    train, validation = split_rows(labels, task=task, limit=limit)
    targets = labels[train].astype(np.int64), labels[validation].astype(np.int64)
    if task == "regression":
        targets = standardise(labels[train], labels[validation])
    inputs: Sequence[Array | list[Ids]]
    if isinstance(features, list):
        inputs = [[features[row] for row in rows] for rows in (train, validation)]
    else:
        inputs = standardise(features[train], features[validation])
    parts = [Split(features=part, labels=target) for part, target in zip(inputs, targets, strict=True)]
    return Dataset(
        name=name,
        task=task,
        train=parts[0],
        validation=parts[1],
        num_classes=num_classes,
        vocabulary_size=vocabulary_size,
    )


def assemble_texts(name: str, texts: Sequence[str], labels: Array, *, max_length: int, **options: Any) -> Dataset:
    """Return a data set of texts, each as the ids of its first ``max_length`` tokens; options as for ``assemble``."""
    ids = [hash_ids(text, max_length=max_length) for text in texts]
    return assemble(name, ids, labels, vocabulary_size=VOCABULARY_SIZE, **options)


def standardise(train: Array, validation: Array) -> tuple[Array, Array]:
    """Return both parts minus the mean of the first, divided by its spread: per column, for images over all pixels.

    >>> train, validation = standardise(np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[4.0, 6.0]]))
    >>> train.tolist(), validation.tolist()
    ([[-1.0, 0.0], [1.0, 0.0]], [[2.0, 1.0]])
    """
    # Pixels at the border are the same in nearly every image: divided by their own spread, the few others would blow
    # up. Tables are scaled in float64, which keeps what differs between large numbers such as dates in seconds.
    axes, dtype = (0, np.float64) if train.ndim <= 2 else (None, np.float32)
    train, validation = train.astype(dtype), validation.astype(dtype)
    mean, spread = train.mean(axis=axes), train.std(axis=axes)
    # A constant column is known by its range: rounding may give it a spread that is almost, but not quite, zero.
    spread = np.where(np.ptp(train, axis=axes) == 0, 1.0, spread).astype(dtype)
    for part in (train, validation):
        part -= mean
        part /= spread
    return train.astype(np.float32, copy=False), validation.astype(np.float32, copy=False)


def _is_alone(labels: Array) -> Array:
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.asarray(counts[places] == 1)


def hash_ids(text: str, *, max_length: int) -> Ids:
    """Return the ids of the first ``max_length`` names, numbers, symbols and line ends of a text.

    Each token is hashed into one of a fixed number of ids, so that there is no vocabulary to learn:
    ``id = 1 + crc32(token) mod (VOCABULARY_SIZE − 1)``, the same in every process, and never the id of the padding.

    >>> ids = hash_ids("a cat and a dog", max_length=4)
    >>> len(ids), bool(ids[0] == ids[3])
    (4, True)
    """
    return np.array([_hash(token) for token in tokenize(text)[:max_length]], dtype=np.int64)


@lru_cache(maxsize=1 << 16)
def _hash(token: str) -> int:
    # A text from JSON may hold half of a surrogate pair, which strict UTF-8 refuses.
    return PADDING + 1 + zlib.crc32(token.encode("utf-8", "surrogatepass")) % (VOCABULARY_SIZE - 1)
