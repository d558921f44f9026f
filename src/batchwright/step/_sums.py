"""What a loss function returns, checked; and sums over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from ..errors import ArgumentError

_HOW = "return (loss_sum, weight): the summed loss and how many examples or tokens it sums over"

Sum: TypeAlias = "Tensor | float"  # a float where the loss function counted on the host


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


def _as_scalar(value: Any, like: Tensor) -> Sum:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ArgumentError(f"weights and metrics must be single numbers, got shape {tuple(value.shape)}")
    return _widened(value.detach().reshape(()), like.device)


def _widened(value: Tensor, device: torch.device) -> Tensor:
    # Sums of counts need more digits than a half-precision loss has.
    return value.to(device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)


@final
class Totals:
    """Sums over the micro-batches of an update, on the device until they are read."""

    def __init__(self) -> None:
        self.loss: Sum = 0.0
        self.weight: Sum = 0.0
        self.metrics: dict[str, Sum] = {}
        self.num_examples = 0
        self.num_micro_batches = 0

    def add(self, sums: MicroSums, num_examples: int) -> None:
        """Add a micro-batch."""
        self.loss = self.loss + _widened(sums.loss.detach(), sums.loss.device)
        self.weight = self.weight + sums.weight
        self._add_metrics(sums.metrics)
        self.num_examples += num_examples
        self.num_micro_batches += 1

    def merge(self, other: Totals) -> None:
        """Add the totals of another batch of the same update."""
        self.loss = self.loss + other.loss
        self.weight = self.weight + other.weight
        self._add_metrics(other.metrics)
        self.num_examples += other.num_examples
        self.num_micro_batches += other.num_micro_batches

    def _add_metrics(self, metrics: Mapping[str, Sum]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


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
