"""Dataset: two parts of examples, the figures that reports compare data sets by, and how hard each example is."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

Task: TypeAlias = Literal["classification", "regression", "language"]
Kind: TypeAlias = Literal["table", "images", "text", "language"]
Part: TypeAlias = Literal["train", "validation"]
Ids: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]
Scores: TypeAlias = npt.NDArray[np.float64]

# The id that fills up short texts; no token has it.
PADDING = 0
# Distances between this many rows take a tenth of a second.
_MAX_ROWS = 2000


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Split:
    """The examples of one part.

    Args:
        features: float32 of shape ``(N, columns)`` or ``(N, channels, height, width)``; a list of int64 arrays of ids
            for texts; one int64 array ``(N, length)`` for windows of text.
        labels: int64 classes ``(N,)``, float32 targets ``(N,)``, or the next ids ``(N, length)`` of windows.
    """

    features: Array | list[Ids]
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def lengths(self) -> Ids | None:
        """Return how many tokens each text has, shape ``(N,)``; None for tables and images."""
        if isinstance(self.features, list):
            return np.array([len(ids) for ids in self.features], dtype=np.int64)
        if np.issubdtype(self.features.dtype, np.integer):
            return np.full(len(self), self.features.shape[1], dtype=np.int64)
        return None

    def __repr__(self) -> str:
        return f"Split({len(self)} examples)"


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """A data set, split once and for all: the split does not depend on the seed of a training run.

    Args:
        name: what reports call it.
        task: ``"classification"``, ``"regression"`` or ``"language"``, which predicts the next token.
        train: the examples to train on, standardised by their own mean and spread.
        validation: the examples kept apart, standardised by the mean and spread of ``train``.
        num_classes: how many classes or tokens there are to choose from; None for regression.
        vocabulary_size: how many ids texts are made of, including the id of the padding; None for tables and images.
        source: where the examples come from, in words.
        num_signal_columns: how many columns count, the first ones, where all others of a table are known to be noise.
    """

    name: str
    task: Task
    train: Split
    validation: Split
    num_classes: int | None
    vocabulary_size: int | None = None
    source: str = ""
    num_signal_columns: int | None = None

    @property
    def kind(self) -> Kind:
        """Return what an example is: ``"table"``, ``"images"``, ``"text"``, or ``"language"`` for a window of text."""
        if self.task == "language":
            return "language"
        if self.vocabulary_size is not None:
            return "text"
        return "table" if np.ndim(self.train.features) == 2 else "images"

    @property
    def lengths(self) -> Ids | None:
        """Return how many tokens each training text has, for budgets and groupings; None for tables and images."""
        return self.train.lengths

    @cached_property
    def digest(self) -> str:
        """Return a fingerprint of all examples and labels: equal for the same data, another one after any change.

        >>> from batchwright.lab.datasets import load
        >>> load("wine").digest == load("wine").digest, load("wine").digest == load("wine", limit=100).digest
        (True, False)
        """
        found = hashlib.blake2b(repr((self.task, self.num_classes)).encode(), digest_size=16)
        for part in (self.train, self.validation):
            blocks = part.features if isinstance(part.features, list) else [part.features]
            for array in (*blocks, part.labels):
                found.update(f"{array.dtype}{array.shape}".encode())
                found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    @property
    def num_examples(self) -> int:
        """Return how many examples both parts have together."""
        return len(self.train) + len(self.validation)

    @property
    def dimension(self) -> int:
        """Return how many numbers an example has; for texts, how many ids they are made of."""
        features = self.train.features
        if self.vocabulary_size is not None or isinstance(features, list):
            return int(self.vocabulary_size or 0)
        return int(np.prod(features.shape[1:]))

    def describe(self) -> str:
        """Return one sentence: kind, task, size, dimension, and where the data set comes from.

        >>> from batchwright.lab.datasets import load
        >>> print(load("wine").describe())
        wine: table, classification, 142 + 36 examples, dimension 13, 3 classes; from scikit-learn
        """
        classes = "" if self.task != "classification" else f", {self.num_classes} classes"
        source = f"; from {self.source}" if self.source else ""
        sizes = f"{len(self.train):,} + {len(self.validation):,} examples, dimension {self.dimension:,}"
        return f"{self.name}: {self.kind}, {self.task}, {sizes}{classes}{source}"

    def properties(self) -> dict[str, str | int | float | None]:
        """Return the figures that reports compare data sets by, as a JSON object; None where a figure has no meaning.

        ``type``, ``task``, ``num_train``, ``num_validation``; ``dimension``: numbers per example, or the
        size of the vocabulary; ``num_classes``; ``length_median`` and ``length_p99`` in tokens; ``imbalance``: the
        largest class over the smallest; ``label_noise``: the share of rows whose nearest other row has another label,
        on at most 2,000 rows and only on columns that count, where those are known. With many rows it lies between the
        error that no classifier avoids and about twice that error.
        """
        is_classification = self.task == "classification"
        median, p99 = length_spread(self.lengths)
        return {
            "type": self.kind,
            "task": self.task,
            "num_train": len(self.train),
            "num_validation": len(self.validation),
            "dimension": self.dimension,
            "num_classes": self.num_classes,
            "length_median": median,
            "length_p99": p99,
            "imbalance": imbalance(self.train.labels) if is_classification else None,
            "label_noise": _label_noise(self) if is_classification else None,
        }

    def __repr__(self) -> str:
        return f"Dataset({self.name}: {self.kind}, {self.task}, {len(self.train)} + {len(self.validation)} examples)"


def length_spread(lengths: Ids | None) -> tuple[float | None, float | None]:
    """Return the median length, and the length that 99 of 100 texts do not exceed.

    >>> length_spread(np.array([1, 2, 3]))
    (2.0, 3.0)
    """
    if lengths is None:
        return None, None
    return float(np.median(lengths)), float(np.percentile(lengths, 99, method="higher"))


def imbalance(labels: Ids) -> float:
    """Return the size of the largest class divided by the size of the smallest one that occurs.

    >>> imbalance(np.array([0, 0, 0, 2, 2, 2, 2, 2, 2]))
    2.0
    """
    counts = np.unique(labels, return_counts=True)[1]
    return float(counts.max() / counts.min())


def nearest_disagreement(rows: Array, labels: Ids) -> float:
    """Return the share of rows whose nearest other row, by squared distance, has another label.

    >>> nearest_disagreement(np.array([[0.0], [1.0], [10.0], [11.5]]), np.array([0, 0, 0, 1]))
    0.5
    """
    # |a - b|^2 = |a|^2 + |b|^2 - 2ab: one matrix product in place of all pairs of rows.
    squares = (rows**2).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * rows @ rows.T
    np.fill_diagonal(distances, math.inf)
    return float((labels[distances.argmin(axis=1)] != labels).mean())


def _label_noise(dataset: Dataset) -> float | None:
    """Return the disagreement of the first training rows, which are in random order; None for texts."""
    features = dataset.train.features
    if isinstance(features, list):
        return None
    rows = features[:_MAX_ROWS].reshape(min(len(features), _MAX_ROWS), -1)[:, : dataset.num_signal_columns]
    return nearest_disagreement(rows.astype(np.float64), dataset.train.labels[:_MAX_ROWS])


def difficulty_of(dataset: Dataset) -> Scores:
    """Return a score for every training example, larger for harder ones: the order of a curriculum.

    - texts of different lengths: the length;
    - windows of text, all of the same length: the mean rarity of their tokens, ``−log frequency``;
    - tables and images with classes: the distance to the mean of the example's class;
    - regression: the distance to the mean of all examples.

    >>> from batchwright.lab.datasets import load
    >>> scores = difficulty_of(load("wine"))
    >>> scores.shape, bool(scores.min() > 0)
    ((142,), True)
    """
    features, lengths = dataset.train.features, dataset.lengths
    if lengths is not None and len(np.unique(lengths)) > 1:
        return lengths.astype(np.float64)
    if dataset.vocabulary_size is not None:
        return rarity(np.stack(features) if isinstance(features, list) else features)
    assert not isinstance(features, list)
    rows = features.reshape(len(features), -1).astype(np.float64)
    groups = dataset.train.labels if dataset.task == "classification" else np.zeros(len(rows), dtype=np.int64)
    return distance_to_mean(rows, groups)


def rarity(ids: Ids) -> Scores:
    """Return the mean of ``−log frequency`` over the tokens of each row.

    >>> rarity(np.array([[0, 0], [0, 1]])).round(3).tolist()  # 0 is 3 of 4 tokens
    [0.288, 0.837]
    """
    counts = np.bincount(ids.ravel()).astype(np.float64)
    surprise = -np.log(np.maximum(counts, 1) / counts.sum())
    return np.asarray(surprise[ids].mean(axis=1))


def distance_to_mean(rows: Array, groups: Ids) -> Scores:
    """Return the distance of each row to the mean row of its group.

    >>> distance_to_mean(np.array([[0.0], [4.0], [9.0]]), np.array([0, 0, 1])).tolist()
    [2.0, 2.0, 0.0]
    """
    names, places = np.unique(groups, return_inverse=True)
    means = np.stack([rows[places == place].mean(axis=0) for place in range(len(names))])
    return np.asarray(np.linalg.norm(rows - means[places], axis=1))
