"""What a loss function returns, checked; and sums over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from ..errors import ArgumentError

_HOW = "return (loss_sum, weight): the summed loss and how many examples or tokens it sums over"


@final
class MicroSums:
    """The sums of one micro-batch."""

    def __init__(self, returned: Any) -> None:
        if isinstance(returned, Tensor):
            raise ArgumentError(f"loss_fn returned a tensor alone, which looks like a mean; {_HOW}")
        if not isinstance(returned, tuple) or len(returned) not in (2, 3):
            raise ArgumentError(f"loss_fn returned {type(returned).__name__}; {_HOW}")
        loss, weight = returned[:2]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ArgumentError(f"loss_sum must be a tensor with one element, got {shape}; {_HOW}")
        if not loss.requires_grad:
            raise ArgumentError(
                "loss_sum does not depend on any trainable parameter; is the model frozen, or under no_grad?"
            )
        self.loss = loss.reshape(())
        self.weight = _as_scalar(weight, loss)
        metrics = returned[2] if len(returned) == 3 else {}
        if not isinstance(metrics, Mapping):
            raise ArgumentError(f"the metrics of loss_fn must be a mapping of sums, got {type(metrics).__name__}")
        self.metrics = {name: _as_scalar(value, loss) for name, value in metrics.items()}


def _as_scalar(value: Any, like: Tensor) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    if tensor.numel() != 1:
        raise ArgumentError(f"weights and metrics must be single numbers, got shape {tuple(tensor.shape)}")
    # Sums of counts need more digits than a half-precision loss has.
    return tensor.reshape(()).to(
        device=like.device, dtype=torch.float64 if like.device.type == "cpu" else torch.float32
    )


@final
class Totals:
    """Sums over the micro-batches of an update, on the device until they are read."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.weight: Tensor | None = None
        self.metrics: dict[str, Tensor] = {}
        self.num_examples = 0
        self.num_micro_batches = 0

    def add(self, sums: MicroSums, num_examples: int) -> None:
        """Add a micro-batch."""
        loss = sums.loss.detach().to(sums.weight.dtype)
        self.loss = loss if self.loss is None else self.loss + loss
        self.weight = sums.weight if self.weight is None else self.weight + sums.weight
        for name, value in sums.metrics.items():
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value
        self.num_examples += num_examples
        self.num_micro_batches += 1

    def merge(self, other: Totals) -> None:
        """Add the totals of another batch of the same update."""
        if other.loss is None or other.weight is None:
            return
        self.loss = other.loss if self.loss is None else self.loss + other.loss
        self.weight = other.weight if self.weight is None else self.weight + other.weight
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value
        self.num_examples += other.num_examples
        self.num_micro_batches += other.num_micro_batches


def check_weight(weight: float) -> float:
    """Refuse a total weight that no mean can be taken over."""
    if math.isnan(weight) or math.isinf(weight):
        raise ArgumentError(f"the weight of the batch is {weight}; loss_fn must count finite examples or tokens")
    if weight <= 0:
        raise ArgumentError(
            f"the weight of the batch is {weight:g}, so there is no mean loss; "
            "are all labels masked? Leave such batches out"
        )
    return weight
