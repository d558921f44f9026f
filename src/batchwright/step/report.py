"""The figures of an update: the report of one that is done, and the sums that it is made from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError
from ._copies import Copied, Number
from ._gradients import Gradients
from ._settings import doubt_of
from .measuring._stopwatch import Lap
from .noise import NoiseReport

Sum: TypeAlias = "Tensor | float"  # a float where the loss function counted on the host

HOW = "return (loss_sum, weight): the summed loss and how many examples or tokens it sums over"


@final
@dataclass(frozen=True, repr=False)
class StepReport:
    """The figures of one update, over all ranks.

    Losses, metrics, noise and the gradient's norm are on their way from the device when the report comes; reading one
    waits for its own update only, not for one that began later. Memory is that of the fullest rank. ``tokens`` is what
    ``tokens_of`` or ``lengths`` counted, None without them. ``beta2`` is what ``beta2_rule`` made of it for the first
    group that has one. ``graphed`` says that every micro-batch of this rank was replayed from a graph, and
    ``recompilations`` how many graphs torch.compile made on this rank in the meantime.
    """

    batch_size: int
    num_micro_batches: int
    weight: float
    ooms: int
    _seconds: Lap | float
    peak_bytes: int | None
    memory_fraction: float | None
    lr: float | None
    _loss_sum: Number
    _metric_sums: Mapping[str, Number]
    _noise: Callable[[], NoiseReport] | None = None
    _grad_norm: Number | None = None
    graphed: bool = False
    recompilations: int = 0
    tokens: int | None = None
    beta2: float | None = None

    def __repr__(self) -> str:
        figures = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "seconds": self.seconds}
        counts = f"batch_size={self.batch_size}, num_micro_batches={self.num_micro_batches}, ooms={self.ooms}"
        return f"StepReport({counts}" + "".join(f", {k}={v:.4g}" for k, v in figures.items() if v is not None) + ")"

    @property
    def seconds(self) -> float:
        """Return the time of the slowest rank; on CUDA that of the device, which reading it waits for."""
        return float(self._seconds)

    @property
    def loss(self) -> float:
        """Return the mean loss ``loss_sum / weight``."""
        return float(self._loss_sum) / self.weight

    @property
    def metrics(self) -> dict[str, float]:
        """Return the mean of every named sum that loss_fn returned."""
        return {name: float(value) / self.weight for name, value in self._metric_sums.items()}

    @property
    def noise(self) -> NoiseReport | None:
        """Return the gradient noise, None if it was not measured."""
        return None if self._noise is None else self._noise()

    @property
    def grad_norm(self) -> float | None:
        """Return the norm of the gradient before clipping, None without ``clip_norm``."""
        return None if self._grad_norm is None else float(self._grad_norm)

    @property
    def entropy(self) -> float | None:
        """Return the mean entropy, None unless loss_fn returned its sum."""
        value = self._metric_sums.get("entropy")
        return None if value is None else float(value) / self.weight

    def observation(self) -> dict[str, Any]:
        """Return what a batch-size policy observes: ``controller.observe(**report.observation())``."""
        noise = self.noise
        return {
            "batch_size": self.batch_size,
            "batch_tokens": self.tokens,
            "loss": self.loss,
            "lr": self.lr,
            "entropy": self.entropy,
            "noise_s": None if noise is None else noise.s,
            "noise_g2": None if noise is None else noise.g2,
            "noise_reliable": None if noise is None else noise.reliable,
            "noise_parts": None if noise is None else noise.num_parts,
            "seconds": self.seconds,
            "memory_fraction": self.memory_fraction,
        }


@final
class MicroSums:
    """The sums of one micro-batch.

    Attributes:
        is_empty: it has no weight, and its loss is no number or constant: it sums over nothing and has no gradient.
        is_doubtful: it has no weight and a loss of 0, whose gradient may be no number.
        doubt: whether the graph of the loss looks like that of a mean.

    Args:
        returned: by the loss function.
        is_replayed: a graph is captured, so nothing is copied to the host.
    """

    def __init__(self, returned: Any, *, is_replayed: bool = False) -> None:
        if isinstance(returned, Tensor):
            raise ArgumentError(f"loss_fn returned only a tensor, which looks like a mean; {HOW}")
        if not isinstance(returned, tuple) or len(returned) not in (2, 3):
            raise ArgumentError(f"loss_fn returned {type(returned).__name__}; {HOW}")
        loss, weight = returned[:2]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ArgumentError(f"loss_sum must be a tensor with one element, got {shape}; {HOW}")
        if isinstance(weight, Tensor) and weight.requires_grad:
            raise ArgumentError(
                "the weight depends on trainable parameters, and the gradient of such a quotient is no sum over "
                "micro-batches; return weight.detach(), or put that dependence into loss_sum"
            )
        self.loss = loss.reshape(()) if loss.ndim else loss
        self.weight = _as_scalar(weight, loss) if is_replayed else _early(_as_scalar(weight, loss))
        # The mean over nothing is NaN, and so are its gradients.
        is_known = isinstance(self.weight, float) if is_replayed else is_on_host(self.weight)
        is_none = is_known and float(self.weight) == 0
        value = float(loss.detach()) if is_none else math.nan
        self.is_empty = is_none and (not math.isfinite(value) or (value == 0 and not loss.requires_grad))
        self.is_doubtful = is_none and value == 0 and loss.requires_grad
        if not loss.requires_grad and not self.is_empty:
            raise ArgumentError(
                "loss_sum does not depend on any trainable parameter; is the model frozen, or under no_grad?"
            )
        self.doubt = None if is_replayed else doubt_of(loss, float(self.weight) if is_on_host(self.weight) else None)
        metrics = returned[2] if len(returned) == 3 else {}
        if not isinstance(metrics, Mapping):
            raise ArgumentError(f"the metrics of loss_fn must be a mapping of sums, got {type(metrics).__name__}")
        self.metrics = {name: _as_scalar(value, loss) for name, value in metrics.items()}

    @classmethod
    def of_replay(cls, loss: Tensor, weight: Sum, metrics: Mapping[str, Sum]) -> MicroSums:
        """Return the sums that a graph has computed; its backward pass is no longer to do."""
        sums = object.__new__(cls)
        sums.loss, sums.weight, sums.metrics = loss, _early(weight), dict(metrics)
        sums.is_empty = sums.is_doubtful = False
        sums.doubt = None
        return sums


def _as_scalar(value: Any, like: Tensor) -> Sum:
    if not isinstance(value, Tensor):
        try:
            return float(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"weights and metrics must be single numbers, got {type(value).__name__}; {HOW}"
            ) from None
    if value.numel() != 1:
        raise ArgumentError(f"weights and metrics must be single numbers, got shape {tuple(value.shape)}")
    found = value.detach().reshape(()).to(like.device)
    # A buffer that every forward pass adds to would show its newest value in all sums.
    return found.clone() if not value.is_inference() and value._version > 0 else found


def _early(weight: Sum) -> Sum | Copied:
    return Copied(weight) if isinstance(weight, Tensor) and weight.is_cuda else weight


@final
class Totals:
    """Sums over the micro-batches of an update; numbers on the device are added up there once, when they are read."""

    def __init__(self) -> None:
        self._losses: list[Sum] = []
        self._weights: list[Sum | Copied] = []
        self._metrics: dict[str, list[Sum]] = {}
        self._counts: list[int | Copied] = []
        self._num_rows = 0
        self.num_doubtful = 0
        self.num_tokens: int | None = 0  # None if nobody counts them

    @property
    def num_micro_batches(self) -> int:
        """Return how many micro-batches were added."""
        return len(self._losses)

    @property
    def num_examples(self) -> int:
        """Return how many examples were added; filler rows are none."""
        return sum(round(float(count)) for count in self._counts)

    @property
    def loss(self) -> Sum:
        """Return the summed loss."""
        return _sum(self._losses)

    @property
    def weight(self) -> Sum:
        """Return how many examples or tokens the loss was summed over."""
        return _sum(self._weights)

    @property
    def metrics(self) -> dict[str, Sum]:
        """Return the sum of each metric."""
        return {name: _sum(values) for name, values in self._metrics.items()}

    @property
    def num_filler(self) -> int:
        """Return how many rows were no examples."""
        return self._num_rows - self.num_examples

    def add(self, sums: MicroSums, num_examples: int | Copied, num_rows: int) -> None:
        """Add the numbers of examples and rows of a micro-batch."""
        self._losses.append(0.0 if sums.is_empty else sums.loss.detach())
        self._weights.append(sums.weight)
        for name, value in sums.metrics.items():
            is_counted = not sums.is_empty or math.isfinite(value)
            self._metrics.setdefault(name, []).append(value if is_counted else 0.0)
        self._counts.append(num_examples)
        self._num_rows += num_rows
        self.num_doubtful += sums.is_doubtful

    @property
    def are_weights_on_host(self) -> bool:
        """Return whether the weight can be read without waiting for a device."""
        return all(map(is_on_host, self._weights))

    @property
    def num_spoiled(self) -> int:
        """Return how many micro-batches have no weight and a loss that is no number, which was seen too late.

        Only weights on a device are read after the backward pass; others are left out before it.
        """
        pairs = zip(self._losses, self._weights, strict=True)
        return sum(isinstance(w, Copied) and float(w) == 0 and not math.isfinite(loss) for loss, w in pairs)

    def merge(self, other: Totals) -> None:
        """Add the totals of another batch of the same update."""
        self._losses += other._losses
        self._weights += other._weights
        for name, values in other._metrics.items():
            self._metrics.setdefault(name, []).extend(values)
        self._counts += other._counts
        self._num_rows += other._num_rows
        is_known = self.num_tokens is not None and other.num_tokens is not None
        self.num_tokens = self.num_tokens + other.num_tokens if is_known else None  # type: ignore[operator]


def _sum(numbers: Sequence[Sum | Copied]) -> Sum:
    """Return the sum, in more digits than a half-precision loss has; a float if all numbers are on the host."""
    values = [number if isinstance(number, Tensor) and not number.is_cpu else float(number) for number in numbers]
    tensors = [value for value in values if isinstance(value, Tensor)]
    on_host = _exact_sum([value for value in values if not isinstance(value, Tensor)])
    if not tensors:
        return on_host
    wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    if any(value.dtype != tensors[0].dtype for value in tensors):
        tensors = [value.to(wide) for value in tensors]
    total = torch.stack(tensors).sum(dtype=wide) if len(tensors) > 1 else tensors[0].to(wide)
    return total + on_host if on_host else total


def _exact_sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the largest number
        return sum(values)


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
    asked_weight: float | None
    num_spoiled: int
    num_tokens: int | None = None


@final
@dataclass
class Pending:
    """What ``accumulate`` has gathered and ``update`` will use.

    Attributes:
        gradients: of the parameters that the update trains.
        started: when it began, by the host's clock.
        lap: times it on the device, None where the host's clock tells the time.
        total_weight: of the whole update, if a trainer knows it.
        asked_weight: what ``weight_of`` has counted so far on this rank, None without it.
        is_measured: whether gradient noise is measured.
        noise_seed: seeds the random subsets that noise is measured on, None if it needs none.
        leaves_out: micro-batches of weight 0 and loss 0 have gradients that are no numbers, and are left out.
        divisor: backward runs on ``loss_sum / divisor``; the first micro-batch settles it.
        same_names: whether metrics have the same names on all ranks.
        num_replayed: micro-batches that were replayed from graphs on this rank.
        num_compiled_before: what torch.compile had compiled when the update began.
        stage: how far the update is: gathered, reduced, or unscaled and clipped.
    """

    gradients: Gradients
    started: float
    lap: Lap | None = None
    total_weight: float | None = None
    asked_weight: float | None = None
    is_measured: bool = False
    noise_seed: int | None = None
    leaves_out: bool = False
    divisor: float | None = None
    totals: Totals = field(default_factory=Totals)
    ooms: int = 0
    summary: Summary | None = None
    noise: Callable[[], NoiseReport] | None = None
    same_names: bool = True
    num_replayed: int = 0
    num_compiled_before: int = 0
    stage: Literal["gathered", "reduced", "clipped"] = "gathered"
    norm: Tensor | None = None
    beta2: float | None = None


def num_compilations() -> int:
    """Return how many graphs torch.compile has compiled in this process; 0 if it was never used.

    A function without breaks is one graph per compilation. Nothing is imported, so it costs next to nothing.

    >>> num_compilations() >= 0
    True
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)  # absent while another thread imports it
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


