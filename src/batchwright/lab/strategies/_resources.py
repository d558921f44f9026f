"""Strategies that follow the machine: memory in use, the speed of training, the time of a batch.

Memory and seconds are simulated, so that the same seed gives the same sizes on every machine.
"""

from __future__ import annotations

from functools import partial

from ... import size
from ._ready import Ready, add_to
from .strategy import Conditions, Setup

READY: Ready = {}
_ready = partial(add_to, READY)


def _room(conditions: Conditions) -> int:
    return max(2, conditions.settings.max_size // 2)


@_ready("memory", "memory_batch", "The batch doubles while a simulated memory is under 48 % full, halves above 80 %.")
def _memory_batch(conditions: Conditions) -> Setup:
    return Setup(policy=size.memory_driven(), room=_room(conditions))


@_ready(
    "memory",
    "memory_micro",
    "The base size, run in micro-batches that fit a simulated memory: the same updates as the baseline.",
)
def _memory_micro(conditions: Conditions) -> Setup:
    return Setup(room=conditions.settings.base_size, fit_micro_batch=True)
