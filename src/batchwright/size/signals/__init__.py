"""Policies driven by what training shows: loss, entropy, gradient noise, memory, seconds, or an expression of them."""

from .entropy import entropy_driven as entropy_driven
from .experiment import measured as measured
from .expression import track as track
from .loss import loss_driven as loss_driven
from .loss_level import loss_below as loss_below
from .loss_level import loss_settled as loss_settled
from .memory import memory_driven as memory_driven
from .noise_scale import noise_driven as noise_driven
from .pace import step_time as step_time
from .speed import speed_driven as speed_driven
from .throughput import goodput as goodput

__all__ = [
    "entropy_driven",
    "goodput",
    "loss_below",
    "loss_driven",
    "loss_settled",
    "measured",
    "memory_driven",
    "noise_driven",
    "speed_driven",
    "step_time",
    "track",
]
