"""The record of a data set: two parts of examples, and what is known about them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ._properties import describe

Task: TypeAlias = Literal["classification", "regression", "language"]
Kind: TypeAlias = Literal["table", "images", "text"]
Part: TypeAlias = Literal["train", "validation"]
Ids: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]

# The id that fills short texts; no token has it.
PADDING = 0


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Split:
    """The examples of one part.

    Args:
        features: float32 of shape ``(N, columns)`` or ``(N, channels, height, width)``; texts are a list of int64 ids,
            one array each, and windows of text one int64 array ``(N, length)``.
        labels: int64 classes ``(N,)``, float32 targets ``(N,)``, or the next ids ``(N, length)`` of windows.
    """

    features: Array | list[Ids]
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def lengths(self) -> Ids | None:
        """Return the tokens of each text, shape ``(N,)``; None for tables and images."""
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
        train: the examples to train on; standardised by their own mean and spread.
        validation: examples kept apart; standardised by the figures of ``train``.
        num_classes: how many classes or tokens there are to choose from; None for regression.
        vocabulary_size: how many ids texts are made of, the padding's included; None for tables and images.
    """

    name: str
    task: Task
    train: Split
    validation: Split
    num_classes: int | None
    vocabulary_size: int | None = None

    @property
    def kind(self) -> Kind:
        """Return what an example is: ``"table"`` for a row of one, ``"images"`` or ``"text"``."""
        if self.vocabulary_size is not None:
            return "text"
        return "table" if np.ndim(self.train.features) == 2 else "images"

    @property
    def lengths(self) -> Ids | None:
        """Return the tokens of each training text, for budgets and groupings; None for tables and images."""
        return self.train.lengths

    def properties(self) -> dict[str, str | int | float | None]:
        """Return what a report compares data sets by, as a JSON object; None where a figure has no meaning.

        ``type``, ``task``, ``num_train``, ``num_validation``; ``dimension``: numbers an example, or the size of the
        vocabulary; ``num_classes``; ``length_median`` and ``length_p99`` in tokens; ``imbalance``: largest class over
        smallest; ``label_noise``: the share of rows whose nearest other row has another label, on 2,000 rows at most.
        The last is at least the error that no classifier avoids, and at most about twice that, where rows are many.
        """
        return describe(self)

    def __repr__(self) -> str:
        return f"Dataset({self.name}: {self.kind}, {self.task}, {len(self.train)} + {len(self.validation)} examples)"
