"""Callbacks: around the optimizer's step, after an update, and for a plain ``Trainer``; what they work on together."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any, final

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback

from ..._checks import as_state, as_whole, is_same, read_size, read_whole
from ...errors import StateMismatchError
from ...size.learning_rate import adascale, current_lr, get_beta2_rule, get_rule, scaled_lr
from ...size.momentum import beta2s_for, changed_beta2, check_beta2
from ...size.noise import NoiseAverage
from ...step.calibration.found import FoundBudget
from .._auto import coupling_of
from .._observing import Change, History, LiveHistory, observe
from .._ranked import agree, controller_of
from ._batches import PlannedBatches, ResizableBatches
from ._data import TrainingData
from ._evaluation import Evaluation
from ._figures import HINTS
from ._graphs import TrainerGraphs
from ._lengths import LengthCache
from ._loss_filter import LossFilter
from ._settings import Settings
from ._trl import CallFigures
from ._updates import Updates
from ._weights import LossWeights

logger = logging.getLogger(__name__)

_CONTROLLER_NAME = "batchwright_controller"
# Raise it when an older state can no longer be read.
STATE_VERSION = 1
# A training of fewer updates than this hardly learns, however fast they are.
_FEW_UPDATES = 20


def _write(line: str) -> None:
    """Print a line above the progress bars of a trainer."""
    import_module("tqdm").tqdm.write(line)  # transformers needs it


@final
class Batching:
    """Holds the settings and the collaborators of an adaptive trainer.

    None of them holds the trainer: such a cycle would keep the worker processes of its loader alive until garbage is
    collected.

    Args:
        settings: what the user asked for.
        lengths: of the data sets measured so far; None for none.
    """

    def __init__(self, settings: Settings, lengths: LengthCache | None = None) -> None:
        lengths = LengthCache() if lengths is None else lengths
        self.settings, self.lengths = settings, lengths
        self.weights = LossWeights(settings.weighting)
        self.graphs = TrainerGraphs(settings.graphs)
        self.data = TrainingData(settings, lengths, self.graphs)
        self.updates = Updates(settings, self.weights, self.graphs)
        self.evaluation = Evaluation(settings, lengths, self.weights)
        self.call_figures, self.losses = CallFigures(), LossFilter()
        self.callback = UpdateCallback(settings, self.data, self.updates)

    def close(self) -> None:
        """End a training."""
        self.callback.close()
        self.updates.close()
        self.graphs.close()
        self.data.batches = None
        self.data.release()

    def take_figures(self) -> dict[str, float]:
        """Return the figures of the updates since the last log; an empty dict if there were none."""
        figures = {} if self.data.batches is None else self.updates.figures.take_recent()
        if not figures:
            return {}
        if self.callback.rule is not None:
            figures["lr_factor"] = self.updates.figures.lr_factor
        if self.settings.controller is not None:
            figures["batch_size_wanted"] = read_size(self.settings.controller)
        average = self.updates.noise_average
        scale = None if average is None else average.scale
        more = {"noise_scale": scale, "entropy": self.updates.entropy.newest}
        return figures | {name: value for name, value in more.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and everything that was learned, as JSON values."""
        assert self.data.batches is not None
        controller, noise = self.settings.controller, self.updates.noise_average
        # Older checkpoints hold the keys "feed" and "course", so they keep these names.
        return {
            "version": STATE_VERSION,
            "feed": self.data.batches.state_dict(),
            "course": self.updates.figures.state_dict(),
            "controller": None if controller is None else controller.state_dict(),
            "noise": None if noise is None else noise.to_state(),
            **self.updates.memory_state(),
            **self._budget_state(),
        }

    def _budget_state(self) -> dict[str, Any]:
        budget = self.settings.budget
        return {"budget": budget.to_json()} if isinstance(budget, FoundBudget) and self.settings.finds_budget else {}

    def restore(self, saved: Mapping[str, Any] | None, epochs_trained: int, *, ignores_place: bool) -> int:
        """Continue from a state, and return the epoch to run.

        Args:
            saved: of ``state_dict``; None if the checkpoint has none.
            epochs_trained: the epoch that the trainer found.
            ignores_place: begin the epoch again.
        """
        batches, controller = self.data.batches, self.settings.controller
        assert batches is not None
        version = None if saved is None else as_state(saved, of="an adaptive trainer").get("version")
        if not is_same(version, STATE_VERSION):
            if ignores_place:
                return epochs_trained
            raise StateMismatchError(
                "the checkpoint does not hold the place in its epoch, as checkpoints of adaptive trainers do; set "
                "ignore_data_skip=True to begin the epoch again"
            )
        saved = as_state(saved, of="an adaptive trainer", needs=("feed", "course", "controller", "noise"))
        if ignores_place:
            feed = as_state(saved["feed"], of="the batches of a trainer", needs=["sampler"])
            batches.set_epoch(read_whole(as_state(feed["sampler"], of="a sampler"), "epoch"))
        else:
            batches.load_state_dict(saved["feed"])
        self.updates.figures.load_state_dict(saved["course"])
        if controller is not None and saved["controller"] is not None:
            controller.load_state_dict(saved["controller"])
        if saved["noise"] is not None:
            self.updates.load_noise(NoiseAverage.from_state(saved["noise"]))
        self.updates.load_memory_state(saved.get("memory"))
        return batches.epoch


