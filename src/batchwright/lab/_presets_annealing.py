"""Strategies that share a decay between the learning rate and the batch; the noise of the update falls alike.

All follow one schedule, the rate divided at milestones. Where the batch meets its largest size, the rate takes what is
left of the decay, so that none of them anneals less than the others.
"""

from __future__ import annotations

import math

from ..size import from_lr, seesaw
from ._run_settings import Conditions
from .strategies import Setup, Strategy


def _lr_decay(conditions: Conditions) -> Setup:
    return Setup(lr_factor=conditions.settings.decay)


def _batch_ramp(conditions: Conditions) -> Setup:
    return _shared(conditions, power=1.0)


def _hybrid(conditions: Conditions) -> Setup:
    return _shared(conditions, power=0.5)


def _shared(conditions: Conditions, *, power: float) -> Setup:
    settings, most = conditions.settings, conditions.growth
    policy = from_lr(settings.decay, start=settings.base_size, power=power, per="examples", max_factor=most)

    def lr_factor(examples: int) -> float:
        decay = settings.decay(examples)
        return decay * min(math.pow(decay, -power), most)

    return Setup(policy=policy, lr_factor=lr_factor)


def _seesaw(conditions: Conditions) -> Setup:
    settings = conditions.settings
    policy, lr_factor = seesaw(settings.decay, start=settings.base_size, per="examples", max_factor=conditions.growth)
    return Setup(policy=policy, lr_factor=lr_factor)


STRATEGIES = (
    Strategy(
        name="lr_decay",
        group="lr-decay",
        make=_lr_decay,
        about="The base size; the learning rate is divided at milestones.",
    ),
    Strategy(
        name="batch_ramp",
        group="lr-decay",
        make=_batch_ramp,
        about="The batch is multiplied where the rate would be divided (Smith et al. 2017).",
    ),
    Strategy(
        name="hybrid",
        group="lr-decay",
        make=_hybrid,
        about="At each milestone the batch grows and the rate falls, each by the root of the decay.",
    ),
    Strategy(
        name="seesaw",
        group="lr-decay",
        make=_seesaw,
        about="At each milestone the batch takes the decay and the rate its root, for Adam (Seesaw 2025).",
    ),
)
