"""From all examples to a data set: the split, fixed for ever, and the scale, taken from the training part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ArgumentError
from ._records import Array, Dataset, Ids, Split, Task

MIN_EXAMPLES = 10
# One example in this many is kept for validation.
VALIDATION_EVERY = 5
SPLIT_SEED = 20_240_229


def split_rows(labels: Array, *, task: Task, limit: int | None = None) -> tuple[Ids, Ids]:
    """Return the rows of the training and of the validation part, each in a random order that is always the same.

    One row in five is kept for validation, counted along the sorted labels, so that every class, or every range of
    the target, has its share in both parts. A class with a single row stays in training.

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
            f"{len(rows)} examples leave none to validate on: nearly every class has a single one; give more examples"
        )
    train = np.concatenate([rows[alone], several[~kept]])
    return rng.permutation(train), rng.permutation(several[kept])


def assemble_arrays(
    name: str, features: Array, labels: Array, *, task: Task, num_classes: int | None, limit: int | None = None
) -> Dataset:
    """Return a data set of rows ``(N, columns)`` or images ``(N, channels, height, width)``."""
    train, validation = split_rows(labels, task=task, limit=limit)
    train_features, validation_features = standardise(features[train], features[validation])
    train_labels, validation_labels = _scaled_labels(labels[train], labels[validation], task)
    return Dataset(
        name=name,
        task=task,
        train=Split(features=train_features, labels=train_labels),
        validation=Split(features=validation_features, labels=validation_labels),
        num_classes=num_classes,
    )


def assemble_texts(
    name: str,
    texts: Sequence[Ids],
    labels: Array,
    *,
    task: Task,
    num_classes: int | None,
    vocabulary_size: int,
    limit: int | None = None,
) -> Dataset:
    """Return a data set of texts, each an array of ids."""
    train, validation = split_rows(labels, task=task, limit=limit)
    train_labels, validation_labels = _scaled_labels(labels[train], labels[validation], task)
    return Dataset(
        name=name,
        task=task,
        train=Split(features=[texts[row] for row in train], labels=train_labels),
        validation=Split(features=[texts[row] for row in validation], labels=validation_labels),
        num_classes=num_classes,
        vocabulary_size=vocabulary_size,
    )


def standardise(train: Array, validation: Array) -> tuple[Array, Array]:
    """Return both parts less the mean of the first, over its spread: of each column, of images over all pixels.

    >>> train, validation = standardise(np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[4.0, 6.0]]))
    >>> train.tolist(), validation.tolist()
    ([[-1.0, 0.0], [1.0, 0.0]], [[2.0, 1.0]])
    """
    # Pixels at the border are the same in nearly every image; a spread of their own would blow up the few others.
    # Of a table float64 keeps what differs between large numbers, such as dates in seconds; pixels need no more than
    # they are kept in.
    axes, dtype = (0, np.float64) if train.ndim <= 2 else (None, np.float32)
    train, validation = train.astype(dtype), validation.astype(dtype)
    mean, spread = train.mean(axis=axes), train.std(axis=axes)
    # The range tells a constant column where rounding gives the spread of one as almost nothing.
    spread = np.where(np.ptp(train, axis=axes) == 0, 1.0, spread).astype(dtype)
    for part in (train, validation):
        part -= mean
        part /= spread
    return train.astype(np.float32, copy=False), validation.astype(np.float32, copy=False)


def _scaled_labels(train: Array, validation: Array, task: Task) -> tuple[Array, Array]:
    if task == "regression":
        return standardise(train, validation)
    return train.astype(np.int64), validation.astype(np.int64)


def _is_alone(labels: Array) -> Array:
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.asarray(counts[places] == 1)
