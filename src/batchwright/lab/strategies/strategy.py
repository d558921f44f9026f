"""Strategy: a named way to set the batch size during a run, the settings of the run, and what it is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from ..._checks import as_flag, as_plain, as_whole, check_choice
from ...errors import ArgumentError
from ...size import Curriculum, Policy

OptimizerName: TypeAlias = Literal["sgd", "adam"]
LrFactor: TypeAlias = Callable[[int], float]
Seconds: TypeAlias = Callable[[int], float]
GROUPS = (
    *("constant", "linear", "exponential", "cyclical", "loss", "entropy", "noise"),
    *("lr-coupled", "curriculum", "memory", "time", "lr-decay", "replay"),
)
# The strategy that all others are compared with.
BASELINE = "constant"

# An epoch has at least this many batches of the largest size, and about this many of the base size.
MIN_BATCHES = 4
BASE_BATCHES = 64
# The base size is a power of two in this range; the largest size is this many times the base size.
BASE_SIZES = (8, 32)
LARGEST_FACTOR = 16
# With the largest base size, the largest size is at least this: what is usually called a large batch.
LARGE_SIZE = 1024


@final
@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every strategy has in common: the examples, the optimizer, the bounds of the batch, the decay.

    Args:
        num_examples: how many examples a run trains on, the same for every strategy.
        base_size: the batch size of the baseline, for which the learning rate is meant.
        min_size: the smallest batch size.
        max_size: the largest batch size.
        optimizer: ``"sgd"`` with momentum, or ``"adam"``.
        lr: the learning rate at the base size.
        momentum: the momentum of SGD.
        decay_at: where a decaying rate is divided, as shares of ``num_examples``, ascending.
        decay_factor: what it is divided by each time.
        num_evaluations: how often to validate during training, besides once before it.

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
        min_size = as_whole("min_size", self.min_size, least=1)
        base_size = as_whole("base_size", self.base_size, least=min_size)
        set_fields(
            self,
            num_examples=as_whole("num_examples", self.num_examples, least=1),
            base_size=base_size,
            min_size=min_size,
            max_size=as_whole("max_size", self.max_size, least=base_size),
            lr=as_plain("lr", self.lr, above=0),
            momentum=as_plain("momentum", self.momentum, least=0, below=1),
            decay_at=as_plains("decay_at", self.decay_at, above=0, below=1),
            decay_factor=as_plain("decay_factor", self.decay_factor, least=1),
            num_evaluations=as_whole("num_evaluations", self.num_evaluations, least=1),
        )
        check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        if list(self.decay_at) != sorted(self.decay_at):
            raise ArgumentError(f"decay_at must be ascending shares above 0 and below 1, got {self.decay_at!r}")

    @classmethod
    def fit(cls, num_train: int, *, num_epochs: int, **options: Any) -> RunSettings:
        """Return settings whose sizes suit a number of training examples; ``options`` are taken as they are.

        The base size is the largest power of two that leaves 64 batches per epoch, from 8 to 32; the smallest size is
        half of it. The largest size is 16 times the base size, 1,024 for a base size of 32, and leaves at least 4
        batches per epoch.

        >>> settings = RunSettings.fit(1438, num_epochs=10)
        >>> settings.num_examples, settings.min_size, settings.base_size, settings.max_size
        (14380, 8, 16, 256)
        """
        num_train = as_whole("num_train", num_train, least=1)
        base = as_whole("base_size", options.pop("base_size", _base_size(num_train)), least=1)
        sizes = {"base_size": base, "min_size": max(1, base // 2), "max_size": max(base, _max_size(base, num_train))}
        num_examples = as_whole("num_epochs", num_epochs, least=1) * num_train
        return cls(**{"num_examples": num_examples, **sizes, **options})

    def decay(self, examples: int) -> float:
        """Return the factor of a rate that is divided at each milestone, after some number of examples."""
        examples = as_whole("examples", examples, least=0)
        passed = sum(examples >= round(share * self.num_examples) for share in self.decay_at)
        return self.decay_factor**-passed

    def check_size_of(self, num_train: int) -> None:
        """Refuse a largest size that leaves too few updates per epoch."""
        num_train = as_whole("num_train", num_train, least=0)
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
        settings: the settings of the run.
        num_train: the training examples of one epoch.
        num_classes: the classes of the output; None for regression.
        difficulty: computes a score for every training example, larger for harder ones.
        schedule: for a replay, the batch size from each number of examples on; None otherwise.
        seconds: returns the simulated seconds of an update of some examples, for strategies that follow time.
    """

    settings: RunSettings
    num_train: int
    num_classes: int | None = None
    difficulty: Callable[[], npt.NDArray[np.float64]] | None = None
    schedule: Mapping[int, int] | None = None
    seconds: Seconds | None = None

    def __post_init__(self) -> None:
        set_fields(
            self,
            num_train=as_whole("num_train", self.num_train, least=1),
            num_classes=None if self.num_classes is None else as_whole("num_classes", self.num_classes, least=1),
            schedule=None if self.schedule is None else _plain_schedule(self.schedule),
        )

    @property
    def num_epochs(self) -> int:
        """Return the epochs of a run over all examples, at least 2."""
        return max(2, round(self.settings.num_examples / self.num_train))

    @property
    def growth(self) -> float:
        """Return how many times the base size the largest is."""
        return self.settings.max_size / self.settings.base_size


