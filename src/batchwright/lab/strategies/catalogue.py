"""The ready strategies by name, in the order of their groups, which is the order in which a lab runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import size
from ...errors import ArgumentError
from . import _resources, _schedules, _signals
from .strategy import GROUPS, Conditions, Setup, Strategy

_READY: dict[str, Strategy] = {
    strategy.name: strategy
    for group in GROUPS
    for room in (_schedules, _signals, _resources)
    for strategy in room.READY.values()
    if strategy.group == group
}
_REPLAY = "replay_"
# Adaptive strategies whose sizes are repeated by default, to tell adapting from growing.
_REPLAYED = ("loss_difference_exponential", "entropy", "noise")
# One strategy per idea, the baseline first: what a first look at data of your own compares.
HANDFUL = (
    *("constant", "constant_large", "exponential", "cyclic_linear", "loss_difference_exponential"),
    *("entropy", "noise", "lr_coupled_linear", "curriculum"),
)


def names() -> tuple[str, ...]:
    """Return the names of the ready strategies, the baseline first, group after group.

    >>> names()[:4]
    ('constant', 'constant_small', 'constant_medium', 'constant_large')
    """
    return (*_READY, *(f"{_REPLAY}{name}" for name in _REPLAYED))


def get(name: str) -> Strategy:
    """Return a ready strategy; ``replay_`` before the name of any other repeats the sizes of a recorded run.

    >>> get("replay_noise").replays
    'noise'
    """
    if name in _READY:
        return _READY[name]
    source = _READY.get(name.removeprefix(_REPLAY))
    if source is None:
        raise ArgumentError(f"no strategy {name!r}; there are {', '.join(names())}")
    return Strategy(
        name=name,
        group="replay",
        make=_replay,
        about=f"The batch sizes of a run of {source.name} with another seed, as a fixed schedule.",
        needs_classes=source.needs_classes,
        replays=source.name,
        min_epochs=source.min_epochs,
    )


def schedule_of(record: Mapping[str, Any]) -> dict[int, int]:
    """Return the batch sizes of a recorded run: the size from each number of examples on.

    >>> schedule_of({"curve": [{"batch_size": 16}], "decisions": [{"examples": 90, "old": 16, "new": 32}]})
    {0: 16, 90: 32}
    """
    sizes = {int(decision["examples"]): int(decision["new"]) for decision in record["decisions"]}
    return {0: int(record["curve"][0]["batch_size"]), **sizes}


def _replay(conditions: Conditions) -> Setup:
    if conditions.schedule is None:
        raise ArgumentError("a replay needs the record of the run it repeats; give run_one replay_of=record")
    return Setup(policy=size.milestones(conditions.schedule, per="examples"))
