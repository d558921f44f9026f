"""The updates of an adaptive trainer: exact weights, retries after out of memory, and figures to log."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ..._ranks import Ranks
from ...errors import ArgumentError
from ...size.noise import NoiseAverage
from ...step.memory.budget_tracker import FitFeedback
from ...step.memory.monitor import MemoryMonitor
from ...step.noise import GradientNoise
from ...step.oom import drop_gradients, warn_of_split
from .._devices import Devices
from .._failures import raise_gathered
from .._inputs import Rows, in_groups
from .._observing import monitor_for
from .._safe_steps import (
    SafeSteps,
    Step,
    check_hooks,
    fill_for_scaler,
    foreign_parameters,
    trained_parameters,
    unreduced_parameters,
)
from .._trainer_step import WHOLE, as_logged
from ._batches import Counted, Received
from ._figures import FAILED, PARTS, REFUSED, WEIGHT, TrainingFigures
from ._graphs import TrainerGraphs
from ._settings import Settings
from ._weights import EntropyMeter, LossWeights, TrainerLoss, UpdateWeight, refuse, row_key

# A retry begins with half of what did not fit; no smaller bound is set.
_NO_BOUND = 1 << 31


@final
class Updates:
    """Weighs micro-batches, retries those that run out of memory, and counts what was trained on.

    Args:
        settings: what the user asked for.
        weights: of losses; evaluation uses the same.
        graphs: replay micro-batches, or do nothing.

    Attributes:
        figures: of the updates so far.
        noise: of the gradient of the running update, None if it is not measured.
        entropy: of the model's output.
        memory: of the device, None if nobody reads it.
        whole: the weight of the running update, None if the trainer's own rule holds.
    """

    def __init__(self, settings: Settings, weights: LossWeights, graphs: TrainerGraphs) -> None:
        self.figures = TrainingFigures()
        self.noise: GradientNoise | None = None
        self._meter: GradientNoise | None = None
        self.entropy = EntropyMeter(is_wanted=settings.wants_entropy)
        self.memory: MemoryMonitor | None = settings.memory
        self.whole: UpdateWeight | None = None
        self._settings = settings
        self._weights = weights
        self._graphs = graphs
        self._devices: Devices | None = None
        self._shares: deque[float] = deque()  # the weights of the micro-batches that are left
        self._groups: deque[list[int] | None] = deque()  # and the sizes of their groups
        self._weight, self._left_out = 0.0, 0.0  # of this rank in the update, and of what did not fit
        self._key = ""
        self._safe_steps: SafeSteps | None = None
        self._is_warned = False

    def start(self, model: nn.Module) -> None:
        """Begin a training: all counts at zero."""
        self.figures = TrainingFigures()
        self.entropy = EntropyMeter(is_wanted=self._settings.wants_entropy)
        if self._meter is not None:
            self._meter.meter.norms.close()
        self.noise = None
        self._meter = GradientNoise(trained_parameters(model)) if self._settings.measure_noise else None

    @property
    def noise_average(self) -> NoiseAverage | None:
        """Return the noise of all updates that were measured so far, None if none ever is."""
        return None if self._meter is None else self._meter.meter.average

    def load_noise(self, average: NoiseAverage) -> None:
        """Continue with the noise of another run, if it is measured here too."""
        if self._meter is not None:
            self._meter.meter.average = average

    def _fit(self, device: torch.device) -> FitFeedback | None:
        """Return what lets a ``FitToMemory`` follow memory, None without one."""
        fit, memory = self._settings.micro_batch, self._settings.memory
        if memory is None and device.type == "cuda":
            memory = MemoryMonitor(device)
        return None if fit is None else FitFeedback(fit, memory)

    def memory_state(self) -> dict[str, Any]:
        """Return what the size of micro-batches has learned, under its key and as JSON values."""
        fit = self._settings.micro_batch
        return {} if fit is None else {"memory": fit.state_dict()}

    def load_memory_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue with what another run learned."""
        if self._settings.micro_batch is not None and state is not None:
            self._settings.micro_batch.load_state_dict(state)

    def close(self) -> None:
        """End a training; its figures can still be read."""
        self.whole, self._safe_steps = None, None

    def begin(
        self,
        batches: list[Any],
        received: Received,
        *,
        loss: TrainerLoss,
        devices: Devices,
        optimizer: Any = None,
    ) -> None:
        """Begin an update; if a rank cannot, no rank does.

        Args:
            batches: its micro-batches on this rank.
            received: what they hold, which of them are repeats that count on another rank, and whether gradient noise
                is measured.
            loss: of the trainer.
            devices: whose micro-batches make one update together.
            optimizer: tells which parameters are trained.
        """
        counted, repeats, is_measured, groups = received
        self.noise = self._meter if is_measured else None
        self._devices, self._key = devices, row_key(batches[0], loss.model)
        if self._safe_steps is None and self._settings.on_oom != "raise":
            self._safe_steps = SafeSteps(
                self._settings.on_oom, _NO_BOUND, self._key, self._note_oom, fit=self._fit(devices.args.device)
            )
        if self.memory is None:
            self.memory = monitor_for(self._settings.controller, devices.args.device)
        self.entropy.begin()
        drop_gradients(foreign_parameters(loss.model, optimizer))
        shares, failure = [], None
        try:
            trained = trained_parameters(loss.model, optimizer)
            if not trained:
                raise ArgumentError("no parameter is trained; set requires_grad on those of the model that should be")
            check_hooks(trained, len(batches))
            if len(batches) > 1 and not self._is_warned:
                self._is_warned = warn_of_split(loss.model)
            shares = [1.0] * len(batches) if devices.is_divided else self._weigh(batches, repeats, loss)
            if self.noise is not None:
                self._check_rows(batches, repeats, counted)
                self.noise.begin(trained)
        except Exception as error:  # raised below, on all ranks
            failure = error
        flags = [failure is not None, bool(self._weights.refusal)]
        mine = torch.tensor(
            [sum(shares), *counted, self.figures.num_ooms, self.figures.num_cuts, *flags], dtype=torch.float64
        )
        sums = devices.add_up(mine)
        if failure is not None and devices.args.world_size == 1:
            raise failure
        if sums[FAILED] > 0:
            raise_gathered(failure)
        self.figures.begin(sums)
        self._shares, self._groups = deque(shares), deque(groups or [None] * len(batches))
        self._weight, self._left_out = sum(shares), 0.0
        if self.memory is not None:
            self.memory.reset_peak()
        self.whole = None if devices.is_divided else self._weight_of_update(sums, sum(shares), devices)

    def _weigh(self, batches: list[Any], repeats: list[bool], loss: TrainerLoss) -> list[float]:
        self._weights.learn(loss, batches)
        is_whole = bool(self._weights.refusal)  # then it counts as one, whatever it holds
        return [
            0.0 if is_repeat else 1.0 if is_whole else float(self._weights.count(batch))
            for batch, is_repeat in zip(batches, repeats, strict=True)
        ]

    def _weight_of_update(self, sums: Tensor, mine: float, devices: Devices) -> UpdateWeight | None:
        """Return what the micro-batches are parts of; None if there is only one, whose weight nobody knows."""
        refusal, num_parts = self._weights.refusal, round(float(sums[PARTS]))
        if sums[REFUSED] > 0:
            # Under DDP every rank may have a whole batch of its own, as in the trainer itself.
            is_declared = refusal == WHOLE
            if num_parts > (devices.world_size if is_declared else 1):
                raise refuse(refusal or "another rank cannot tell", num_parts)
            if not is_declared:
                return None
        total = sums[WEIGHT] if devices.args.average_tokens_across_devices else torch.tensor(mine)
        # A whole number: a total of a wide float type would widen half-precision losses.
        whole, device = total.clamp(min=1).round().long(), devices.args.device
        if whole.device.type == "cpu":  # a copy to the device would wait for all that runs there
            whole = torch.full((), int(whole), dtype=torch.int64, device=device)
        return UpdateWeight(whole.to(device), devices.num_replicas)

    def _check_rows(self, batches: list[Any], repeats: list[bool], counted: Counted) -> None:
        nums = [self._weights.num_examples(batch, self._key) for batch in batches]
        rows = sum(num for num, is_repeat in zip(nums, repeats, strict=True) if not is_repeat)
        if rows != counted.examples:
            raise ArgumentError(
                f"measure_noise needs a row per example, but {counted.examples} examples came in {rows} rows; use a "
                "collator that does not pack, or leave measure_noise out"
            )

    def run(self, step: Step, model: nn.Module, parts: list[Any], devices: Devices, optimizer: Any = None) -> Tensor:
        """Run forward and backward of an item, micro-batch by micro-batch, and return its loss.

        Args:
            step: the trainer's own step.
            model: as the trainer wraps it.
            parts: the micro-batches of the item.
            devices: tell whether the item ends an update.
            optimizer: tells which parameters are trained.
        """
        last = len(parts) - 1
        run = self._run_plainly if self._safe_steps is None or devices.is_divided else self._run_safely
        losses = [run(step, model, part, devices, optimizer, is_end=place == last) for place, part in enumerate(parts)]
        total = as_logged(sum(losses[1:], losses[0]), model)
        self.figures.loss = self.figures.loss + total
        if self.noise is not None and devices.accelerator.sync_gradients:
            scaler = devices.accelerator.scaler
            self.noise.end(
                devices.add_up,
                num_examples=self.figures.batch_size,
                num_replicas=devices.num_replicas,
                scale=1.0 if scaler is None else float(scaler.get_scale()),
            )
        return total

    def _run_safely(
        self, step: Step, model: nn.Module, part: Any, devices: Devices, optimizer: Any, *, is_end: bool
    ) -> Tensor:
        """Add the gradient of a micro-batch, in pieces if memory runs out."""
        assert self._safe_steps is not None
        share, inputs = self._next_share(), dict(part)
        groups = self._groups.popleft() if self._groups else None
        self.entropy.keep()
        if self.noise is not None:
            self.noise.keep()
        num_ooms, num_cuts = self.figures.num_ooms, self._safe_steps.num_cuts
        loss = self._safe_steps.run(
            model,
            inputs,
            partial(self._weighted_step, step, has_share=share > 0),
            is_last=is_end and devices.accelerator.sync_gradients,
            cut=in_groups(self._weights.cut(inputs) or Rows(inputs, self._key), groups),
            optimizer=optimizer,
            has_scaler=devices.accelerator.scaler is not None,
            replay=self._graphs.replay(inputs, share, self.whole),
        )
        self.figures.num_cuts += self._safe_steps.num_cuts - num_cuts
        if self._settings.on_oom == "skip" and self.figures.num_ooms > num_ooms:
            self._left_out += share
        return loss

    def _run_plainly(
        self, step: Step, model: nn.Module, part: Any, devices: Devices, optimizer: Any, *, is_end: bool
    ) -> Tensor:
        """Add the gradient of a micro-batch; under DDP nothing is sent before the last one."""
        accelerator, share = devices.accelerator, self._next_share()
        is_last = is_end and accelerator.sync_gradients
        with nullcontext() if is_end else accelerator.no_sync(model):
            # Other ranks wait: in the backward pass of the last micro-batch, and in any loss that gathers figures.
            runs_idle = share == 0 and devices.args.world_size > 1
            loss = self._weighted_step(step, model, part, has_share=share > 0, runs_idle=runs_idle)
        if is_last and devices.args.world_size > 1:
            left_out = unreduced_parameters(model, optimizer)
            if left_out:
                Ranks(model).sum_gradients(left_out, 1 / devices.args.world_size)
        elif is_last and accelerator.scaler is not None and share == 0:
            fill_for_scaler(trained_parameters(model, optimizer))
        return loss

    def _next_share(self) -> float:
        return self._shares.popleft() if self._shares else 1.0  # a step that belongs to no update of ours

    def _weighted_step(
        self, step: Step, model: nn.Module, inputs: Any, *, has_share: bool, runs_idle: bool = False
    ) -> Tensor:
        with self.entropy.part(counts=has_share):
            return self._noted_step(step, model, inputs, has_share=has_share, runs_idle=runs_idle)

    def _noted_step(self, step: Step, model: nn.Module, inputs: Any, *, has_share: bool, runs_idle: bool) -> Tensor:
        whole = self.whole
        if whole is None:
            return step(model, inputs)
        # A mean over no label may be NaN, and so may be its gradient, even times zero.
        is_idle = not (has_share and self._weights.has_weight(inputs))
        noise = self.noise if has_share else None
        with noise.part(self._weights.num_examples(inputs, self._key)) if noise else nullcontext():
            if is_idle and not runs_idle:
                return torch.zeros((), device=whole.total.device)
            with self._weights.weighing(whole, is_idle=is_idle):
                return step(model, inputs)

    def _note_oom(self) -> None:
        if self._settings.is_probe:
            raise MemoryError("a batch that was tried out ran out of memory")
        self.figures.num_ooms += 1
        self.entropy.undo()
        self._graphs.make_room()
        if self.noise is not None:
            self.noise.undo()

    def mean_entropy(self) -> float | None:
        """Return the entropy of the update over all ranks, None if it is not measured."""
        assert self._devices is not None
        return self.entropy.end(self._devices)

    def mean_loss(self) -> float:
        """Return the mean loss of what ran of the update, over all ranks; NaN if everything was left out."""
        devices = self._devices
        assert devices is not None
        loss = torch.as_tensor(self.figures.loss).reshape(1)
        if devices.args.average_tokens_across_devices:
            # Losses are parts of one mean over all ranks, and what was left out is missing in it.
            total, left_out = devices.add_up(torch.cat([loss, loss.new_tensor([self._left_out])])).tolist()
            return total / devices.world_size / _share_that_ran(left_out, self.figures.weight)
        ran = _share_that_ran(self._left_out, self._weight)
        mine = torch.cat([loss / ran if ran > 0 else torch.zeros_like(loss), loss.new_tensor([float(ran > 0)])])
        total, num_ranks = devices.add_up(mine).tolist()
        return total / num_ranks if num_ranks else math.nan


def _share_that_ran(left_out: float, weight: float) -> float:
    """Return the share of a weight that was not left out, NaN if nothing is left of it."""
    left = weight - left_out
    return 1.0 if left_out == 0 else left / weight if left > 0 else math.nan
