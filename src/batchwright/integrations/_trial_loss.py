"""The loss of a Hugging Face trainer, to be tried out on parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..step.huggingface import ProbedLoss, has_usual_loss, shared_term, unwrapped

# compute(model, inputs, num_items_in_batch) -> loss, what a trainer calls compute_loss
Compute: TypeAlias = Callable[[nn.Module, dict[str, Any], Any], Tensor]


@final
class TrialLoss(ProbedLoss):
    """A trainer's loss, to be tried out."""

    takes_number = True  # compute_loss takes it, whether or not it is honoured
    trusts_number = True  # a trainer divides by its own count of labels

    def __init__(self, compute: Compute, model: nn.Module, tolerance: float, *, is_own: bool) -> None:
        self.module, self.tolerance = model, tolerance
        self.compute, self.is_own = compute, is_own

    @property
    def is_usual(self) -> bool:
        """Return whether the usual reading is known to hold."""
        return self.is_own and has_usual_loss(self.module)

    @property
    def name(self) -> str:
        """Return the name of the model."""
        return type(unwrapped(self.module)).__name__

    def __call__(self, inputs: Mapping[str, Any], **options: Any) -> Tensor:
        """Return the loss for a number of items, or without one."""
        number, found = options.get("num_items_in_batch"), []
        if number is not None:  # a tensor, as trainers pass it
            number = torch.tensor(number, device=next(self.module.parameters()).device)
        hook = self.module.register_forward_hook(lambda module, args, outputs: found.append(outputs))
        try:
            loss = self.compute(self.module, dict(inputs), number)
        finally:
            hook.remove()
        extra = next(filter(None, (shared_term(self.module, outputs) for outputs in found)), "")
        if extra:
            raise self.complaint(extra)
        return loss

    def complaint(self, why: str) -> ArgumentError:
        """Return the error, whose text is part of a longer one."""
        return ArgumentError(f"the loss of {self.name} is not a mean over its labels: {why}")


def takes_own_loss(compute_loss: Any, loss_func: Any) -> bool:
    """Say whether a trainer with this ``compute_loss`` and ``compute_loss_func`` takes the loss of the model."""
    place = f"{compute_loss.__module__}.{compute_loss.__qualname__}"
    return loss_func is None and place == "transformers.trainer.Trainer.compute_loss"
