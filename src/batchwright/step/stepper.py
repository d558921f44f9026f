"""Stepper: a logical batch of any size becomes one exact update, in micro-batches that fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._ranks import Ranks
from ..errors import ArgumentError
from ..plan import Budget
from ..size.learning_rate import Rule, adascale, get_rule, scaled_lr
from ..size.noise import NoiseAverage
from ._optimizers import allocate_state, apply_update
from ._runner import Runner, Settings
from .losses import LossFunction
from .memory.budget_tracker import Feedback
from .memory.fit_to_memory import MicroLimit
from .memory.monitor import MemoryMonitor
from .noise import NoiseMeter
from .oom import add_back, drop_gradients, present, set_aside
from .report import Pending, StepReport, Summary, check_weight
from .splitting import LogicalBatch


@final
class Stepper:
    """Run one update exactly, whatever the batch and the device: split, accumulate, reduce, update.

    The gradient is that of ``loss_sum / weight`` over the whole logical batch on all ranks. ``backward`` runs on
    ``loss_sum / c``, where ``c`` is a power of two and so loses no digit, and the sum is multiplied once by ``c / W``.

    Args:
        model: a module, plain, in ``DistributedDataParallel`` or after ``fully_shard``.
        optimizer: updates the model's parameters.
        loss_fn: ``loss_fn(model, micro_batch) -> (loss_sum, weight)`` or ``(loss_sum, weight, {name: sum})``.
        micro_batch: how much runs at once: ``"auto"`` (everything, until memory runs out), a number of examples, a
            budget, or a controller with ``.size``.
        lengths: for tensors ``lengths(batch) -> (B,) | (B, axes)``, for a list of examples ``lengths(example)``.
        collate: makes a micro-batch from a list of examples.
        trim: cuts padding off a micro-batch of tensors.
        weight_of: returns the weight of a batch before it runs; needed with a scaler.
        clip_norm: clip the gradient to this norm.
        autocast: ``torch.bfloat16`` or ``torch.float16`` for the forward pass.
        scaler: a ``torch.amp.GradScaler``.
        on_oom: ``"split"`` runs the batch again in smaller pieces, ``"raise"`` raises the error.
        measure_noise: estimate gradient noise; micro-batches are then random subsets, at least two. A number ``n``
            measures only every n-th update, at an n-th of the cost.
        noise_groups: returns the group of a parameter's name, ``lambda name: name.split(".")[0]``; noise is then
            reported per group too.
        lr_rule: ``"linear"``, ``"sqrt"``, ``"adascale"`` or a function of ``(batch_size, base_size)``; it scales the
            rate only inside ``optimizer.step``.
        base_size: the batch size that the optimizer's learning rate is meant for; needed with ``lr_rule``.
        memory: reads the peak of every batch, for ``report.memory_fraction``. The peaks also tighten or relax a budget
            from a ``MemoryModel``; on CUDA they do so without this argument.

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
        measure_noise: bool | int = False,
        noise_groups: Callable[[str], str] | None = None,
        lr_rule: str | Rule | None = None,
        base_size: int | None = None,
        memory: MemoryMonitor | None = None,
    ) -> None:
        self._ranks = Ranks(model)
        named = [(name, value) for name, value in self._ranks.module.named_parameters() if value.requires_grad]
        if not named:
            raise ArgumentError("the model has no trainable parameter; set requires_grad on those to train")
        self._settings = Settings(
            loss_fn, micro_batch, lengths, collate, trim, weight_of, clip_norm, autocast, scaler, on_oom,
            measure_noise, lr_rule, base_size,
        )  # fmt: skip
        if measure_noise and self._ranks.is_sharded:
            raise ArgumentError(
                "measure_noise needs whole gradients, which FSDP2 does not show; use DDP or leave it out"
            )
        if noise_groups is not None and not measure_noise:
            raise ArgumentError("noise_groups needs measure_noise=True")
        self._parameters = [parameter for _, parameter in named]
        self._device = self._parameters[0].device
        self._optimizer = optimizer
        self._lr_rule = get_rule(lr_rule)
        self._meter = NoiseMeter(named, noise_groups) if measure_noise else None
        self._memory = memory
        self._feedback = Feedback.of(micro_batch, memory, self._device)
        self._runner = Runner(
            self._settings,
            self._ranks,
            self._parameters,
            norms=None if self._meter is None else self._meter.norms,
            feedback=self._feedback,
        )
        self._num_updates = 0
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
            total_weight: the weight of the whole update over all ranks, if a trainer knows it; a single process then
                has the complete gradient without ``reduce``.
        """
        if self._pending is not None and self._pending.is_reduced:
            raise ArgumentError("the gradient was reduced already; call update() before the next accumulate(batch)")
        logical = self._settings.wrap(batch)
        is_new = self._pending is None
        pending = self._pending or self._begin(batch, logical, total_weight)
        held = [] if is_new else set_aside(self._parameters)  # for a new update, _begin has set gradients aside
        try:
            due = self._meter is not None and self._num_updates % self._settings.measure_noise == 0
            totals = self._runner.run(logical, pending, noise_seed=self._num_updates if due else None)
        except BaseException:
            # Drop what this batch has added, and put back what was there before it.
            drop_gradients(self._parameters)
            add_back(held)
            add_back(pending.foreign if is_new else [])
            raise
        add_back(held)
        pending.totals.merge(totals)
        self._pending = pending

    def _begin(self, batch: Any, logical: LogicalBatch, total_weight: float | None) -> Pending:
        """Choose the divisor of the loss, equal on all ranks, and set aside gradients that are not ours."""
        foreign = set_aside(self._parameters)
        if self._meter is not None:
            self._meter.norms.reset()
        if self._memory is not None and self._feedback is None:
            self._memory.reset_peak()
        if total_weight is not None:
            return Pending(check_weight(float(total_weight)), 1.0, True, foreign)
        if self._settings.weight_of is not None:
            (weight,) = self._ranks.sum([self._settings.weight_of(batch)], self._device)
            return Pending(check_weight(float(weight)), 1.0, True, foreign)
        elements = self._ranks.maximum(logical.num_elements, self._device)
        power = float(1 << (elements - 1).bit_length())
        return Pending(None if self._ranks.world_size == 1 else power, power, False, foreign)

    def reduce(self) -> None:
        """Sum gradients and weights over all ranks, and turn sums into the gradient of the mean."""
        pending = self._require_pending()
        if pending.is_reduced:
            return
        summary = pending.summary = self._summarize(pending)
        try:
            check_weight(summary.weight)
        except ArgumentError:
            self._abandon()
            raise
        self._ranks.sum_gradients(self._parameters)
        assert pending.divisor is not None
        factor = 1.0 if pending.weight_known else pending.divisor / summary.weight
        if factor != 1 and (gradients := present(self._parameters)):
            torch._foreach_mul_(gradients, factor)
        if self._meter is not None and summary.squares is not None and summary.num_micro_batches >= 2:
            # Hooks saw gradients of loss_sum / divisor; noise is that of the per-example gradients of B × loss / W.
            scale = 1.0 if self._settings.scaler is None else float(self._settings.scaler.get_scale())
            pending.noise = self._meter.add(
                summary.squares,
                q_factor=(summary.num_examples * factor / scale) ** 2,
                gb_factor=scale**-2,
                num_examples=summary.num_examples,
                num_parts=summary.num_micro_batches,
            )
        add_back(pending.foreign)
        pending.foreign = []
        pending.is_reduced = True

    def _summarize(self, pending: Pending) -> Summary:
        """Return the sums over all ranks; one device copies nothing to the host but a weight that lies on it."""
        totals = pending.totals
        squares = None if self._meter is None else self._meter.norms.total
        if self._ranks.world_size == 1:
            counts = (totals.num_examples, totals.num_micro_batches, pending.ooms)
            return Summary(float(totals.weight), totals.loss, *counts, dict(totals.metrics), squares)
        names = sorted(totals.metrics)
        weight, num, parts, ooms, loss, *rest = self._ranks.sum(
            [totals.weight, totals.num_examples, totals.num_micro_batches, pending.ooms, totals.loss]
            + [totals.metrics[name] for name in names]
            + ([] if self._meter is None else self._local_squares(squares)),
            self._device,
        )
        metrics = dict(zip(names, rest, strict=False))
        summed = torch.tensor(rest[len(names) :], dtype=torch.float64) if self._meter is not None else None
        return Summary(weight, loss, round(num), round(parts), round(ooms), metrics, summed)

    def _local_squares(self, squares: Tensor | None) -> list[Tensor | float]:
        assert self._meter is not None
        return [0.0] * self._meter.norms.num_groups if squares is None else list(squares)

    def update(self) -> StepReport:
        """Unscale, clip and apply the gradient; afterwards ``.grad`` is None."""
        pending = self._require_pending()
        if not pending.is_reduced:
            self.reduce()
        assert pending.summary is not None
        scaler, clip_norm = self._settings.scaler, self._settings.clip_norm
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        norm = None if clip_norm is None else nn.utils.clip_grad_norm_(self._parameters, clip_norm)
        rate = float(self._optimizer.param_groups[0]["lr"])
        factor = self._lr_factor(pending.summary.num_examples)
        with scaled_lr(self._optimizer, factor):
            apply_update(self._optimizer, self._parameters, scaler)
        self._optimizer.zero_grad(set_to_none=True)
        drop_gradients(self._parameters)
        self._ranks.share_buffers()
        self._num_updates += 1
        self._pending = None
        if self._meter is not None:
            self._meter.norms.reset()
        return self._report(pending, rate * factor, norm)

    def warm_up(self) -> None:
        """Allocate the optimizer's state now, without changing a parameter, so that the first update cannot run out."""
        allocate_state(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned about memory and noise, as JSON values."""
        average = NoiseAverage() if self._meter is None else self._meter.average
        return {
            "version": 2,
            "limit": self._runner.limit.to_state(),
            "noise": average.to_state(),
            "num_updates": self._num_updates,
            "memory": None if self._feedback is None else self._feedback.tracker.to_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what another run learned."""
        if state.get("version") != 2:
            raise ArgumentError(f"the state of a Stepper has version 2, got {state.get('version')!r}")
        self._runner.limit = MicroLimit.from_state(state["limit"])
        if self._meter is not None:
            self._meter.average = NoiseAverage(**state["noise"])
        if self._feedback is not None and state["memory"] is not None:
            self._feedback.tracker = self._feedback.tracker.with_state(state["memory"])
        self._num_updates = state["num_updates"]

    def _abandon(self) -> None:
        """Put the gradients back as they were before the update began."""
        pending, self._pending = self._pending, None
        drop_gradients(self._parameters)
        if pending is not None:
            add_back(pending.foreign)

    def _require_pending(self) -> Pending:
        if self._pending is None:
            raise ArgumentError("nothing was accumulated; call accumulate(batch) first, or step(batch) for all three")
        return self._pending

    def _lr_factor(self, batch_size: int) -> float:
        if self._lr_rule is None:
            return 1.0
        base_size = self._settings.base_size or 1
        if self._lr_rule != "adascale":
            return self._lr_rule(batch_size, base_size)
        assert self._meter is not None
        average = self._meter.average
        return adascale(batch_size, base_size, s=average.s, g2=average.g2) if average.is_reliable else 1.0

    def _report(self, pending: Pending, rate: float, norm: Tensor | None) -> StepReport:
        assert pending.summary is not None
        summary = pending.summary
        seconds, peak, fraction = self._ranks.largest(
            [time.perf_counter() - pending.started, *self._read_memory()], self._device
        )
        return StepReport(
            batch_size=summary.num_examples,
            num_micro_batches=summary.num_micro_batches,
            weight=summary.weight,
            ooms=summary.ooms,
            seconds=seconds,
            peak_bytes=int(peak) if peak >= 0 else None,
            memory_fraction=fraction if fraction >= 0 else None,
            lr=rate,
            _loss_sum=summary.loss_sum,
            _metric_sums=summary.metric_sums,
            _noise=pending.noise,
            _grad_norm=norm,
        )

    def _read_memory(self) -> tuple[float, float]:
        """Return the peak and its share of the memory on this rank, -1 for a figure that is not known."""
        if self._memory is not None:
            return self._memory.peak_bytes, self._memory.peak_fraction
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else -1, -1
