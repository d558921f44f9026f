"""How hard an example is, from the data alone: the order of a curriculum."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._records import Array, Dataset, Ids

Scores = npt.NDArray[np.float64]


def difficulty_of(dataset: Dataset) -> Scores:
    """Return a score for every training example, larger is harder.

    - texts of different lengths: the length;
    - windows of text, all of a length: the mean rarity of their tokens, ``−log frequency``;
    - tables and images with classes: the distance to the mean of the example's class;
    - with a number to predict: the distance to the mean of all examples.

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
