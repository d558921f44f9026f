"""The settings of a training run, and what a strategy is told about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from .._checks import as_number, as_whole
from ..errors import ArgumentError

OptimizerName: TypeAlias = Literal["sgd", "adam"]
LrFactor: TypeAlias = Callable[[int], float]

# An epoch has at least this many batches of the largest size, and about this many of the base size.
MIN_BATCHES = 4
BASE_BATCHES = 64
# The base size is a power of two in this range; the largest is so many times the base.
BASE_SIZES = (8, 32)
LARGEST_FACTOR = 16


@final
@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every strategy has in common: the examples, the optimizer, the bounds of the batch, the decay.

    Args:
        num_examples: examples that a run trains on, the same for every strategy.
        base_size: the batch size of the baseline, which the learning rate is meant for.
        min_size: the least batch size.
        max_size: the largest batch size.
        optimizer: ``"sgd"`` with momentum, or ``"adam"``.
        lr: the learning rate at the base size.
        momentum: of SGD.
        decay_at: where a decaying rate is divided, as shares of ``num_examples``, ascending.
        decay_factor: what it is divided by each time.
        num_evaluations: validations after the one before training.

    >>> RunSettings(num_examples=1000, base_size=8, min_size=4, max_size=64).decay(750)
    0.0625
    """

    num_examples: int
    base_size: int
    min_size: int
    max_size: int
    optimizer: OptimizerName = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    decay_at: tuple[float, ...] = (0.5, 0.75)
    decay_factor: float = 4.0
    num_evaluations: int = 12

    def __post_init__(self) -> None:
        as_whole("num_examples", self.num_examples, least=1)
        as_whole("min_size", self.min_size, least=1)
        as_whole("base_size", self.base_size, least=self.min_size)
        as_whole("max_size", self.max_size, least=self.base_size)
        as_whole("num_evaluations", self.num_evaluations, least=1)
        as_number("lr", self.lr, above=0)
        as_number("decay_factor", self.decay_factor, least=1)
        if self.optimizer not in get_args(OptimizerName):
            raise ArgumentError(f"optimizer must be 'sgd' or 'adam', got {self.optimizer!r}")
        if not 0 <= self.momentum < 1:
            raise ArgumentError(f"momentum must be from 0 to below 1, got {self.momentum!r}")
        if list(self.decay_at) != sorted(self.decay_at) or not all(0 < share < 1 for share in self.decay_at):
            raise ArgumentError(f"decay_at must be ascending shares above 0 and below 1, got {self.decay_at!r}")

    @classmethod
    def fit(cls, num_train: int, *, num_epochs: int, **options: Any) -> RunSettings:
        """Return settings whose sizes suit a number of training examples; ``options`` are kept as they are.

        The base size is the largest power of two that leaves 64 batches an epoch, from 8 to 32; the largest is 16 times
        that, with at least 4 batches an epoch; the least is half the base.

        >>> settings = RunSettings.fit(1438, num_epochs=10)
        >>> settings.num_examples, settings.min_size, settings.base_size, settings.max_size
        (14380, 8, 16, 256)
        """
        base = int(options.pop("base_size", _base_size(num_train)))
        sizes = {
            "base_size": base,
            "min_size": max(1, base // 2),
            "max_size": max(base, min(LARGEST_FACTOR * base, _power_of_two(num_train // MIN_BATCHES))),
        }
        num_examples = as_whole("num_epochs", num_epochs, least=1) * num_train
        return cls(**{"num_examples": num_examples, **sizes, **options})

    def decay(self, examples: int) -> float:
        """Return the factor of a rate that is divided at each milestone, after so many examples."""
        passed = sum(examples >= round(share * self.num_examples) for share in self.decay_at)
        return self.decay_factor**-passed

    def check_size_of(self, num_train: int) -> None:
        """Refuse a largest size that leaves too few updates an epoch."""
        if self.max_size > num_train // MIN_BATCHES:
            raise ArgumentError(
                f"max_size must be at most a quarter of the {num_train} training examples, "
                f"{num_train // MIN_BATCHES}, got {self.max_size}"
            )

    def with_lr(self, lr: float) -> RunSettings:
        """Return the same settings at another learning rate."""
        return replace(self, lr=lr)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {**asdict(self), "decay_at": list(self.decay_at)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunSettings:
        """Return the settings that ``to_dict`` wrote."""
        return cls(**{**values, "decay_at": tuple(values["decay_at"])})


@final
@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a strategy is told about the run that it shapes.

    Args:
        settings: of the run.
        num_train: training examples; one epoch.
        num_classes: classes of the output; None for regression.
        difficulty: computes a score for every training example, larger is harder.
        schedule: the batch size from each number of examples on, of a run to be played again; None without one.
    """

    settings: RunSettings
    num_train: int
    num_classes: int | None = None
    difficulty: Callable[[], npt.NDArray[np.float64]] | None = None
    schedule: Mapping[int, int] | None = None

    @property
    def num_epochs(self) -> int:
        """Return the epochs of a run over all examples, at least 2."""
        return max(2, round(self.settings.num_examples / self.num_train))

    @property
    def growth(self) -> float:
        """Return how many times the base size the largest is."""
        return self.settings.max_size / self.settings.base_size


def _base_size(num_train: int) -> int:
    smallest, largest = BASE_SIZES
    return min(max(_power_of_two(num_train // BASE_BATCHES), smallest), largest)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most a number, at least 1."""
    return 1 << (max(1, number).bit_length() - 1)
