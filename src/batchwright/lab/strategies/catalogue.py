"""The ready strategies by name, among them those whose batch sizes are known before training.

Some grow or cycle over the epochs. Others share a decay between the learning rate and the batch size; the noise of the
updates falls alike in all of them. These follow one schedule, which divides the rate at milestones. Once the batch has
reached its largest size, the rate takes the rest of the decay, so that none of them anneals less than the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ...errors import ArgumentError
from ...size import Policy, constant, cyclic, exponential, from_lr, linear, milestones, seesaw
from ._signals import SIGNALS
from .strategy import Conditions, Make, OptimizerName, Setup, Strategy, in_group

Growth: TypeAlias = Callable[[Conditions, int], Policy]

_REPLAY = "replay_"
# Adaptive strategies whose sizes are repeated by default, to tell adapting from growing.
_REPLAYED = ("loss_difference_exponential", "entropy", "noise")
# A rate that is many times the tuned one is reached over this share of the examples (Goyal et al. 2017).
_WARM_UP = 0.05
_NUM_CYCLES = 4
_SCALING: dict[OptimizerName, str] = {"sgd": "linear", "adam": "sqrt"}


def names() -> tuple[str, ...]:
    """Return the names of the ready strategies, the baseline first.

    >>> names()[:4]
    ('constant', 'constant_large', 'constant_large_scaled', 'linear')
    """
    return (*_READY, *(f"{_REPLAY}{name}" for name in _REPLAYED))


def get(name: str) -> Strategy:
    """Return a ready strategy; ``replay_`` before the name of any other repeats the sizes of a recorded run.

    >>> get("replay_noise").replays
    'noise'
    """
    if name in _READY:
        return _READY[name]
    source = name.removeprefix(_REPLAY)
    if source in _READY and source != name:
        return _replay_of(_READY[source])
    raise ArgumentError(f"no strategy {name!r}; there are {', '.join(names())}")


def schedule_of(record: Mapping[str, Any]) -> dict[int, int]:
    """Return the batch sizes of a recorded run: the size from each number of examples on.

    >>> schedule_of({"curve": [{"batch_size": 16}], "decisions": [{"examples": 90, "old": 16, "new": 32}]})
    {0: 16, 90: 32}
    """
    sizes = {int(decision["examples"]): int(decision["new"]) for decision in record["decisions"]}
    return {0: int(record["curve"][0]["batch_size"]), **sizes}


def _replay_of(source: Strategy) -> Strategy:
    return Strategy(
        name=f"{_REPLAY}{source.name}",
        group="replay",
        make=_replay,
        about=f"The batch sizes of a run of {source.name} with another seed, as a fixed schedule.",
        needs_classes=source.needs_classes,
        replays=source.name,
    )


def _replay(conditions: Conditions) -> Setup:
    if conditions.schedule is None:
        raise ArgumentError("a replay needs the record of the run it repeats; give run_one replay_of=record")
    return Setup(policy=milestones(conditions.schedule, per="examples"))


def _constant(conditions: Conditions) -> Setup:
    return Setup(policy=constant(conditions.settings.base_size))


def _constant_large(conditions: Conditions) -> Setup:
    return Setup(policy=constant(conditions.settings.max_size))


def _constant_large_scaled(conditions: Conditions) -> Setup:
    settings = conditions.settings
    num_warm = max(1, round(_WARM_UP * settings.num_examples))
    return Setup(
        policy=constant(settings.max_size),
        lr_factor=lambda examples: min(1.0, (examples + settings.max_size) / num_warm),
        stepper={"lr_rule": _SCALING[settings.optimizer], "base_size": settings.base_size},
    )


def _linear_growth(conditions: Conditions, num_epochs: int) -> Policy:
    """Return ``B_i = B_init + a·i`` with ``a`` such that the last of some epochs has the largest size."""
    settings = conditions.settings
    return linear(settings.base_size, (settings.max_size - settings.base_size) / (num_epochs - 1))


def _exponential_growth(conditions: Conditions, num_epochs: int) -> Policy:
    """Return ``B_i = B_init·a^i`` with ``a`` such that the last of some epochs has the largest size."""
    return exponential(conditions.settings.base_size, conditions.growth ** (1 / (num_epochs - 1)))


def _growing(growth: Growth) -> Make:
    return lambda conditions: Setup(policy=growth(conditions, conditions.num_epochs))


def _cycling(growth: Growth) -> Make:
    def make(conditions: Conditions) -> Setup:
        period = max(2, conditions.num_epochs // _NUM_CYCLES)
        return Setup(policy=cyclic(growth(conditions, period), period))

    return make


def _coupled(rule: str) -> Make:
    return lambda conditions: Setup(
        policy=_exponential_growth(conditions, conditions.num_epochs),
        stepper={"lr_rule": rule, "base_size": conditions.settings.base_size},
    )


def _lr_decay(conditions: Conditions) -> Setup:
    return Setup(lr_factor=conditions.settings.decay)


def _shared_decay(power: float) -> Make:
    """Let the batch take the decay to a power, and the learning rate the rest of it."""

    def make(conditions: Conditions) -> Setup:
        settings, most = conditions.settings, conditions.growth
        policy = from_lr(settings.decay, start=settings.base_size, power=power, per="examples", max_factor=most)

        def lr_factor(examples: int) -> float:
            decay = settings.decay(examples)
            return decay * min(math.pow(decay, -power), most)

        return Setup(policy=policy, lr_factor=lr_factor)

    return make


def _seesaw(conditions: Conditions) -> Setup:
    settings = conditions.settings
    policy, lr_factor = seesaw(settings.decay, start=settings.base_size, per="examples", max_factor=conditions.growth)
    return Setup(policy=policy, lr_factor=lr_factor)


# In the order in which a lab runs them, which is part of a plan.
_READY: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        *in_group(
            "constant",
            constant=(_constant, "The base size throughout: the baseline."),
            constant_large=(_constant_large, "The largest size from the start, at the baseline's learning rate."),
            constant_large_scaled=(
                _constant_large_scaled,
                "The largest size from the start, the rate scaled with it (SGD linearly, Adam by the root), warmed up.",
            ),
        ),
        *in_group("linear", linear=(_growing(_linear_growth), "B_i = B_init + a·i over the epochs.")),
        *in_group("exponential", exponential=(_growing(_exponential_growth), "B_i = B_init·a^i over the epochs.")),
        *in_group(
            "cyclical",
            cyclic_linear=(_cycling(_linear_growth), "Linear growth that begins again, four times per run."),
            cyclic_exponential=(
                _cycling(_exponential_growth),
                "Exponential growth that begins again, four times per run.",
            ),
        ),
        *in_group(
            "lr-coupled",
            lr_coupled_linear=(
                _coupled("linear"),
                "Exponential growth; the learning rate grows in proportion to the batch.",
            ),
            lr_coupled_sqrt=(
                _coupled("sqrt"),
                "Exponential growth; the learning rate grows with the root of the batch.",
            ),
        ),
        *SIGNALS,
        *in_group(
            "lr-decay",
            lr_decay=(_lr_decay, "The base size; the learning rate is divided at milestones."),
            batch_ramp=(
                _shared_decay(1.0),
                "The batch is multiplied where the rate would be divided (Smith et al. 2017).",
            ),
            hybrid=(
                _shared_decay(0.5),
                "At each milestone the batch grows and the rate falls, each by the root of the decay.",
            ),
            seesaw=(
                _seesaw,
                "At each milestone the batch takes the decay and the rate its root, for Adam (Seesaw 2025).",
            ),
        ),
    )
}
