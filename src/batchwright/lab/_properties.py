"""The figures that data sets are compared by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ._records import Array, Dataset, Ids

# Distances between so many rows take a tenth of a second.
_MAX_ROWS = 2000


def describe(dataset: Dataset) -> dict[str, str | int | float | None]:
    """Return the properties of a data set; see ``Dataset.properties``."""
    is_classification = dataset.task == "classification"
    median, p99 = length_spread(dataset.lengths)
    return {
        "type": dataset.kind,
        "task": dataset.task,
        "num_train": len(dataset.train),
        "num_validation": len(dataset.validation),
        "dimension": _dimension(dataset),
        "num_classes": dataset.num_classes,
        "length_median": median,
        "length_p99": p99,
        "imbalance": imbalance(dataset.train.labels) if is_classification else None,
        "label_noise": _label_noise(dataset) if is_classification else None,
    }


def length_spread(lengths: Ids | None) -> tuple[float | None, float | None]:
    """Return the median length and the one that 99 of 100 texts do not exceed.

    >>> length_spread(np.array([1, 2, 3]))
    (2.0, 3.0)
    """
    if lengths is None:
        return None, None
    return float(np.median(lengths)), float(np.percentile(lengths, 99, method="higher"))


def imbalance(labels: Ids) -> float:
    """Return the size of the largest class over that of the smallest that is there.

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
    squares = (rows**2).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * rows @ rows.T
    np.fill_diagonal(distances, math.inf)
    return float((labels[distances.argmin(axis=1)] != labels).mean())


def _label_noise(dataset: Dataset) -> float | None:
    """Return the disagreement of some training rows, which stand in a random order; None for texts."""
    features = dataset.train.features
    if isinstance(features, list):
        return None
    rows = features[:_MAX_ROWS].reshape(min(len(features), _MAX_ROWS), -1)
    return nearest_disagreement(rows.astype(np.float64), dataset.train.labels[:_MAX_ROWS])


def _dimension(dataset: Dataset) -> int:
    features = dataset.train.features
    if dataset.vocabulary_size is not None or isinstance(features, list):
        return int(dataset.vocabulary_size or 0)
    return int(np.prod(features.shape[1:]))
