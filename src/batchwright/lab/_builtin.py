"""The data sets that scikit-learn brings along: real, small, nothing to download."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._optional import require
from ._assemble import assemble_arrays
from ._records import Dataset

_DIGIT_SIDE = 8


def load_digits(*, limit: int | None = None) -> Dataset:
    """Return 1,797 handwritten digits of 8 × 8 pixels, 10 classes."""
    loaded = _sklearn_datasets().load_digits()
    images = loaded.data.reshape(-1, 1, _DIGIT_SIDE, _DIGIT_SIDE)
    return assemble_arrays("digits", images, loaded.target, task="classification", num_classes=10, limit=limit)


def load_breast_cancer(*, limit: int | None = None) -> Dataset:
    """Return 569 tumours measured in 30 columns, 2 classes."""
    loaded = _sklearn_datasets().load_breast_cancer()
    return assemble_arrays(
        "breast_cancer", loaded.data, loaded.target, task="classification", num_classes=2, limit=limit
    )


def load_wine(*, limit: int | None = None) -> Dataset:
    """Return 178 wines measured in 13 columns, 3 classes."""
    loaded = _sklearn_datasets().load_wine()
    return assemble_arrays("wine", loaded.data, loaded.target, task="classification", num_classes=3, limit=limit)


def load_diabetes(*, limit: int | None = None) -> Dataset:
    """Return 442 patients in 10 columns; the target is the progression of the illness after a year."""
    loaded = _sklearn_datasets().load_diabetes(scaled=False)
    target = np.asarray(loaded.target)
    return assemble_arrays("diabetes", loaded.data, target, task="regression", num_classes=None, limit=limit)


def _sklearn_datasets() -> Any:
    require("sklearn", extra="lab")  # by its short name, for the message
    return require("sklearn.datasets", extra="lab")