def is_on_host(weight: Tensor | Copied | float) -> bool:
    """Return whether a weight can be read without waiting for a device."""
    return isinstance(weight, float) or (isinstance(weight, Tensor) and weight.is_cpu)


def power_of_two(value: float) -> float:
    """Return the power of two nearest to a value, 1 for a value that has none.

    >>> power_of_two(100.0), power_of_two(0.0)
    (128.0, 1.0)
    """
    if not 0 < value < math.inf:
        return 1.0
    return 2.0 ** round(math.log2(value))


def check_summary(summary: Summary) -> None:
    """Refuse an update that has no mean, or for which ``weight_of`` and ``loss_fn`` count differently."""
    check_weight(summary.weight)
    if summary.num_spoiled:
        raise ArgumentError(
            f"{summary.num_spoiled} micro-batches have weight 0 and a loss that is not a number, as is their gradient; "
            "return a loss of 0 for them, or the weight as a number of Python, and they are left out"
        )
    asked, found = summary.asked_weight, summary.weight
    if asked is not None and not math.isclose(asked, found, rel_tol=1e-5):
        raise ArgumentError(
            f"weight_of counted {asked:g} for this update, but loss_fn returned weights of {found:g}; both must count "
            "the same examples or tokens"
        )


def check_weight(weight: float) -> float:
    """Return a total weight, or refuse one that allows no mean."""
    if math.isnan(weight) or math.isinf(weight):
        raise ArgumentError(f"the weight of the batch is {weight}; loss_fn must count finite examples or tokens")
    if weight <= 0:
        raise ArgumentError(
            f"the weight of the batch is {weight:g}, so there is no mean loss; "
            "are all labels masked? Leave such batches out"
        )
    return weight
