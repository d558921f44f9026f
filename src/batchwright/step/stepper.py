"""Stepper: a logical batch of any size becomes one exact update, in micro-batches that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._checks import as_number, as_state, is_same, read_whole
from .._ranks import Ranks
from ..errors import ArgumentError
from ..plan import Budget, PadTo
from ..size.learning_rate import Beta2Rule, Rule, adascale, current_lr, get_beta2_rule, get_rule, scaled_lr
from ..size.momentum import (
    MADE_AT,
    MADE_FOR,
    Beta2s,
    beta2s_for,
    changed_beta2,
    check_beta2,
    follow_beta2,
    follow_noise,
    forget_size,
)
from ..size.noise import NoiseAverage
from ._copies import copied_numbers
from ._gathering import Gatherer
from ._gradients import Existing, Trained, attempt
from ._optimizers import allocate_state, apply_update, check_optimizer, clip, take_over
from ._settings import Settings
from .graphs.backend import GraphBackend
from .graphs.graphed import Graphs
from .graphs.summary import GraphSummary
from .losses import LossFunction
from .memory.budget_tracker import Feedback
from .memory.fit_to_memory import MicroLimit
from .memory.monitor import MemoryMonitor
from .noise import Meter, NoiseMeter, VectorMeter
from .report import Pending, StepReport, num_compilations


@final
class Stepper:
    """Run one update exactly, whatever the batch and the device: split, accumulate, reduce, update.

    The gradient is that of ``loss_sum / weight`` over the whole logical batch on all ranks. ``backward`` runs on
    ``loss_sum / c``, where ``c`` is a power of two and so loses no digit, and the sum is multiplied once by ``c / W``.

    Args:
        model: a module, plain, in ``DistributedDataParallel`` or after ``fully_shard``.
        optimizer: its parameters are trained, of the model or not; it is asked for them at every update.
        loss_fn: ``loss_fn(model, micro_batch) -> (loss_sum, weight)`` or ``(loss_sum, weight, {name: sum})``. It may
            run again after out of memory, so it must have no side effects. A ``WholeBatchLoss`` compares examples.
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
        noise_parts: measure noise on exactly this many micro-batches of a batch, equal up to one example; more where
            they do not fit in memory or ``micro_batch``, fewer for a batch of fewer examples. Ranks cut their own
            shares into equally many parts each: uneven shares give uneven parts. ``report.noise.num_parts`` says how
            many there were. None measures on as many as the batch is run in.
        noise_from: what noise is measured in. ``"all"``: the gradients of micro-batches. ``"vectors"``: the gradient of
            every example in the biases of norm layers (their weights without biases; biases of other layers without
            norms), from the same backward pass: it costs little, and batches are not split. The noise of the whole is
            that times a ratio, from the 1st, 32nd and every 64th measured update, which measures both.
        noise_groups: returns the group of a parameter's name, ``lambda name: name.split(".")[0]``; noise is then
            reported per group too.
        lr_rule: ``"linear"``, ``"sqrt"``, ``"adascale"`` or a function of ``(batch_size, base_size)``; it scales the
            rate only inside ``optimizer.step``.
        base_size: the batch size that the optimizer's learning rate and betas are meant for; needed with ``lr_rule``
            and ``beta2_rule``.
        memory: reads the peak of every batch, for ``report.memory_fraction``. The peaks also tighten or relax a budget
            from a ``MemoryModel``; on CUDA they do so without this argument.
        existing_gradients: what happens to gradients that are there when an update begins: ``"clear"`` drops them, as
            the ``zero_grad()`` of a loop by hand would, and warns once if they were not zero; ``"add"`` adds them.
        split: cuts batches that do not have one row per example everywhere, such as graphs or patches of images:
            ``split(batch, None)`` returns the number of examples, ``split(batch, indices)`` the micro-batch of some.
        graphs: True captures forward and backward of every planned shape, and the update, in CUDA graphs and replays
            them: a step that launches many small kernels then costs only its arithmetic. ``"auto"`` keeps graphs only
            where they pay, and runs eagerly without CUDA. What was not planned or cannot be captured runs eagerly:
            ``graph_summary()`` says why, and a warning does once if that holds for every step.
        shapes: the catalogue of ``graphs``: ``plan.shapes``, or the sampler; None captures shapes that come again.
            With a sampler of static shapes, lists of examples are cut into micro-batches of these shapes.
        beta2_rule: ``"half_life"`` or a function of ``(batch_size, base_size, beta2)`` that returns another ``beta2``
            for the second of an optimizer's ``betas``, only inside ``optimizer.step``. Bias corrections of Adam, AdamW,
            NAdam, RAdam and SparseAdam stay right when it changes; for others whose correction is unknown it warns.
        tokens_of: returns the tokens of a batch, for ``report.tokens``; None counts ``lengths`` where they are given.

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
        existing_gradients: Existing = "clear",
        split: Callable[[Any, Any], Any] | None = None,
        graphs: bool | Literal["auto"] | GraphBackend = False,
        shapes: Any = None,
        noise_parts: int | None = None,
        noise_from: Literal["all", "vectors"] = "all",
        beta2_rule: str | Beta2Rule | None = None,
        tokens_of: Callable[[Any], int] | None = None,
    ) -> None:
        self._ranks = Ranks(model)
        self._settings = Settings(
            loss_fn, micro_batch, lengths, collate, trim, weight_of, clip_norm, autocast, scaler, on_oom,
            measure_noise, lr_rule, base_size, existing_gradients, split, noise_parts, noise_from, beta2_rule,
            tokens_of,
        )  # fmt: skip
        if measure_noise and self._ranks.is_sharded:
            raise ArgumentError(
                "measure_noise needs whole gradients, which FSDP2 does not show; use DDP or leave it out"
            )
        if noise_parts is not None and noise_parts % self._ranks.world_size:
            raise ArgumentError(
                f"noise_parts are shared by the ranks, so {noise_parts} must be a multiple of their number, "
                f"{self._ranks.world_size}"
            )
        if noise_groups is not None and not (measure_noise and noise_from == "all"):
            raise ArgumentError("noise_groups needs measure_noise=True and noise_from='all'")
        check_optimizer(optimizer)
        self._beta2_rule = get_beta2_rule(beta2_rule)
        if self._beta2_rule is not None:
            check_beta2(optimizer)
        self._optimizer = optimizer
        self._trained = Trained(self._ranks, optimizer)
        self._device = self._trained.parameters[0].device
        self._lr_rule = get_rule(lr_rule)
        self._meter = self._make_meter(noise_groups)
        self._memory = memory
        self._feedback = Feedback.of(micro_batch, memory, self._device)
        self._gatherer = Gatherer(
            self._settings, self._ranks, self._trained, meter=self._meter, memory=memory, feedback=self._feedback
        )
        self._graphs = self._make_graphs(graphs, shapes)
        self._gatherer.runner.graphs = self._graphs

    def _make_meter(self, groups: Callable[[str], str] | None) -> Meter | None:
        if not self._settings.measure_noise:
            return None
        named = self._trained.named()
        return (
            NoiseMeter(named, groups) if self._settings.noise_from == "all" else VectorMeter(self._ranks.module, named)
        )

    def _make_graphs(self, graphs: Any, shapes: Any) -> Graphs | None:
        if graphs is False:
            if shapes is not None:
                raise ArgumentError("shapes= is the catalogue of graphs; pass graphs=True or graphs='auto' too")
            return None
        pad_to = getattr(shapes, "pad_to", None)
        if isinstance(pad_to, PadTo) and pad_to.shapes:
            self._gatherer.runner.pad_to = pad_to
        return Graphs(graphs, shapes, self._settings, self._ranks, self._trained, self._gatherer.runner.snapshot)

    def step(self, batch: Any) -> StepReport:
        """Run one update on a logical batch: ``accumulate``, ``reduce``, ``update``.

        After an error the update is abandoned, and the next ``step`` works. If the batch itself failed, what earlier
        ``accumulate`` calls have gathered stays.
        """
        self._gatherer.add(batch, None)
        try:
            self._gatherer.reduce(self._require_pending())
            return self.update()
        except BaseException:
            self.abandon()
            raise

    def accumulate(self, batch: Any, *, total_weight: float | None = None) -> None:
        """Add the gradient of a batch; several calls before ``reduce`` form one update.

        All ranks call it equally often. If the batch of one rank fails, all ranks raise, and no batch counts.

        Args:
            batch: nested tensors, or a list of examples with ``collate``.
            total_weight: the weight of the whole update over all ranks, if a trainer knows it; a single process then
                has the complete gradient without ``reduce``, except that hooks on parameters have not seen it. It is
                the same in every call of an update.
        """
        self._gatherer.add(batch, total_weight)
        if total_weight is not None:
            self._trained.gradients.show()
        self._trained.gradients.watch()

    def reduce(self) -> None:
        """Sum gradients and weights over all ranks, and turn sums into the gradient of the mean."""
        pending = self._require_pending()
        if pending.stage == "gathered":
            _, error = attempt(pending.gradients.check_untouched)
            self._ranks.agree(error, self._device)
            self._gatherer.reduce(pending)

    def update(self) -> StepReport:
        """Unscale, clip and apply the gradient; afterwards ``.grad`` is None.

        If the optimizer runs out of memory before it has changed anything (``error.can_retry``), ``update`` can be
        called again. After any other error the update is abandoned.
        """
        pending = self._require_pending()
        if pending.stage == "gathered":
            self.reduce()
        try:
            applied, error = attempt(lambda: self._apply(pending))
            if self._ranks.world_size > 1:
                parameters = self._trained.parameters
                take_over(self._ranks, self._optimizer, parameters, self._settings.scaler, error, self._device)
            elif error is not None:
                raise error
        except BaseException as caught:
            if self._gatherer.pending is None or self._ranks.world_size > 1:
                self._gatherer.end()  # the update is done, here or on another rank, and only what follows has failed
            elif not getattr(caught, "can_retry", False):
                self.abandon()  # a second attempt could apply parts of the update twice
            raise
        self._gatherer.end()
        return self._report(pending, applied)

    def _apply(self, pending: Pending) -> float | None:
        """Run the optimizer's step, and return the learning rate that it used."""
        assert pending.summary is not None
        scaler, clip_norm = self._settings.scaler, self._settings.clip_norm
        self._gatherer.check_same_parameters()
        factor = self._lr_factor(pending.summary.num_examples)
        rate = current_lr(self._optimizer)
        beta2s = self._beta2s(pending.summary.num_examples)
        pending.beta2 = next((beta2 for beta2 in beta2s or () if beta2 is not None), None)
        if pending.stage == "reduced" and self._graphs is not None:
            is_done, norm = self._graphs.update(factor, beta2s)
            if is_done:
                pending.norm, pending.stage = norm, "clipped"
                self._gatherer.pending = None
                self._optimizer.zero_grad()
                return None if rate is None else rate * factor
        if pending.stage == "reduced":
            if scaler is not None:
                scaler.unscale_(self._optimizer)
            pending.norm = None if clip_norm is None else clip(self._trained.parameters, clip_norm)
            pending.stage = "clipped"
        has_beta2 = nullcontext() if beta2s is None else changed_beta2(self._optimizer, beta2s)
        with scaled_lr(self._optimizer, factor), has_beta2:
            apply_update(self._optimizer, self._trained.parameters, scaler)
        self._gatherer.pending = None  # whatever fails from here on, the update is not applied again
        self._optimizer.zero_grad()
        return None if rate is None else rate * factor

    def abandon(self) -> None:
        """Drop the update that was begun, with its gradients; the next one can begin. Without one, nothing happens."""
        self._gatherer.abandon()

    def warm_up(self) -> None:
        """Allocate the optimizer's state now, without changing a parameter, so that the first update cannot run out."""
        allocate_state(self._optimizer)

    def graph_summary(self) -> GraphSummary:
        """Return what graphs did so far: shapes, how often they were replayed, memory, seconds spent and saved."""
        return GraphSummary() if self._graphs is None else self._graphs.summary()

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned about memory and noise, as JSON values."""
        average = NoiseAverage() if self._meter is None else self._meter.average
        return {
            "version": 2,
            "limit": self._gatherer.runner.limit.to_state(),
            "noise": average.to_state(),
            "num_updates": self._gatherer.num_updates,
            "memory": None if self._feedback is None else self._feedback.to_state(),
            **({} if self._meter is None else self._meter.to_state()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what another run learned.

        Raises:
            ArgumentError: the state has another version.
            StateMismatchError: it is not one that ``state_dict`` returned. The stepper stays as it was.
        """
        state = as_state(state, of="Stepper")
        if not is_same(state.get("version"), 2):
            raise ArgumentError(
                f"this Stepper reads states of version 2, got version {state.get('version')!r}; start without the state"
            )
        state = as_state(state, of="Stepper", needs=("limit", "noise", "num_updates", "memory"))
        limit, take_noise = MicroLimit.from_state(state["limit"]), self._read_noise(state)
        num_updates = read_whole(state, "num_updates")
        if self._feedback is not None:
            self._feedback.load_state(state["memory"])
        self._gatherer.runner.limit, self._gatherer.num_updates = limit, num_updates
        take_noise()

    def _read_noise(self, state: Mapping[str, Any]) -> Callable[[], None]:
        if self._meter is not None:
            return self._meter.read_state(state)
        NoiseAverage.from_state(state["noise"])  # refused alike, whether noise is measured or not
        return lambda: None

    def _require_pending(self) -> Pending:
        if self._gatherer.pending is None:
            raise ArgumentError("nothing was accumulated; call accumulate(batch) first, or step(batch) for all three")
        return self._gatherer.pending

    def _lr_factor(self, batch_size: int) -> float:
        if self._lr_rule is None:
            return 1.0
        base_size = self._settings.base_size or 1
        if self._lr_rule != "adascale":
            factor = self._lr_rule(batch_size, base_size)
            return as_number(f"lr_rule({batch_size}, {base_size}), the factor of the learning rate,", factor, least=0)
        assert self._meter is not None
        average = self._meter.average
        return adascale(batch_size, base_size, s=average.s, g2=average.g2) if average.is_reliable else 1.0

    def _beta2s(self, batch_size: int) -> Beta2s | None:
        groups = self._optimizer.param_groups
        if (self._beta2_rule is None or self._meter is None) and any(MADE_AT in group for group in groups):
            forget_size(self._optimizer)
        if self._beta2_rule is None:
            if any(MADE_FOR in group for group in groups):  # a run before had a rule
                follow_beta2(self._optimizer, None)
            return None
        if self._meter is not None:
            follow_noise(self._optimizer, batch_size, self._noise_scale)
        return beta2s_for(self._optimizer, self._beta2_rule, batch_size, self._settings.base_size or 1)

    def _noise_scale(self) -> float | None:
        average = None if self._meter is None else self._meter.average
        return average.scale if average is not None and average.is_reliable else None

    def _report(self, pending: Pending, rate: float | None) -> StepReport:
        assert pending.summary is not None
        summary, seconds = pending.summary, self._gatherer.stop(pending)
        peak, fraction = self._read_memory()
        if self._ranks.world_size > 1:  # the ranks have just met, so no work of the update is left to wait for
            seconds, peak, fraction = self._ranks.largest([float(seconds), peak, fraction], self._device)
        numbers = [summary.loss_sum, *summary.metric_sums.values(), *([] if pending.norm is None else [pending.norm])]
        loss_sum, *others = copied_numbers(numbers)
        return StepReport(
            batch_size=summary.num_examples,
            num_micro_batches=summary.num_micro_batches,
            weight=summary.weight,
            ooms=summary.ooms,
            _seconds=seconds,
            peak_bytes=int(peak) if peak >= 0 else None,
            memory_fraction=fraction if fraction >= 0 else None,
            lr=rate,
            graphed=self._graphs is not None and pending.num_replayed == pending.totals.num_micro_batches,
            recompilations=max(0, num_compilations() - pending.num_compiled_before),
            _loss_sum=loss_sum,
            _metric_sums=dict(zip(summary.metric_sums, others, strict=False)),
            _noise=pending.noise,
            _grad_norm=None if pending.norm is None else others[-1],
            tokens=summary.num_tokens,
            beta2=pending.beta2,
        )

    def _read_memory(self) -> tuple[float, float]:
        """Return the peak and its share of the memory on this rank, -1 for a figure that is not known."""
        if self._memory is not None:
            return self._memory.peak_bytes, self._memory.peak_fraction
        if self._device.type != "cuda":
            return -1, -1
        peak = torch.cuda.max_memory_allocated(self._device)
        return peak if self._graphs is None else max(peak + self._graphs.held_bytes, self._graphs.lost_peak_bytes), -1
