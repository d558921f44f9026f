"""The runner of a Stepper: it runs the micro-batches of a logical batch, again and smaller until they fit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._checks import as_number, as_whole, check_choice, has_size, is_number, read_size
from .._ranks import Ranks
from .._tree import leaves
from ..errors import ArgumentError, DoesNotFitError
from ..plan import Budget, MaxItems
from ..size.learning_rate import Rule, get_rule
from .losses import LossFunction, needs_whole_batch
from .memory.budget_tracker import Feedback
from .memory.fit_to_memory import MicroLimit
from .noise import GradientNorms
from .oom import Buffers, Snapshot, devices_of, drop_gradients, free_memory, is_out_of_memory
from .report import MicroSums, Pending, Totals
from .splitting import LogicalBatch, Part, cost_of, split, wrap_batch

Parts: TypeAlias = Sequence[Part]
_Failure: TypeAlias = tuple[float, Part]  # cost and examples of the micro-batch that did not fit

_ITEMS = MaxItems(1)


@final
class Runner:
    """Runs forward and backward of every micro-batch and remembers how large one may be."""

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        parameters: Sequence[nn.Parameter],
        *,
        norms: GradientNorms | None,
        feedback: Feedback | None,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._parameters = parameters
        self._device = parameters[0].device
        self._devices = devices_of(ranks.module)
        self._buffers = Buffers(ranks.module)
        self._norms = norms
        self._feedback = feedback
        self._warned = False
        self.limit = MicroLimit()

    def run(self, logical: LogicalBatch, pending: Pending, *, noise_seed: int | None) -> Totals:
        """Add the gradient of a logical batch to ``.grad`` and return its sums.

        Args:
            logical: the batch.
            pending: the update it belongs to.
            noise_seed: seeds the random subsets that noise is measured on; None measures no noise.
        """
        snapshot = Snapshot(self._buffers, self._devices)
        if self._feedback is not None:
            self._feedback.begin()
        while True:
            parts = self._cut(logical, noise_seed)
            self._check(parts)
            outcome = self._attempt(logical, parts, pending, measure=noise_seed is not None)
            if isinstance(outcome, Totals):
                self._learn(logical, parts)
                return outcome
            pending.ooms += 1
            self._recover(snapshot, outcome, logical)

    def _cut(self, logical: LogicalBatch, seed: int | None) -> Parts:
        order = None
        if seed is not None:
            # Parts sorted by length are not random samples: their gradients differ by more than noise.
            order = np.random.default_rng([seed]).permutation(logical.num_examples)
        factor = 1.0 if self._feedback is None else self._feedback.factor
        return split(
            logical,
            budget=self._settings.cost_budget,
            limit=min(self._settings.asked * factor, self.limit.ceiling),
            order=order,
            least_parts=1 if seed is None or self._ranks.world_size > 1 else 2,
        )

    def _check(self, parts: Parts) -> None:
        check_split(self._settings.loss_fn, parts)
        if len(parts) > 1 and not self._warned:
            self._warned = True
            warning = batch_norm_warning(self._ranks.module)
            if warning is not None:
                warnings.warn(warning, stacklevel=5)

    def _attempt(self, logical: LogicalBatch, parts: Parts, pending: Pending, *, measure: bool) -> Totals | _Failure:
        """Run all micro-batches; return their sums, or the micro-batch that ran out of memory."""
        totals = Totals()
        part: Part = []
        try:
            num_parts = self._ranks.agree_on_parts(len(parts), self._device)
            micro_batches = iter(logical.take_all(parts))
            with self._ranks.no_sync():
                for part in parts:
                    sums = self._forward(next(micro_batches))  # unnamed, so that the inputs are freed after it
                    divisor = pending.divide_by(sums.weight, len(part), logical.num_examples)
                    self._backward(sums, divisor, num_measured=len(part) if measure else 0)
                    totals.add(sums, len(part))
                # Under FSDP2 a rank that is done keeps the others company: divided by infinity, its part is zero.
                for _ in range(num_parts - len(parts)):
                    self._backward(self._forward(logical.take(parts[-1])), math.inf)
            return totals
        except Exception as error:
            # Under FSDP2 a rank cannot try again on its own: the others wait for it inside their forward.
            if self._settings.on_oom == "raise" or self._ranks.is_sharded or not is_out_of_memory(error):
                raise
        # Outside the except block the traceback is gone, and with it the activations that it held.
        return cost_of(logical, part, self._settings.cost_budget), part

    def _forward(self, micro_batch: Any) -> MicroSums:
        with self._settings.precision(self._device):
            return MicroSums(self._settings.loss_fn(self._ranks.module, micro_batch))

    def _backward(self, sums: MicroSums, divisor: float, *, num_measured: int = 0) -> None:
        loss: torch.Tensor = sums.loss / divisor
        if self._settings.scaler is not None:
            loss = self._settings.scaler.scale(loss)
        if self._norms is None or num_measured == 0:
            loss.backward()
            return
        self._norms.begin()
        loss.backward()
        self._norms.end(num_measured)

    def _learn(self, logical: LogicalBatch, parts: Parts) -> None:
        if math.isfinite(self.limit.ceiling):
            largest = max(cost_of(logical, part, self._settings.cost_budget) for part in parts)
            self.limit = self.limit.after_success(largest)
        if self._feedback is not None and logical.lengths is not None:
            self._feedback.end([(len(part), *logical.lengths[part].max(axis=0).tolist()) for part in parts])

    def _recover(self, snapshot: Snapshot, failure: _Failure, logical: LogicalBatch) -> None:
        """Undo a failed attempt and lower the ceiling, or say that one example does not fit."""
        cost, part = failure
        drop_gradients(self._parameters)
        if self._norms is not None:
            self._norms.reset()
        snapshot.restore()
        free_memory(self._devices)
        if len(part) == 1:
            raise DoesNotFitError(does_not_fit(logical, part[0], self._device))
        self.limit = self.limit.after_failure(cost)


@final
@dataclass(frozen=True)
class Settings:
    """The arguments of a Stepper, checked once and kept as plain values; ``measure_noise`` becomes 0 for never."""

    loss_fn: LossFunction
    micro_batch: Any
    lengths: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any] | None
    trim: Callable[[Any], Any] | None
    weight_of: Callable[[Any], float | Tensor] | None
    clip_norm: float | None
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None
    on_oom: Literal["split", "raise"]
    measure_noise: int
    lr_rule: str | Rule | None
    base_size: int | None

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise ArgumentError(f"loss_fn must be a function of (model, micro_batch), got {self.loss_fn!r}")
        self._keep("micro_batch", _as_micro_batch(self.micro_batch, self.lengths))
        if self.clip_norm is not None:
            self._keep("clip_norm", as_number("clip_norm", self.clip_norm, above=0, infinite=True))
        if self.scaler is not None and self.scaler.is_enabled() and self.weight_of is None:
            raise ArgumentError(
                "a GradScaler needs the weight of a batch before it runs: weight_of=lambda batch: number of tokens; "
                "its skips depend on the size of gradients"
            )
        check_choice("on_oom", self.on_oom, ("split", "raise"))
        self._keep("measure_noise", _as_interval(self.measure_noise))
        self._check_rate()

    def _check_rate(self) -> None:
        if self.base_size is not None:
            self._keep("base_size", as_whole("base_size", self.base_size, least=1))
        rule = get_rule(self.lr_rule)
        if rule is not None and self.base_size is None:
            raise ArgumentError(
                "lr_rule needs base_size, the batch size that the optimizer's learning rate is meant for"
            )
        if rule == "adascale" and not self.measure_noise:
            raise ArgumentError("lr_rule='adascale' needs measure_noise=True")

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def wrap(self, batch: Any) -> LogicalBatch:
        """Return the batch as something that can be split."""
        return wrap_batch(batch, collate=self.collate, lengths=self.lengths, trim=self.trim, split=None)

    @property
    def cost_budget(self) -> Budget | None:
        """Return what counts the cost of a micro-batch: the budget given, a number of items, or None for tokens."""
        if isinstance(self.micro_batch, Budget):
            return self.micro_batch
        return None if isinstance(self.micro_batch, str) else _ITEMS

    @property
    def asked(self) -> float:
        """Return the most that a micro-batch may cost by the setting, whatever memory says."""
        given = self.micro_batch
        if isinstance(given, Budget):
            return 1.0
        if isinstance(given, str):
            return math.inf
        return given if isinstance(given, int) else read_size(given, "micro_batch")

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


def _as_micro_batch(value: Any, lengths: Any) -> Any:
    if isinstance(value, Budget):
        if lengths is None:
            raise ArgumentError(f"micro_batch={value} needs lengths=, the lengths of the examples of a batch")
        return value
    if (isinstance(value, str) and value == "auto") or has_size(value):
        return value
    if is_number(value):
        return as_whole("micro_batch", value, least=1)
    raise ArgumentError(f"micro_batch must be 'auto', a number of 1 or more, a budget or a controller, got {value!r}")


def _as_interval(value: Any) -> int:
    """Return the number of updates from one measurement of noise to the next, 0 for never."""
    if isinstance(value, bool | np.bool_):
        return int(value)
    return as_whole("measure_noise, if not True or False,", value, least=0)


def check_split(loss_fn: LossFunction, parts: Parts) -> None:
    """Refuse to split a batch whose loss compares its examples."""
    if len(parts) > 1 and needs_whole_batch(loss_fn):
        raise ArgumentError(
            f"this loss compares the examples of a batch, so {len(parts)} micro-batches would change it; "
            "use a smaller logical batch, activation checkpointing, or a loss with cached embeddings"
        )


def batch_norm_warning(module: nn.Module) -> str | None:
    """Return a warning about BatchNorm in training mode, None if the module has none."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.training:
            return (
                f"BatchNorm in training mode ({name}) sees micro-batches, not the batch: its statistics, and so the "
                "update, depend on the split. Use GroupNorm or LayerNorm, or put it into eval mode"
            )
    return None


def does_not_fit(logical: LogicalBatch, index: int, device: torch.device) -> str:
    """Return the error text about an example that runs out of memory on its own."""
    length = "" if logical.lengths is None else f" of length {logical.lengths[index].tolist()}"
    tensors = [(tuple(tensor.shape), tensor.nbytes) for tensor in leaves(logical.take([index]))]
    size = sum(num_bytes for _, num_bytes in tensors)
    free = ""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        free = f"; {available / 2**30:.2f} of {total / 2**30:.2f} GiB are free on {device}"
    return (
        f"example {index} of the batch{length} does not fit on its own: tensors {[shape for shape, _ in tensors]}, "
        f"{size:,} bytes of input{free}. Shorten it, use a smaller model or activation checkpointing"
    )