@final
@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a strategy puts into a run; everything left out is as in the baseline.

    Args:
        policy: decides the batch size; None keeps the base size.
        curriculum: decides which examples an epoch covers.
        lr_factor: what the learning rate is multiplied by, a function of the examples completed.
        stepper: further options of the ``Stepper``.
        noise_parts: how many micro-batches, at least 2, to measure gradient noise from; None does not measure it.
        room: how many examples fit into a simulated memory, whose peak use the policy observes; None simulates none.
        fit_micro_batch: whether the micro-batch, instead of the batch, follows that memory.
    """

    policy: Policy | None = None
    curriculum: Curriculum | None = None
    lr_factor: LrFactor | None = None
    stepper: Mapping[str, Any] = field(default_factory=dict)
    noise_parts: int | None = None
    room: int | None = None
    fit_micro_batch: bool = False

    def __post_init__(self) -> None:
        set_fields(
            self,
            noise_parts=None if self.noise_parts is None else as_whole("noise_parts", self.noise_parts, least=2),
            room=None if self.room is None else as_whole("room", self.room, least=1),
            fit_micro_batch=as_flag("fit_micro_batch", self.fit_micro_batch),
        )


Make: TypeAlias = Callable[[Conditions], Setup]


@final
@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A named way to set the batch size during training.

    Args:
        name: the name of the strategy.
        group: one of ``GROUPS``.
        make: returns its setup for the conditions of a run.
        about: one sentence for reports.
        needs_classes: whether it works only for models that choose between classes.
        replays: the strategy whose recorded sizes it repeats.
        min_epochs: the epochs that a run must have for it to show what it does.

    >>> from batchwright.lab.strategies import get
    >>> conditions = Conditions(settings=RunSettings.fit(1000, num_epochs=9), num_train=1000)
    >>> get("linear").make(conditions).policy
    linear(8, 15)
    """

    name: str
    group: str
    make: Make
    about: str = ""
    needs_classes: bool = False
    replays: str | None = None
    min_epochs: int = 1

    def __post_init__(self) -> None:
        check_choice("group", self.group, GROUPS)
        set_fields(
            self,
            needs_classes=as_flag("needs_classes", self.needs_classes),
            min_epochs=as_whole("min_epochs", self.min_epochs, least=1),
        )

    def fits(self, num_classes: int | None, *, num_epochs: int | None = None) -> bool:
        """Say whether the strategy can be used with this many classes, None for regression, in a run of some epochs.

        >>> from batchwright.lab.strategies import get
        >>> get("cyclic_linear").fits(10), get("cyclic_linear").fits(10, num_epochs=4)
        (True, False)
        """
        is_long_enough = num_epochs is None or as_whole("num_epochs", num_epochs, least=1) >= self.min_epochs
        return is_long_enough and (num_classes is not None or not self.needs_classes)


Ready: TypeAlias = dict[str, Strategy]


def add_to(ready: Ready, group: str, name: str, about: str, **options: Any) -> Callable[[Make], Make]:
    """Add a strategy to a catalogue of ready ones; it decorates the function that makes the setup."""

    def add(make: Make) -> Make:
        # Only the entropy of an output needs classes to choose between.
        ready[name] = Strategy(
            name=name, group=group, make=make, about=about, needs_classes=group == "entropy", **options
        )
        return make

    return add


def _base_size(num_train: int) -> int:
    smallest, largest = BASE_SIZES
    return min(max(power_of_two(num_train // BASE_BATCHES), smallest), largest)


def _max_size(base_size: int, num_train: int) -> int:
    largest = LARGEST_FACTOR * base_size
    if base_size >= BASE_SIZES[1]:
        largest = max(largest, LARGE_SIZE)
    return min(largest, power_of_two(num_train // MIN_BATCHES))


def power_of_two(number: int) -> int:
    """Return the largest power of two up to a number, at least 1.

    >>> power_of_two(181)
    128
    """
    return 1 << (max(1, number).bit_length() - 1)


def _plain_schedule(schedule: Mapping[int, int]) -> dict[int, int]:
    return {
        as_whole("the examples of schedule", examples, least=0): as_whole("the sizes of schedule", size, least=1)
        for examples, size in schedule.items()
    }


def plain(value: Any) -> Any:
    """Return settings with plain Python numbers where NumPy's stood: ids of runs are made from their JSON text.

    >>> plain((np.int64(8), {"lr": np.float32(0.5)}, "sgd"))
    (8, {'lr': 0.5}, 'sgd')
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value.item() if isinstance(value, np.generic) else value


def as_plains(name: str, values: Any, **bounds: Any) -> tuple[float, ...]:
    """Return a list of finite numbers as plain ones.

    >>> as_plains("grids", [np.float32(0.5), 1], above=0)
    (0.5, 1)
    """
    return tuple(as_plain(name, value, **bounds) for value in as_items(name, values))


def as_items(name: str, values: Any) -> Iterable[Any]:
    """Return a list, a tuple or anything else that numbers can be taken from, or refuse it.

    >>> as_items("seeds", 3)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: seeds must be a list of numbers, got 3
    """
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} must be a list of numbers, got {values!r}")
    return values


def set_fields(frozen: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass while it is made."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)
