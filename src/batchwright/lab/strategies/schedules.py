"""Strategies that know their sizes before training: constants, growth, cycles, a shared decay, sizes of a record.

Some share a decay between the learning rate and the batch size; the noise of the updates falls alike in all of
them. They follow one schedule, which divides the rate at milestones. Once the batch has reached its largest size, the
rate takes the rest of the decay, so that none of them anneals less than the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from ... import size
from ...errors import ArgumentError
from .strategy import Conditions, Ready, Setup, add_to, power_of_two

Growth: TypeAlias = Callable[[Conditions, int], size.Policy]

READY: Ready = {}
_ready = partial(add_to, READY)
# A rate that is many times the tuned one is reached over this share of the examples (Goyal et al. 2017).
_WARM_UP = 0.05
# A cycle grows for several epochs: small, in between and large at least. One cycle alone would be plain growth.
_MIN_PERIOD = 3
_MIN_CYCLES = 2
_MAX_CYCLES = 4


@_ready("constant", "constant", "The base size throughout: the baseline.")
def _constant(conditions: Conditions) -> Setup:
    return Setup(policy=size.constant(conditions.settings.base_size))


@_ready("constant", "constant_small", "The smallest size throughout.")
def _constant_small(conditions: Conditions) -> Setup:
    return Setup(policy=size.constant(conditions.settings.min_size))


@_ready("constant", "constant_medium", "The size halfway between the base size and the largest, in factors.")
def _constant_medium(conditions: Conditions) -> Setup:
    return Setup(policy=size.constant(medium_size(conditions)))


def medium_size(conditions: Conditions) -> int:
    """Return the power of two at or below the geometric mean of the base size and the largest."""
    base, largest = conditions.settings.base_size, conditions.settings.max_size
    return max(base, power_of_two(math.isqrt(base * largest)))


@_ready("constant", "constant_large", "The largest size throughout.")
def _constant_large(conditions: Conditions) -> Setup:
    return Setup(policy=size.constant(conditions.settings.max_size))


@_ready(
    "constant",
    "constant_large_scaled",
    "The largest size from the start, the rate scaled with it (SGD linearly, Adam by the root), warmed up.",
)
def _constant_large_scaled(conditions: Conditions) -> Setup:
    settings = conditions.settings
    num_warm = max(1, round(_WARM_UP * settings.num_examples))
    rule = "sqrt" if settings.optimizer == "adam" else "linear"
    return Setup(
        policy=size.constant(settings.max_size),
        lr_factor=lambda examples: min(1.0, (examples + settings.max_size) / num_warm),
        stepper={"lr_rule": rule, "base_size": settings.base_size},
    )


def _linear_growth(conditions: Conditions, num_epochs: int) -> size.Policy:
    """Return ``B_i = B_init + a·i`` with ``a`` such that the last of some epochs has the largest size."""
    settings = conditions.settings
    return size.linear(settings.base_size, (settings.max_size - settings.base_size) / (num_epochs - 1))


def _exponential_growth(conditions: Conditions, num_epochs: int) -> size.Policy:
    """Return ``B_i = B_init·a^i`` with ``a`` such that the last of some epochs has the largest size."""
    return size.exponential(conditions.settings.base_size, conditions.growth ** (1 / (num_epochs - 1)))


@_ready("linear", "linear", "B_i = B_init + a·i over the epochs.")
def _linear(conditions: Conditions) -> Setup:
    return Setup(policy=_linear_growth(conditions, conditions.num_epochs))


@_ready("exponential", "exponential", "B_i = B_init·a^i over the epochs.")
def _exponential(conditions: Conditions) -> Setup:
    return Setup(policy=_exponential_growth(conditions, conditions.num_epochs))


def _cycling(conditions: Conditions, growth: Growth) -> Setup:
    period = cycle_epochs(conditions.num_epochs)
    return Setup(policy=size.cyclic(growth(conditions, period), period))


def cycle_epochs(num_epochs: int) -> int:
    """Return the epochs of a cycle: two to four cycles of equal length per run if they divide it, else two.

    >>> [cycle_epochs(num_epochs) for num_epochs in (6, 7, 8, 9, 12, 16, 24)]
    [3, 4, 4, 3, 3, 4, 6]
    """
    least = _MIN_CYCLES * _MIN_PERIOD
    if num_epochs < least:
        raise ArgumentError(
            f"cycles need runs of at least {least} epochs, {_MIN_CYCLES} cycles of {_MIN_PERIOD}; got {num_epochs}. "
            "Make the run longer or leave the cyclic strategies out"
        )
    even = [
        num_epochs // num_cycles
        for num_cycles in range(_MAX_CYCLES, _MIN_CYCLES - 1, -1)
        if num_epochs % num_cycles == 0 and num_epochs // num_cycles >= _MIN_PERIOD
    ]
    return even[0] if even else -(-num_epochs // _MIN_CYCLES)


for _name, _growth in (("linear", _linear_growth), ("exponential", _exponential_growth)):
    _about = f"{_name.capitalize()} growth over three epochs or more that begins again, two to four times per run."
    _ready("cyclical", f"cyclic_{_name}", _about, min_epochs=_MIN_CYCLES * _MIN_PERIOD)(
        partial(_cycling, growth=_growth)
    )


def _coupled(conditions: Conditions, rule: str) -> Setup:
    policy = _exponential_growth(conditions, conditions.num_epochs)
    return Setup(policy=policy, stepper={"lr_rule": rule, "base_size": conditions.settings.base_size})


for _rule, _how in (("linear", "in proportion to"), ("sqrt", "with the root of")):
    _about = f"Exponential growth; the learning rate grows {_how} the batch."
    _ready("lr-coupled", f"lr_coupled_{_rule}", _about)(partial(_coupled, rule=_rule))


@_ready("lr-decay", "lr_decay", "The base size; the learning rate is divided at milestones.")
def _lr_decay(conditions: Conditions) -> Setup:
    return Setup(lr_factor=conditions.settings.decay)


def _shared_decay(conditions: Conditions, power: float) -> Setup:
    """Let the batch take the decay to a power, and the learning rate the rest of it."""
    settings, most = conditions.settings, conditions.growth
    policy = size.from_lr(settings.decay, start=settings.base_size, power=power, per="examples", max_factor=most)

    def lr_factor(examples: int) -> float:
        decay = settings.decay(examples)
        return decay * min(math.pow(decay, -power), most)

    return Setup(policy=policy, lr_factor=lr_factor)


for _name, _power, _about in (
    ("batch_ramp", 1.0, "The batch is multiplied where the rate would be divided (Smith et al. 2017)."),
    ("hybrid", 0.5, "At each milestone the batch grows and the rate falls, each by the root of the decay."),
):
    _ready("lr-decay", _name, _about)(partial(_shared_decay, power=_power))


@_ready(
    "lr-decay", "seesaw", "At each milestone the batch takes the decay and the rate its root, for Adam (Seesaw 2025)."
)
def _seesaw(conditions: Conditions) -> Setup:
    settings, most = conditions.settings, conditions.growth
    policy, lr_factor = size.seesaw(settings.decay, start=settings.base_size, per="examples", max_factor=most)
    return Setup(policy=policy, lr_factor=lr_factor)


def schedule_of(record: Mapping[str, Any]) -> dict[int, int]:
    """Return the batch sizes of a recorded run: the size from each number of examples on.

    >>> schedule_of({"curve": [{"batch_size": 16}], "decisions": [{"examples": 90, "old": 16, "new": 32}]})
    {0: 16, 90: 32}
    """
    sizes = {int(decision["examples"]): int(decision["new"]) for decision in record["decisions"]}
    return {0: int(record["curve"][0]["batch_size"]), **sizes}


def replay(conditions: Conditions) -> Setup:
    """Return the setup that repeats the batch sizes of a recorded run."""
    if conditions.schedule is None:
        raise ArgumentError("a replay needs the record of the run it repeats; give run_one replay_of=record")
    return Setup(policy=size.milestones(conditions.schedule, per="examples"))
