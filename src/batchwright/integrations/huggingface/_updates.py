"""The updates of an adaptive trainer: exact weights, retries after out of memory, any number of micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from .._inputs import num_rows
from .._trainer_step import SafeSteps, Strategy
from ._batches import Counted
from ._figures import GradientNoise, TrainingFigures
from ._settings import Devices, OnOom, Settings
from ._weights import LossWeights, TrainerLoss, UpdateWeight, row_key

# step(model, micro-batch) -> detached loss: the trainer's own forward and backward
Step: TypeAlias = "Callable[[nn.Module, dict[str, Any]], Tensor]"

_STRATEGIES: Mapping[OnOom, Strategy] = {"split": "split_retry", "skip": "skip"}
# A retry begins with half of what did not fit; no smaller bound is set.
_NO_BOUND = 1 << 31


@final
class Updates:
    """Weighs micro-batches, retries those that run out of memory, and counts what was trained on.

    Args:
        settings: what the user asked for.
        weights: of losses; evaluation uses the same.

    Attributes:
        figures: of the updates so far.
        noise: of their gradients, None if it is not measured.
    """

    def __init__(self, settings: Settings, weights: LossWeights) -> None:
        self.figures = TrainingFigures()
        self.noise: GradientNoise | None = None
        self._settings = settings
        self._weights = weights
        self._devices: Devices | None = None
        self._whole: UpdateWeight | None = None  # None: the trainer's own rule holds
        self._repeats: deque[bool] = deque()
        self._key = ""
        self._safe_steps: SafeSteps | None = None

    def start(self, model: nn.Module) -> None:
        """Begin a training: all counts at zero."""
        self.figures = TrainingFigures()
        if self.noise is not None:
            self.noise.close()
        self.noise = GradientNoise(model) if self._settings.measure_noise else None

    def close(self) -> None:
        """End a training; its figures can still be read."""
        self._whole, self._safe_steps = None, None

    def begin(
        self, batches: list[Any], received: tuple[Counted, list[bool]], *, loss: TrainerLoss, devices: Devices
    ) -> None:
        """Begin an update.

        Args:
            batches: its micro-batches on this rank.
            received: what they hold, and which of them are repeats that count on another rank.
            loss: of the trainer.
            devices: whose micro-batches make one update together.
        """
        counted, repeats = received
        self._devices, self._repeats, self._key = devices, deque(repeats), row_key(batches[0], loss.model)
        if self._safe_steps is None and self._settings.on_oom != "raise":
            self._safe_steps = SafeSteps(_STRATEGIES[self._settings.on_oom], _NO_BOUND, self._key, self._note_oom)
        weight = torch.zeros(()) if devices.is_divided else self._weigh(batches, repeats, loss)
        self.figures.begin(devices.add_up(self.figures.sums_of(weight, counted)))
        if self.noise is not None:
            self.noise.begin()
        if self._settings.memory is not None:
            self._settings.memory.reset_peak()
        self._whole = None
        if not devices.is_divided:
            total = self.figures.weight if devices.args.average_tokens_across_devices else weight
            # A whole number: a total of a wide float type would widen half-precision losses.
            total = total.clamp(min=1).round().long().to(devices.args.device)
            self._whole = UpdateWeight(total, devices.num_replicas)

    def _weigh(self, batches: list[Any], repeats: list[bool], loss: TrainerLoss) -> Tensor:
        self._weights.learn(loss, batches[0])
        weights = [
            self._weights.count(batch).cpu() * (not is_repeat)
            for batch, is_repeat in zip(batches, repeats, strict=True)
        ]
        return torch.stack(weights).sum()

    @property
    def are_weighed(self) -> bool:
        """Return whether losses are weighed here, and not by the trainer's own rule."""
        return self._whole is not None

    def run(self, step: Step, model: nn.Module, parts: list[Any], devices: Devices) -> Tensor:
        """Run forward and backward of an item, micro-batch by micro-batch, and return its loss.

        Args:
            step: the trainer's own step.
            model: as the trainer wraps it.
            parts: the micro-batches of the item.
            devices: tell whether the item ends an update.
        """
        last = len(parts) - 1
        losses = [self._run_part(step, model, part, devices, is_end=place == last) for place, part in enumerate(parts)]
        total: Tensor = sum(losses[1:], losses[0])
        self.figures.add_loss(total)
        if self.noise is not None and devices.accelerator.sync_gradients:
            scaler = devices.accelerator.scaler
            self.noise.end(
                devices.add_up,
                num_examples=self.figures.batch_size,
                num_replicas=devices.num_replicas,
                scale=1.0 if scaler is None else float(scaler.get_scale()),
            )
        return total

    def _run_part(self, step: Step, model: nn.Module, part: Any, devices: Devices, *, is_end: bool) -> Tensor:
        """Add the gradient of a micro-batch; under DDP nothing is sent before the last one."""
        whole, accelerator = self._whole, devices.accelerator
        if whole is not None and self._repeats and self._repeats.popleft():
            whole = whole._replace(num_replicas=0)  # another rank runs the same example: no weight here
        if self.noise is not None:
            self.noise.keep()
        if self._safe_steps is None or whole is None:
            with nullcontext() if is_end else accelerator.no_sync(model):
                return self._weighted_step(step, whole, model, part)
        return self._safe_steps.run(
            model,
            dict(part),
            partial(self._weighted_step, step, whole),
            is_last=is_end and accelerator.sync_gradients,
            has_scaler=accelerator.scaler is not None,
        )

    def _weighted_step(self, step: Step, whole: UpdateWeight | None, model: nn.Module, inputs: Any) -> Tensor:
        if whole is None:
            return step(model, inputs)
        noise = self.noise if whole.num_replicas else None
        with self._weights.part_of(whole), noise.part(num_rows(inputs, self._key)) if noise else nullcontext():
            return step(model, inputs)

    def _note_oom(self) -> None:
        self.figures.num_ooms += 1
        if self.noise is not None:
            self.noise.undo()

    def mean_loss(self) -> float:
        """Return the loss of the update, over all ranks."""
        assert self._devices is not None
        return float(self._devices.add_up(self.figures.loss.reshape(1))) / self._devices.world_size
