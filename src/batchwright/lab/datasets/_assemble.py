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
    has its share in both parts. A class with a single row stays in training. A limit takes the first rows of each
    part: no row changes its part with the limit.

    Args:
        labels: classes or targets, shape ``(N,)``.
        task: tells which of the two they are.
        limit: the most rows to take, both parts together; None for all.

    >>> train, validation = split_rows(np.repeat([0, 1], 10), task="classification")
    >>> len(train), len(validation), sorted((validation < 10).tolist())
    (16, 4, [False, False, True, True])
    """
    rng = np.random.default_rng(SPLIT_SEED)
    rows = rng.permutation(len(labels))
    alone = _is_alone(labels[rows]) if task == "classification" else np.zeros(len(rows), dtype=bool)
    several = rows[~alone]
    several = several[np.argsort(labels[several], kind="stable")]
    kept = np.arange(len(several)) % VALIDATION_EVERY == VALIDATION_EVERY // 2
    train = rng.permutation(np.concatenate([rows[alone], several[~kept]]))
    return _limited(train, rng.permutation(several[kept]), labels, task=task, limit=limit)


def _limited(train: Ids, validation: Ids, labels: Array, *, task: Task, limit: int | None) -> tuple[Ids, Ids]:
    """Return the first rows of both parts, one in five for validation, of classes that are trained on."""
    if limit is not None:
        num_train, num_validation = shares(limit, len(train), len(validation))
        if task == "classification":
            validation = validation[np.isin(labels[validation], labels[train[:num_train]])]
        validation = validation[:num_validation]
        train = train[: limit - len(validation)]
    if not len(validation):
        raise ArgumentError(
            f"{len(train)} examples leave none for validation: nearly every class has only one; give more examples"
        )
    return train, validation


def shares(limit: int, most_train: int, most_validation: int) -> tuple[int, int]:
    """Return how many examples of each part a limit takes: one in five for validation, fewer if there are fewer.

    >>> shares(100, 1000, 1000), shares(70_000, 60_000, 10_000), shares(13, 10, 3)
    ((80, 20), (60000, 10000), (10, 3))
    """
    num_train = min(limit - limit // VALIDATION_EVERY, most_train)
    num_validation = min(limit - num_train, most_validation)
    return min(limit - num_validation, most_train), num_validation


def assemble(
    name: str,
    features: Array | list[Ids],
    labels: Array,
    *,
    task: Task,
    num_classes: int | None,
    limit: int | None = None,
    vocabulary_size: int | None = None,
    source: str = "",
) -> Dataset:
    """Return a data set of rows ``(N, columns)``, images ``(N, channels, height, width)``, or the ids of texts."""
    texts = features if isinstance(features, list) else _as_rows(features)
    train, validation = split_texts(texts, labels, task=task, limit=limit, what=_what(features))
    if task == "regression":
        targets = standardise(labels[train], labels[validation])
    else:
        targets = labels[train].astype(np.int64), labels[validation].astype(np.int64)
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
        source=source,
    )


def assemble_texts(name: str, texts: Sequence[str], labels: Array, *, max_length: int, **options: Any) -> Dataset:
    """Return a data set of texts, each as the ids of its first ``max_length`` tokens; options as for ``assemble``."""
    ids = [hash_ids(text, max_length=max_length) for text in texts]
    return assemble(name, ids, labels, vocabulary_size=VOCABULARY_SIZE, **options)


def _as_rows(features: Array) -> Array:
    """Return one row of numbers per example, in which equal numbers have equal bytes: −0 becomes 0."""
    return np.ascontiguousarray(features.reshape(len(features), -1) + 0.0)


def _what(features: Array | list[Ids]) -> str:
    if isinstance(features, list):
        return "texts"
    return "rows" if features.ndim <= 2 else "images"


def split_texts(
    texts: Sequence[Array] | Array, labels: Array, *, task: Task, limit: int | None = None, what: str = "texts"
) -> tuple[Ids, Ids]:
    """Return rows as ``split_rows`` does, with equal texts in the same part: a text learnt by heart proves nothing.

    The same holds for rows of a table and for images. Without equal ones the parts are those of ``split_rows``.

    >>> texts = [np.array([i // 2]) for i in range(40)]  # each twice
    >>> train, validation = split_texts(texts, np.arange(40) % 4 // 2, task="classification")
    >>> len(train), len(validation), set(train // 2) & set(validation // 2)
    (32, 8, set())
    """
    rows_of: dict[bytes, list[int]] = {}
    for row, ids in enumerate(texts):
        rows_of.setdefault(ids.tobytes(), []).append(row)
    if len(rows_of) < MIN_EXAMPLES:
        raise ArgumentError(
            f"different {what} in {len(texts)} rows: {len(rows_of)}; validation needs {what} that training does not "
            f"hold, and the lab at least {MIN_EXAMPLES} of them in all: give other {what}"
            f"{', or a larger max_length if they begin alike' if what == 'texts' else ', or more columns'}"
        )
    groups = list(rows_of.values())
    parts = split_rows(labels[[rows[0] for rows in groups]], task=task)
    train, validation = (np.array([row for place in part for row in groups[place]], dtype=np.int64) for part in parts)
    return _limited(train, validation, labels, task=task, limit=limit)


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
