"""Policies driven by what training shows: the loss, the entropy, gradient noise, memory, or an expression of them."""

from .entropy import entropy_driven as entropy_driven
from .expression import track as track
from .loss import loss_driven as loss_driven
from .memory import memory_driven as memory_driven
from .noise_scale import noise_driven as noise_driven
from .throughput import goodput as goodput

__all__ = ["entropy_driven", "goodput", "loss_driven", "memory_driven", "noise_driven", "track"]
