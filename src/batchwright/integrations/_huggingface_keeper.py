"""Callbacks: what happens around the optimizer's step and after an update."""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from typing import Any, final

from transformers import TrainerCallback

from ..size.learning_rate import adascale, scaled_lr
from ._ranked import agree, controller_of

logger = logging.getLogger(__name__)

_CONTROLLER_NAME = "batchwright_controller"


@final
class Keeper(TrainerCallback):
    """Scales the learning rate inside the optimizer's step, lets the controller observe, and counts epochs.

    Args:
        trainer: an adaptive trainer.
    """

    def __init__(self, trainer: Any) -> None:
        # A cycle would keep the trainer, and the worker processes of its loader, until garbage is collected.
        self._trainer: Any = weakref.proxy(trainer)
        self._scaled = ExitStack()
        self._rate = 0.0

    def close(self) -> None:
        """Put back the learning rate if the optimizer's step was left by an error."""
        self._scaled.close()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Scale the learning rate."""
        trainer = self._trainer
        factor = trainer._course.lr_factor = self._factor()
        self._rate = float(trainer.optimizer.param_groups[0]["lr"]) * factor
        self._scaled.enter_context(scaled_lr(trainer.optimizer, factor))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the learning rate back, before the schedule moves on."""
        self._scaled.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the update, and let the controller decide about the next."""
        trainer = self._trainer
        feed, controller = trainer._feed, trainer._settings.controller
        if feed is None:
            return
        trainer._course.end()
        state.epoch = feed.progress
        if controller is None:
            return
        observe(controller, **self._observation(state))
        if args.max_steps <= 0:
            left = args.num_train_epochs * len(feed.lengths) - state.epoch * len(feed.lengths)
            state.max_steps = state.global_step + max(0, -(-round(left) // controller.size))

    def _factor(self) -> float:
        settings, course, noise = self._trainer._settings, self._trainer._course, self._trainer._noise
        rule = settings.rule
        if rule is None:
            return 1.0
        if rule != "adascale":
            return float(rule(course.batch_size, settings.base_size))
        average = noise.average
        if not average.is_reliable:
            return 1.0
        return adascale(course.batch_size, settings.base_size, s=average.s, g2=average.g2)

    def _observation(self, state: Any) -> dict[str, Any]:
        trainer = self._trainer
        course, feed, memory = trainer._course, trainer._feed, trainer._settings.memory
        noise = None if trainer._noise is None else trainer._noise.report
        figures = {
            "batch_size": course.batch_size,
            "loss": float(trainer._add_up(course.loss.reshape(1))) / trainer._rank[1],
            "lr": self._rate,
            "noise_s": None if noise is None else noise.s,
            "noise_g2": None if noise is None else noise.g2,
            "noise_reliable": None if noise is None else noise.reliable,
            "noise_parts": None if noise is None else noise.num_parts,
            "seconds": course.seconds,
            "memory_fraction": None if memory is None else memory.peak_fraction,
        }
        completed = feed.epoch + (feed.num_left == 0)
        return {"epoch": completed, "step": state.global_step, **course.counts(), **agree(figures, trainer.args.device)}


def observe(controller: Any, **figures: Any) -> int:
    """Let a controller observe, and log a change of the size with its reason."""
    before = int(controller.size)
    size = int(controller.observe(**figures))
    if size != before:
        history = getattr(controller, "history", ())
        logger.info("Batch size: %s", history[-1] if history else f"{before} -> {size}")
    return size


@final
class BatchSizeCallback(TrainerCallback):
    """Lets a controller observe a plain ``Trainer``: the loss and the learning rate, whenever they are logged.

    It does not change a trainer's batches. Use it where the loader follows the controller, as with a
    ``ResizableBatchSampler`` returned from your own ``get_train_dataloader``, or to see what a policy would do. The
    size is logged as ``batch_size_wanted``, and changes with their reasons. The controller's state is saved in
    checkpoints and continued. Observations are as frequent as logs: ``logging_steps=1`` for every update.

    Args:
        controller: a ``BatchSizeController``.
        batch_size: examples of an update over all ranks; None takes the controller's size.

    >>> import batchwright as bw
    >>> from batchwright import size
    >>> controller = bw.BatchSizeController(size.linear(32, 8), min_size=16, max_size=64)
    >>> callback = BatchSizeCallback(controller)  # Trainer(..., callbacks=[callback])
    """

    def __init__(self, controller: Any, *, batch_size: int | None = None) -> None:
        self.controller = controller_of(None, controller)
        self._batch_size = batch_size
        self._newest = 0
        self._examples = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue with the state of a checkpoint."""
        saved = state.stateful_callbacks.get(_CONTROLLER_NAME)
        self._examples = 0
        if saved is not None:
            self.controller.load_state_dict(saved["controller"])
            self._examples = int(saved["examples"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the size in force."""
        self._newest = int(self.controller.size) if self._batch_size is None else self._batch_size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the examples of the update."""
        self._examples += self._newest
        self._keep(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Observe what is logged of training; evaluation logs nothing of it."""
        if not logs or "loss" not in logs:
            return
        size = observe(
            self.controller,
            epoch=int(state.epoch),
            step=state.global_step,
            examples=self._examples,
            batch_size=self._newest,
            loss=logs["loss"],
            lr=logs.get("learning_rate"),
        )
        logs["batch_size_wanted"] = state.log_history[-1]["batch_size_wanted"] = size
        self._keep(state)

    def _keep(self, state: Any) -> None:
        # Saved with the state of the trainer, which is written before callbacks hear of it.
        state.stateful_callbacks[_CONTROLLER_NAME] = {
            "controller": self.controller.state_dict(),
            "examples": self._examples,
        }
