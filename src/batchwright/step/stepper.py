"""Stepper: a logical batch of any size becomes one exact update, in micro-batches that fit."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, DoesNotFitError
from ..plan import Budget, MaxItems
from ..size.learning_rate import Rule, adascale, get_rule
from ..size.noise import NoiseAverage, estimate_noise
from ._apply import allocate_state, apply_update
from ._checks import batch_norm_warning, check_micro_batch, check_split, does_not_fit
from ._gradient_slots import add_back, drop_gradients, present, set_aside
from ._pending import Pending, Summary
from ._split import ExampleBatch, LogicalBatch, TensorBatch, cost_of, split
from ._sums import MicroSums, Totals, check_weight
from .couple import scaled_lr
from .distributed import Ranks
from .gradients import GradientNorms, squared_norm
from .limits import MicroLimit
from .losses import LossFunction
from .oom import Snapshot, devices_of, free_memory, is_out_of_memory
from .report import NoiseReport, StepReport

_Failure = tuple[float, list[int]]  # cost and examples of the micro-batch that did not fit


@final
class Stepper:
    """Run one update exactly, whatever the batch and the device: split, accumulate, reduce, update.

    The gradient is that of ``loss_sum / weight`` over the whole logical batch on all ranks. ``backward`` runs on
    ``loss_sum / c`` with ``c`` a power of two, which loses no digit, and the sum is multiplied once by ``c / W``.

    Args:
        model: a module, or one wrapped in ``DistributedDataParallel``.
        optimizer: updates its parameters.
        loss_fn: ``loss_fn(model, micro_batch) -> (loss_sum, weight)`` or ``(loss_sum, weight, {name: sum})``.
        micro_batch: how much runs at once: ``"auto"`` (everything, until memory says otherwise), a number of examples,
            a budget, or a controller with ``.size``.
        lengths: of a tensor batch ``lengths(batch) -> (B,) | (B, axes)``, of a list ``lengths(example)``.
        collate: makes a micro-batch of a list of examples.
        trim: cuts padding off a micro-batch of tensors.
        weight_of: the weight of a batch before it runs; needed with a scaler.
        clip_norm: clip the gradient to this norm.
        autocast: ``torch.bfloat16`` or ``torch.float16`` for the forward pass.
        scaler: a ``torch.amp.GradScaler``.
        on_oom: ``"split"`` runs the batch again in smaller pieces, ``"raise"`` hands the error on.
        measure_noise: estimate gradient noise; micro-batches are then random subsets, at least two.
        lr_rule: ``"linear"``, ``"sqrt"``, ``"adascale"`` or a function of ``(batch_size, base_size)``; scales the rate
            in ``optimizer.step`` alone.
        base_size: the batch size the optimizer's learning rate is meant for; needed with ``lr_rule``.

    >>> model = nn.Linear(2, 1)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return (model(x) - y).square().sum(), len(x)
    >>> stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batch=4)
    >>> report = stepper.step((torch.randn(10, 2), torch.randn(10, 1)))
    >>> report.batch_size, report.num_micro_batches
    (10, 3)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction,
        *,
        micro_batch: Literal["auto"] | int | Budget | Any = "auto",
        lengths: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        trim: Callable[[Any], Any] | None = None,
        weight_of: Callable[[Any], float | Tensor] | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_oom: Literal["split", "raise"] = "split",
        measure_noise: bool = False,
        lr_rule: str | Rule | None = None,
        base_size: int | None = None,
    ) -> None:
        self._ranks = Ranks(model)
        self._module = self._ranks.module
        self._parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise ArgumentError("the model has no trainable parameter; set requires_grad on those to train")
        self._device = self._parameters[0].device
        self._optimizer = optimizer
        if not callable(loss_fn):
            raise ArgumentError(f"loss_fn must be a function of (model, micro_batch), got {loss_fn!r}")
        self._loss_fn = loss_fn
        self._micro_batch = check_micro_batch(micro_batch, lengths)
        self._lengths, self._collate, self._trim, self._weight_of = lengths, collate, trim, weight_of
        if clip_norm is not None and not clip_norm > 0:
            raise ArgumentError(f"clip_norm must be above 0, got {clip_norm!r}")
        self._clip_norm = clip_norm
        self._autocast = autocast
        self._scaler = scaler
        if scaler is not None and scaler.is_enabled() and weight_of is None:
            raise ArgumentError(
                "a GradScaler needs the weight of a batch before it runs: weight_of=lambda batch: number of tokens; "
                "its skips depend on the size of gradients"
            )
        if on_oom not in ("split", "raise"):
            raise ArgumentError(f"on_oom must be 'split' or 'raise', got {on_oom!r}")
        self._on_oom = on_oom
        self._norms = GradientNorms(self._parameters) if measure_noise else None
        self._lr_rule = get_rule(lr_rule)
        if self._lr_rule is not None and (base_size is None or base_size < 1):
            raise ArgumentError(
                "lr_rule needs base_size, the batch size that the optimizer's learning rate is meant for"
            )
        if measure_noise and self._ranks.is_sharded:
            raise ArgumentError(
                "measure_noise needs whole gradients, which FSDP2 does not show; use DDP or leave it out"
            )
        if self._lr_rule == "adascale" and not measure_noise:
            raise ArgumentError("lr_rule='adascale' needs measure_noise=True")
        self._base_size = base_size or 1
        self._limit = MicroLimit()
        self._noise = NoiseAverage()
        self._num_updates = 0
        self._warned = False
        self._pending: Pending | None = None

    def step(self, batch: Any) -> StepReport:
        """Run one update on a logical batch: ``accumulate``, ``reduce``, ``update``."""
        self.accumulate(batch)
        self.reduce()
        return self.update()

    def accumulate(self, batch: Any, *, total_weight: float | None = None) -> None:
        """Add the gradient of a batch; several calls before ``reduce`` form one update.

        Args:
            batch: nested tensors, or a list of examples with ``collate``.
            total_weight: the weight of the whole update over all ranks, where a trainer knows it; the gradient is then
                complete without ``reduce`` for a single process.
        """
        if self._pending is not None and self._pending.is_reduced:
            raise ArgumentError("the gradient was reduced already; call update() before the next accumulate(batch)")
        logical = self._wrap(batch)
        is_new = self._pending is None
        pending = self._pending or self._begin(batch, logical, total_weight)
        held = set_aside(self._parameters)
        try:
            totals, parts = self._run_until_it_fits(logical, pending)
        except BaseException:
            # Nothing of this batch survives; what was there before it does.
            drop_gradients(self._parameters)
            add_back(held)
            add_back(pending.foreign if is_new else [])
            raise
        add_back(held)
        pending.totals.merge(totals)
        pending.is_reduced = False
        self._pending = pending
        self._limit = self._limit.after_success(max(cost_of(logical, part, self._cost_budget()) for part in parts))

    def _run_until_it_fits(self, logical: LogicalBatch, pending: Pending) -> tuple[Totals, list[list[int]]]:
        snapshot = Snapshot(self._module, devices_of(self._module))
        while True:
            parts = self._cut(logical)
            self._check_parts(parts)
            outcome = self._attempt(logical, parts, pending)
            if isinstance(outcome, Totals):
                return outcome, parts
            pending.ooms += 1
            self._recover(snapshot, outcome, logical)

    def reduce(self) -> None:
        """Sum gradients and weights over all ranks, and turn sums into the gradient of the mean."""
        pending = self._require_pending()
        if pending.is_reduced:
            return
        totals = pending.totals
        assert totals.loss is not None
        assert totals.weight is not None
        names = sorted(totals.metrics)
        squares = torch.zeros(()) if self._norms is None or self._norms.total is None else self._norms.total
        local: list[Tensor | float] = [
            totals.weight,
            totals.loss,
            totals.num_examples,
            totals.num_micro_batches,
            squares,
        ]
        weight, loss, num, parts, squares_sum, *metrics = self._ranks.sum(
            [*local, *(totals.metrics[name] for name in names)], self._device
        )
        pending.summary = Summary(weight, loss, round(num), round(parts), dict(zip(names, metrics, strict=True)))
        try:
            check_weight(weight)
        except ArgumentError:
            self._abandon()
            raise
        self._ranks.sum_gradients(self._parameters)
        gradients = present(self._parameters)
        factor = 1.0 if pending.weight_known else pending.divisor / weight
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)
        if self._norms is not None and parts >= 2:
            # Hooks saw gradients of loss_sum / divisor; per-example gradients are those of B × loss / W.
            scale = num * factor / self._loss_scale()
            pending.noise = self._estimate_noise(gradients, squares_sum * scale**2, round(num), round(parts))
        add_back(pending.foreign)
        pending.foreign = []
        pending.is_reduced = True

    def update(self) -> StepReport:
        """Unscale, clip and apply the gradient once; afterwards ``.grad`` is None."""
        pending = self._require_pending()
        if not pending.is_reduced:
            self.reduce()
        assert pending.summary is not None
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        norm = None
        if self._clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        rate = float(self._optimizer.param_groups[0]["lr"])
        factor = self._lr_factor(pending.summary.num_examples)
        with scaled_lr(self._optimizer, factor):
            apply_update(self._optimizer, self._parameters, self._scaler)
        self._optimizer.zero_grad(set_to_none=True)
        drop_gradients(self._parameters)
        self._ranks.share_buffers()
        self._num_updates += 1
        self._pending = None
        if self._norms is not None:
            self._norms.reset()
        return self._report(pending, rate * factor, norm)

    def warm_up(self) -> None:
        """Allocate the optimizer's state now, without changing a parameter, so that its first step cannot run out."""
        allocate_state(self._optimizer, self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned about memory and noise, as JSON values."""
        return {
            "version": 1,
            "limit": self._limit.to_state(),
            "noise": self._noise.to_state(),
            "num_updates": self._num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what another run learned."""
        if state.get("version") != 1:
            raise ArgumentError(f"the state of a Stepper has version 1, got {state.get('version')!r}")
        self._limit = MicroLimit.from_state(state["limit"])
        self._noise = NoiseAverage(**state["noise"])
        self._num_updates = state["num_updates"]

    def _wrap(self, batch: Any) -> LogicalBatch:
        if self._collate is not None and isinstance(batch, list):
            return ExampleBatch(batch, self._collate, self._lengths)
        return TensorBatch(batch, lengths=self._lengths, trim=self._trim)

    def _begin(self, batch: Any, logical: LogicalBatch, total_weight: float | None) -> Pending:
        """Choose what backward divides by, equal on all ranks, and take aside gradients that are not ours."""
        foreign = set_aside(self._parameters)
        if self._norms is not None:
            self._norms.reset()
        if total_weight is not None:
            return Pending(check_weight(float(total_weight)), True, foreign)
        if self._weight_of is not None:
            (weight,) = self._ranks.sum([torch.as_tensor(self._weight_of(batch))], self._device)
            return Pending(check_weight(weight), True, foreign)
        elements = self._ranks.maximum(logical.num_elements, self._device)
        return Pending(float(1 << (elements - 1).bit_length()), False, foreign)

    def _cost_budget(self) -> Budget | None:
        if isinstance(self._micro_batch, Budget):
            return self._micro_batch
        return None if self._micro_batch == "auto" else MaxItems(1)

    def _cut(self, logical: LogicalBatch) -> list[list[int]]:
        given = self._micro_batch
        asked = float("inf") if given == "auto" else 1.0 if isinstance(given, Budget) else float(_size_of(given))
        order = None
        if self._norms is not None:
            # Length-sorted parts are no random samples: their gradients differ by more than noise.
            order = np.random.default_rng([self._num_updates]).permutation(logical.num_examples)
        return split(
            logical,
            budget=self._cost_budget(),
            limit=min(asked, self._limit.ceiling),
            order=order,
            least_parts=1 if self._norms is None or self._ranks.world_size > 1 else 2,
        )

    def _attempt(self, logical: LogicalBatch, parts: list[list[int]], pending: Pending) -> Totals | _Failure:
        """Run all micro-batches; return their sums, or the micro-batch that ran out of memory."""
        totals = Totals()
        part: list[int] = []
        try:
            num_parts = self._ranks.agree_on_parts(len(parts), self._device)
            with self._ranks.no_sync():
                for part in parts:
                    self._run(logical.take(part), len(part), pending.divisor, totals)
                # Under FSDP2 a rank that is done helps the others with micro-batches that count for nothing.
                for _ in range(num_parts - len(parts)):
                    self._run(logical.take(parts[-1]), 0, math.inf, Totals())
            return totals
        except Exception as error:
            # A rank of FSDP2 cannot try again alone: the others wait for it inside their forward.
            if self._on_oom == "raise" or self._ranks.is_sharded or not is_out_of_memory(error):
                raise
        # Outside the except block: the traceback is gone, and with it the activations it held.
        return cost_of(logical, part, self._cost_budget()), part

    def _run(self, micro_batch: Any, num: int, divisor: float, totals: Totals) -> None:
        with self._autocast_context():
            sums = MicroSums(self._loss_fn(self._module, micro_batch))
        loss = sums.loss / divisor
        if self._norms is not None:
            self._norms.begin()
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        if self._norms is not None:
            self._norms.end(num)
        totals.add(sums, num)

    def _autocast_context(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _recover(self, snapshot: Snapshot, failure: _Failure, logical: LogicalBatch) -> None:
        """Undo a failed attempt and lower the ceiling, or say that one example does not fit."""
        cost, part = failure
        drop_gradients(self._parameters)
        if self._norms is not None:
            self._norms.reset()
        snapshot.restore()
        free_memory(devices_of(self._module))
        if len(part) == 1:
            raise DoesNotFitError(does_not_fit(logical, part[0], self._device))
        self._limit = self._limit.after_failure(cost)

    def _abandon(self) -> None:
        """Leave the gradients as they were before the update was begun."""
        pending, self._pending = self._pending, None
        drop_gradients(self._parameters)
        if pending is not None:
            add_back(pending.foreign)

    def _require_pending(self) -> Pending:
        if self._pending is None:
            raise ArgumentError("nothing was accumulated; call accumulate(batch) first, or step(batch) for all three")
        return self._pending

    def _loss_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _estimate_noise(self, gradients: list[Tensor], q: float, num: int, parts: int) -> tuple[float, float, int]:
        gb = float(squared_norm(gradients)) / self._loss_scale() ** 2
        s, g2 = estimate_noise(q, gb, num_examples=num, num_parts=parts)
        self._noise = self._noise.update(s, g2, num_examples=num)
        return s, g2, parts

    def _lr_factor(self, batch_size: int) -> float:
        if self._lr_rule is None:
            return 1.0
        if self._lr_rule == "adascale":
            if not self._noise.is_reliable:
                return 1.0
            return adascale(batch_size, self._base_size, s=self._noise.s, g2=self._noise.g2)
        return self._lr_rule(batch_size, self._base_size)

    def _check_parts(self, parts: list[list[int]]) -> None:
        check_split(self._loss_fn, parts)
        if len(parts) > 1 and not self._warned:
            self._warned = True
            warning = batch_norm_warning(self._module)
            if warning is not None:
                warnings.warn(warning, stacklevel=4)

    def _report(self, pending: Pending, rate: float, norm: Tensor | None) -> StepReport:
        assert pending.summary is not None
        summary = pending.summary
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        return StepReport(
            batch_size=summary.num_examples,
            num_micro_batches=summary.num_micro_batches,
            weight=summary.weight,
            ooms=pending.ooms,
            seconds=time.perf_counter() - pending.started,
            peak_bytes=peak,
            lr=rate,
            loss=summary.loss_sum / summary.weight,
            metrics={name: value / summary.weight for name, value in summary.metric_sums.items()},
            noise=None if pending.noise is None else NoiseReport(*pending.noise, self._noise.is_reliable),
            _grad_norm=norm,
        )


def _size_of(micro_batch: Any) -> int:
    return micro_batch if isinstance(micro_batch, int) else int(micro_batch.size)
