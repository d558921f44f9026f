"""Policies driven by what training shows: the loss, the entropy, gradient noise, memory, or an expression of them."""

from ._entropy import entropy_driven as entropy_driven
from ._goodput import goodput as goodput
from ._loss import loss_driven as loss_driven
from ._memory import memory_driven as memory_driven
from ._noise_driven import noise_driven as noise_driven
from ._track import track as track

__all__ = ["entropy_driven", "goodput", "loss_driven", "memory_driven", "noise_driven", "track"]
