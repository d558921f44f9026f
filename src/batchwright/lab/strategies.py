"""Ready strategies by name: what decides the batch size of a run, its examples, and its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from ..errors import ArgumentError
from ..size import Curriculum, Policy, milestones
from ._run_settings import Conditions as Conditions
from ._run_settings import LrFactor

__all__ = ["GROUPS", "Conditions", "Setup", "Strategy", "get", "names", "schedule_of"]

GROUPS = (
    *("constant", "linear", "exponential", "cyclical", "loss", "entropy", "noise"),
    *("lr-coupled", "curriculum", "memory", "lr-decay", "replay"),
)
BASELINE = "constant"
_REPLAY = "replay_"
# Adaptive strategies whose sizes are played again by default, to tell adapting from growing.
_REPLAYED = ("loss_difference_exponential", "entropy", "noise")


@final
@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a strategy puts into a run; everything left out is as in the baseline.

    Args:
        policy: decides the batch size; None keeps the base size.
        curriculum: decides which examples an epoch covers.
        lr_factor: what the learning rate is multiplied by, a function of the examples completed.
        stepper: further options of the ``Stepper``.
        noise_parts: micro-batches to measure gradient noise from; None measures none.
        room: examples that a simulated memory has room for; None simulates none. The share in use at the peak of an
            update is then observed.
        fit_micro_batch: whether the micro-batch, and not the batch, follows that memory.
    """

    policy: Policy | None = None
    curriculum: Curriculum | None = None
    lr_factor: LrFactor | None = None
    stepper: Mapping[str, Any] = field(default_factory=dict)
    noise_parts: int | None = None
    room: int | None = None
    fit_micro_batch: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A named way to set the batch size during training.

    Args:
        name: of the strategy.
        group: one of ``GROUPS``.
        make: puts it together for the conditions of a run.
        about: one sentence for reports.
        needs_classes: whether it is only for models that choose between classes.
        replays: the strategy whose recorded sizes are played again.

    >>> from batchwright.lab._run_settings import RunSettings
    >>> conditions = Conditions(settings=RunSettings.fit(1000, num_epochs=9), num_train=1000)
    >>> get("linear").make(conditions).policy
    linear(8, 15)
    """

    name: str
    group: str
    make: Callable[[Conditions], Setup]
    about: str = ""
    needs_classes: bool = False
    replays: str | None = None

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ArgumentError(f"group must be one of {', '.join(GROUPS)}, got {self.group!r}")

    def fits(self, num_classes: int | None) -> bool:
        """Say whether a data set with so many classes, None for regression, has what the strategy looks at."""
        return num_classes is not None or not self.needs_classes


def names() -> tuple[str, ...]:
    """Return the names of the ready strategies, the baseline first.

    >>> names()[:4]
    ('constant', 'constant_large', 'constant_large_scaled', 'linear')
    """
    return (*_ready(), *(f"{_REPLAY}{name}" for name in _REPLAYED))


def get(name: str) -> Strategy:
    """Return a ready strategy; ``replay_`` before the name of any other plays the sizes of a recorded run.

    >>> get("replay_noise").replays
    'noise'
    """
    ready = _ready()
    if name in ready:
        return ready[name]
    source = name.removeprefix(_REPLAY)
    if source in ready and source != name:
        return _replay_of(ready[source])
    raise ArgumentError(f"no strategy {name!r}; there are {', '.join(names())}")


def schedule_of(record: Mapping[str, Any]) -> dict[int, int]:
    """Return the batch sizes of a recorded run: the size from each number of examples on.

    >>> schedule_of({"curve": [{"batch_size": 16}], "decisions": [{"examples": 90, "old": 16, "new": 32}]})
    {0: 16, 90: 32}
    """
    sizes = {int(decision["examples"]): int(decision["new"]) for decision in record["decisions"]}
    return {0: int(record["curve"][0]["batch_size"]), **sizes}


def _ready() -> dict[str, Strategy]:
    # Imported late: the modules of presets make strategies, and so import this one.
    from . import _presets_annealing, _presets_schedules, _presets_signals

    made = (*_presets_schedules.STRATEGIES, *_presets_signals.STRATEGIES, *_presets_annealing.STRATEGIES)
    return {strategy.name: strategy for strategy in made}


def _replay_of(source: Strategy) -> Strategy:
    return Strategy(
        name=f"{_REPLAY}{source.name}",
        group="replay",
        make=_play_again,
        about=f"The batch sizes of a run of {source.name} with another seed, as a fixed schedule.",
        needs_classes=source.needs_classes,
        replays=source.name,
    )


def _play_again(conditions: Conditions) -> Setup:
    if conditions.schedule is None:
        raise ArgumentError("a replay needs the record of the run it plays again; give run_one replay_of=record")
    return Setup(policy=milestones(conditions.schedule, per="examples"))