@final
class UpdateCallback(TrainerCallback):
    """Scales the learning rate inside the optimizer's step, lets the controller observe, and counts epochs.

    It does not hold the trainer: such a cycle would keep the worker processes of the loader alive until garbage is
    collected.

    Args:
        settings: what the user asked for.
        data: tells the place in the epoch.
        updates: tells the figures of the update.
    """

    def __init__(self, settings: Settings, data: TrainingData, updates: Updates) -> None:
        self._settings = settings
        self._data = data
        self._updates = updates
        self._scaled = ExitStack()
        self._rate: float | None = None
        self._planned_size: int | None = None
        self.rule, self.beta2_rule = settings.rule, settings.rule_of_beta2
        self._history = LiveHistory(settings.history)
        self._changes: list[Change] = []

    def close(self) -> None:
        """Restore the learning rate if an error ended the optimizer's step."""
        self._scaled.close()
        self._changes = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Find out how the learning rate and beta2 follow the size with this optimizer, where nobody has said so."""
        settings = self._settings
        if settings.is_auto:
            usual = coupling_of(optimizer)
            if settings.lr_rule is None:
                self.rule = get_rule(usual.lr_rule)
            if settings.beta2_rule is None:
                self.beta2_rule = get_beta2_rule(usual.beta2_rule)
        if self.beta2_rule is not None:
            check_beta2(optimizer)
        self._planned_size = self._find_planned_size(args)
        is_short = args.max_steps <= 0 and state.max_steps < _FEW_UPDATES
        if self._planned_size is not None and is_short and args.process_index == 0:
            logger.warning(
                "The found budget makes only %d updates of about %d examples in all; for more and smaller ones give a "
                "budget such as MaxItems(%d), or train for more epochs.",
                state.max_steps, self._planned_size, args.per_device_train_batch_size,
            )  # fmt: skip

    def _find_planned_size(self, args: Any) -> int | None:
        """Return the size that rate and beta2 follow for the whole training, None if they follow that of each update.

        The batches of a found budget have about as many tokens each, and a loss over tokens as much noise, whatever
        their number of examples: the rate should not rise because examples are short.
        """
        settings, batches = self._settings, self._data.batches
        size = batches.planned_size if isinstance(batches, PlannedBatches) else None
        if size is None:
            return None
        base_size = settings.base_size
        if args.process_index == 0 and self.rule is not None:
            factor = self._factor_of(size)
            logger.info(
                "The learning rate is multiplied by %.4g: updates have %d examples on average, base_size is %d.",
                factor, size, base_size,
            )  # fmt: skip
        elif args.process_index == 0:
            logger.info(
                "Updates have %d examples on average, and the learning rate stays as it is; lr_rule='sqrt' with "
                "base_size, the size that it was chosen for, scales it.",
                size,
            )
        return size

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Scale the learning rate."""
        factor = self._updates.figures.lr_factor = self.lr_factor()
        rate = current_lr(optimizer)
        self._rate = None if rate is None else rate * factor
        self._scaled.enter_context(scaled_lr(optimizer, factor))
        rule, base_size = self.beta2_rule, self._settings.base_size
        beta2s = None
        if rule is not None and base_size is not None:
            beta2s = beta2s_for(optimizer, rule, self._size(), base_size)
        self._scaled.enter_context(changed_beta2(optimizer, beta2s))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the learning rate before the schedule moves on."""
        self._scaled.close()

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        """Count the update, and let the controller decide the size of the next one."""
        batches, controller = self._data.batches, self._settings.controller
        if batches is None:
            return
        self._updates.figures.end()
        state.epoch = batches.epochs_done
        if controller is None:
            return
        epoch = batches.epoch + (batches.num_left == 0)  # completed ones
        figures = self._observation(args.device)
        change = observe(controller, hints=HINTS, epoch=epoch, step=state.global_step, **figures)
        if change is not None and (self._history.is_wanted or self._settings.is_auto):
            self._changes.append(change)
            if state.is_world_process_zero:
                self._history.show(change, _write)
        if args.max_steps <= 0:
            assert isinstance(batches, ResizableBatches)
            if self._settings.is_auto:
                assert self._settings.base_size is not None
                self._advance(lr_scheduler, batches.num_updates_done(self._settings.base_size))
            left = batches.num_examples_left(args.num_train_epochs)
            state.max_steps = state.global_step + -(-left // read_size(controller))

    def _advance(self, scheduler: Any, num_steps: int) -> None:
        """Advance a schedule to where it would be with updates of the base size; one by a metric is left alone."""
        if not hasattr(scheduler, "last_epoch") or isinstance(scheduler, ReduceLROnPlateau):
            return
        for _ in range(num_steps - scheduler.last_epoch):
            scheduler.step()

    def take_changes(self) -> list[Change]:
        """Return the changes of the size that were not logged yet."""
        changes, self._changes = self._changes, []
        return changes

    def _size(self) -> int:
        """Return the size that rate and beta2 follow."""
        return self._updates.figures.batch_size if self._planned_size is None else self._planned_size

    def lr_factor(self) -> float:
        """Return the factor of the learning rate in this update."""
        return self._factor_of(self._size())

    def _factor_of(self, batch_size: int) -> float:
        rule, base_size = self.rule, self._settings.base_size
        if rule is None or base_size is None:
            return 1.0
        if rule != "adascale":
            return float(rule(batch_size, base_size))
        average = self._updates.noise_average
        assert average is not None
        return adascale(batch_size, base_size, s=average.s, g2=average.g2) if average.is_reliable else 1.0

    def _observation(self, device: Any) -> dict[str, Any]:
        updates, memory = self._updates, self._updates.memory
        noise = None if updates.noise is None else updates.noise.report
        figures = {
            "batch_size": updates.figures.batch_size,
            "loss": updates.mean_loss(),
            "lr": self._rate,
            "entropy": updates.mean_entropy(),
            "noise_s": None if noise is None else noise.s,
            "noise_g2": None if noise is None else noise.g2,
            "noise_reliable": None if noise is None else noise.reliable,
            "noise_parts": None if noise is None else noise.num_parts,
            "seconds": self._seconds(),
            "memory_fraction": None if memory is None else memory.peak_fraction,
        }
        return {**updates.figures.counts(), **agree(figures, device)}

    def _seconds(self) -> float:
        """Return the seconds of the update; NaN if it was cut for the noise, as most updates are not."""
        is_usual = self._updates.noise is None or self._settings.measure_noise == 1
        return self._updates.figures.seconds if is_usual else math.nan


@final
class BatchSizeCallback(TrainerCallback):
    """Lets a controller observe a plain ``Trainer``: the loss and the learning rate, whenever they are logged.

    It does not change the batches of the trainer. Use it if the loader follows the controller, e.g. with a
    ``ResizableBatchSampler`` in your own ``get_train_dataloader``, or to see what a policy would do. It logs the size
    as ``batch_size_wanted``, and every change with its reason. Checkpoints hold the state of the controller. It
    observes as often as the trainer logs; set ``logging_steps=1`` for every update.

    Args:
        controller: a ``BatchSizeController``.
        batch_size: examples per update over all ranks; None takes the controller's size.
        history: True prints every change of the size with its reason; a function gets the line.

    >>> import batchwright as bw
    >>> from batchwright import size
    >>> controller = bw.BatchSizeController(size.linear(32, 8), min_size=16, max_size=64)
    >>> callback = BatchSizeCallback(controller)  # Trainer(..., callbacks=[callback])
    """

    def __init__(self, controller: Any, *, batch_size: int | None = None, history: History = False) -> None:
        self.controller = controller_of(None, controller)
        self._history = LiveHistory(history)
        self._batch_size = None if batch_size is None else as_whole("batch_size", batch_size, least=1)
        self._newest = 0
        self._examples = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue with the state of a checkpoint."""
        saved = state.stateful_callbacks.get(_CONTROLLER_NAME)
        self._examples = 0
        if saved is not None:
            saved = as_state(saved, of="BatchSizeCallback", needs=["controller"])
            examples = read_whole(saved, "examples")
            self.controller.load_state_dict(saved["controller"])
            self._examples = examples

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the size that holds for this update."""
        self._newest = read_size(self.controller) if self._batch_size is None else self._batch_size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the examples of the update."""
        self._examples += self._newest
        self._save(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Observe what is logged of training; logs of evaluation are left out."""
        if not logs or "loss" not in logs:
            return
        change = observe(
            self.controller,
            epoch=int(state.epoch),
            step=state.global_step,
            examples=self._examples,
            batch_size=self._newest,
            loss=logs["loss"],
            lr=logs.get("learning_rate"),
        )
        if change is not None and state.is_world_process_zero:
            self._history.show(change, _write)
        logs["batch_size_wanted"] = state.log_history[-1]["batch_size_wanted"] = read_size(self.controller)
        self._save(state)

    def _save(self, state: Any) -> None:
        # Now, as the trainer writes its state before it calls on_save.
        state.stateful_callbacks[_CONTROLLER_NAME] = {
            "controller": self.controller.state_dict(),
            "examples": self._examples,
        }
