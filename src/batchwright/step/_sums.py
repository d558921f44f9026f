"""The sums of an update: losses, weights and metrics of micro-batches until the update is made."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from .noise import NoiseReport

_HOW = "return (loss_sum, weight): the summed loss and how many examples or tokens it sums over"

Sum: TypeAlias = "Tensor | float"  # a float where the loss function counted on the host


@final
class Copied:
    """A number on its way from a CUDA device; reading it waits for that copy alone, not for what was queued after it.

    The weight of a micro-batch is known before its backward pass: read so, it does not make the host wait for that.
    """

    def __init__(self, value: Tensor) -> None:
        self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        self._done.synchronize()
        return float(self._host)


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
        self.loss = loss.reshape(()) if loss.ndim else loss
        self.weight = _early(_as_scalar(weight, loss))
        metrics = returned[2] if len(returned) == 3 else {}
        if not isinstance(metrics, Mapping):
            raise ArgumentError(f"the metrics of loss_fn must be a mapping of sums, got {type(metrics).__name__}")
        self.metrics = {name: _as_scalar(value, loss) for name, value in metrics.items()}


def _as_scalar(value: Any, like: Tensor) -> Sum:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ArgumentError(f"weights and metrics must be single numbers, got shape {tuple(value.shape)}")
    return value.detach().reshape(()).to(like.device)


def _early(weight: Sum) -> Sum | Copied:
    return Copied(weight) if isinstance(weight, Tensor) and weight.is_cuda else weight


def _sum(numbers: Sequence[Sum | Copied]) -> Sum:
    """Return the sum, in more digits than a half-precision loss has; a float where all are on the host."""
    values = [number if isinstance(number, Tensor) and not number.is_cpu else float(number) for number in numbers]
    tensors = [value for value in values if isinstance(value, Tensor)]
    on_host = math.fsum(value for value in values if not isinstance(value, Tensor))
    if not tensors:
        return on_host
    wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    if any(value.dtype != tensors[0].dtype for value in tensors):
        tensors = [value.to(wide) for value in tensors]
    total = torch.stack(tensors).sum(dtype=wide) if len(tensors) > 1 else tensors[0].to(wide)
    return total + on_host if on_host else total


@final
class Totals:
    """Sums over the micro-batches of an update; what lies on the device is added up there once, when it is read."""

    def __init__(self) -> None:
        self._losses: list[Sum] = []
        self._weights: list[Sum | Copied] = []
        self._metrics: dict[str, list[Sum]] = {}
        self.num_examples = 0

    @property
    def num_micro_batches(self) -> int:
        """Return how many were added."""
        return len(self._losses)

    @property
    def loss(self) -> Sum:
        """Return the summed loss."""
        return _sum(self._losses)

    @property
    def weight(self) -> Sum:
        """Return what the loss was summed over."""
        return _sum(self._weights)

    @property
    def metrics(self) -> dict[str, Sum]:
        """Return the sum of each metric."""
        return {name: _sum(values) for name, values in self._metrics.items()}

    def add(self, sums: MicroSums, num_examples: int) -> None:
        """Add a micro-batch."""
        self._losses.append(sums.loss.detach())
        self._weights.append(sums.weight)
        for name, value in sums.metrics.items():
            self._metrics.setdefault(name, []).append(value)
        self.num_examples += num_examples

    def merge(self, other: Totals) -> None:
        """Add the totals of another batch of the same update."""
        self._losses += other._losses
        self._weights += other._weights
        for name, values in other._metrics.items():
            self._metrics.setdefault(name, []).extend(values)
        self.num_examples += other.num_examples


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


@final
class Summary(NamedTuple):
    """Sums of an update over all ranks; the weight and the counts are on the host, the rest may be on the device."""

    weight: float
    loss_sum: Tensor | float
    num_examples: int
    num_micro_batches: int
    ooms: int
    metric_sums: Mapping[str, Tensor | float]
    squares: Tensor | None


@final
@dataclass
class Pending:
    """What ``accumulate`` has gathered and ``update`` will use."""

    divisor: float | None  # backward runs on loss_sum / divisor; None: the first micro-batch decides
    fallback: float  # the divisor where weights do not count examples, a power of two
    weight_known: bool  # the divisor is the weight itself, so nothing is left to multiply
    foreign: list[tuple[nn.Parameter, Tensor]]  # gradients that were there before
    totals: Totals = field(default_factory=Totals)
    ooms: int = 0
    started: float = field(default_factory=time.perf_counter)
    summary: Summary | None = None
    noise: Callable[[], NoiseReport] | None = None
    is_reduced: bool = False

    def divide_by(self, weight: Tensor | Copied | float, num_examples: int, num_all: int) -> float:
        """Return the divisor; the first micro-batch of an update settles it.

        Where weights count examples, the whole batch weighs ``num_all``, and a micro-batch that is the whole batch has
        its weight: dividing by that leaves nothing to multiply afterwards. Elsewhere, and where the weight lies on a
        device that would have to be waited for, a power of two is divided by, which loses no digit.
        """
        if self.divisor is None:
            self.divisor = self.fallback
            if isinstance(weight, float) and weight == num_examples:
                self.divisor = float(num_all)
            elif num_examples == num_all and _is_on_host(weight) and 0 < float(weight) < math.inf:
                self.divisor = float(weight)
        return self.divisor


def _is_on_host(weight: Tensor | Copied | float) -> bool:
    return isinstance(weight, float) or (isinstance(weight, Tensor) and weight.is_cpu)
