"""What of a Trainer can be used, and what is refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_FROM_TRAINER = ("autocast", "scaler")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of Stepper that the Trainer decides."""
    given = [name for name in _FROM_TRAINER if name in options]
    if given:
        raise ArgumentError(f"{given[0]} comes from Trainer(precision=…); leave it out")


def check_strategy(trainer: Any) -> None:
    """Refuse strategies whose gradients Stepper would not see whole, or whose optimizer is not torch's."""
    strategy, model = trainer.strategy, trainer.strategy.model
    is_plain = trainer.world_size == 1 and model is trainer.lightning_module
    if strategy.handles_gradient_accumulation or not (is_plain or isinstance(model, DistributedDataParallel)):
        raise ArgumentError(
            f"ExactUpdates works on one device and with strategy='ddp', the Trainer has {type(strategy).__name__}"
        )


def check_optimizer(optimizers: Any) -> Any:
    """Return the only optimizer of a module."""
    if isinstance(optimizers, list):
        raise ArgumentError(
            f"ExactUpdates updates with one optimizer, configure_optimizers returned {len(optimizers)}; "
            "give groups of parameters to one, or call Stepper in a training_step of your own"
        )
    return optimizers


def check_overfitting(trainer: Any) -> None:
    """Refuse ``overfit_batches``, which relies on a sampler that Lightning can replace."""
    if trainer.overfit_batches > 0:
        raise ArgumentError(
            "Trainer(overfit_batches=…) needs a sampler that Lightning can replace; plan a data set of few examples"
        )


def autocast_of(precision: str) -> torch.dtype | None:
    """Return the type of the forward pass under a precision of Lightning, None for those without autocast.

    >>> autocast_of("bf16-mixed"), autocast_of("32-true")
    (torch.bfloat16, None)
    """
    return _DTYPES.get(precision)
