"""AdaptiveTrainerMixin: the hooks of a ``Trainer``, each handed to the object that does the work.

The mixin keeps one attribute, ``_batching``, a ``Batching`` with the collaborators: the training data, the updates, the
weights of losses, the evaluation and a callback. Each holds its own state and gets what else it needs as arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy.typing as npt
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from ..._checks import shared_options
from ...errors import ArgumentError
from ...plan.budget import Budget
from ...plan.grouping.base import Grouping
from ...size.learning_rate import Beta2Rule, Rule
from ...step.calibration.found import FoundBudget
from ...step.graphs.summary import GraphSummary
from ...step.huggingface import unwrapped
from ...step.losses import needs_whole_batch
from ...step.memory.fit_to_memory import FitToMemory
from ...step.memory.monitor import MemoryMonitor
from .._auto import is_auto
from .._auto_budget import BudgetChoice, BudgetFinder
from .._devices import Devices, on_its_own, one_process, undivided
from .._graphs import Choice, captured
from .._observing import History
from .._options import Call
from .._trial_loss import takes_own_loss
from ._data import TrainLoader, fetch_together, micro_batches_of
from ._drawing import Unused, check_loader, check_order
from ._evaluating import PlannedEvaluation
from ._probing import budget_of_trainer
from ._sentences import check_sentences, losses_of
from ._settings import OnOom, Settings, Weighting, check_trainer, check_trainer_class, for_data, with_controller
from ._streams import accumulating, check_stream
from ._trl import check_can_be_planned, needs_whole, pair_loss, without_figures
from ._weights import TrainerLoss, UpdateWeight, row_key
from .callbacks import Batching

# The key of the state in trainer_state.json, under stateful_callbacks.
STATE_NAME = "batchwright"


class AdaptiveTrainerMixin(PlannedEvaluation):
    """Train on planned or resizable batches: ``class MyTrainer(AdaptiveTrainerMixin, Seq2SeqTrainer): ...``.

    Without a controller, each device runs one planned batch per micro step, and ``gradient_accumulation_steps`` of them
    make an update. With a controller, an update uses ``controller.size`` examples over all ranks, cut into
    micro-batches under the budget; ``gradient_accumulation_steps`` stays 1.

    An update uses the gradient of the mean over all its labels on all ranks. It does not depend on the sizes of the
    micro-batches, nor on whether the model takes ``num_items_in_batch``; the first micro-batch shows what the loss is a
    mean over. If it cannot tell, updates of several micro-batches are refused. ``step.losses.whole_batch`` marks a
    ``compute_loss``, ``compute_loss_func`` or model that compares the examples of a batch, which is then never cut.

    Every example counts once per epoch: if fewer examples than ranks are left, a rank without one runs the example of
    another rank with weight 0. A checkpoint holds the place in the epoch and the state of the controller, so
    ``resume_from_checkpoint`` continues with the very next batch. Evaluation is planned too: predictions come in the
    order of the data, and the loss is the exact mean.

    The trainer logs with the loss: ``batch_size`` (per update, over all ranks), ``num_micro_batches``, ``padding``,
    ``ooms``, and if they are in use ``batch_size_wanted``, ``noise_scale``, ``entropy`` and ``lr_factor``.

    Args:
        *args: of the trainer.
        budget: what runs at once on a device, e.g. ``MaxTokens(8192)``; with a controller, None takes
            ``per_device_train_batch_size`` examples. ``"auto"`` runs a few batches of the data when training begins,
            and takes what fits in 0.9 of the memory, but no more than throughput gains 5 % from; with a controller
            only memory counts, and on a CPU only throughput. Everything is put back, all ranks agree, and the result
            is kept in ``~/.cache/batchwright`` and in checkpoints; ``found_budget`` returns it.
        controller: decides how many examples an update uses. ``"auto"`` looks for the size that learns fastest, by
            ``size.goodput``: from ``per_device_train_batch_size`` × ``gradient_accumulation_steps`` × ranks to 64 times
            as many, and at most a twentieth of the data. Rate and beta2 follow the size as they should with the
            optimizer (``lr_rule`` and ``beta2_rule`` say otherwise), a schedule over epochs follows the examples, and
            every change is logged with its reason. Without a budget, a whole batch runs at once if it fits in memory;
            ``per_device_train_batch_size`` examples if gradients are accumulated, or with ``on_oom="raise"``.
        grouping: which examples share a planned batch; None is ``WindowSort()``. ``Packed(capacity)`` trains without
            padding where attention can run on flat batches: on CUDA in half precision, without dropout of attention.
            Elsewhere batches are padded by ``WindowSort``, and the reason is logged once.
        lengths: of the training examples. None takes the column ``length_column_name``, or measures ``input_ids``, and
            ``labels`` if they have other lengths.
        weighting: ``"tokens"``: every label counts the same. ``"examples"``: every example counts the same, with the
            mean over its own labels. If labels are tokens, this needs the logits, and a loss that is their cross
            entropy.
        on_oom: ``"split"`` runs a micro-batch that runs out of memory again in smaller pieces, exactly; if one example
            does not fit by itself, or the micro-batch cannot be cut, it raises ``DoesNotFitError``. ``"skip"``
            leaves the micro-batch out, but its labels still count in the mean. Both need memory for a second gradient
            if an update has several micro-batches, and under DDP they reduce gradients after the backward pass, not
            during it. ``"raise"`` changes none of this.
        micro_batch: a ``FitToMemory``, which lets at most ``.size`` examples of a micro-batch run at once and follows
            the memory in use; it reads ``memory``, or by itself a GPU. Not with ``on_oom="raise"``.
        lr_rule: ``"none"``, ``"linear"``, ``"sqrt"``, ``"adascale"`` or a function of ``(batch_size, base_size)``; it
            applies only inside the optimizer's step. None is ``"none"``, except with ``controller="auto"``. With
            ``budget="auto"`` and no controller it gets the mean size of the planned updates.
        base_size: the batch size over all ranks that ``learning_rate`` was chosen for; needed with ``lr_rule`` and
            ``beta2_rule``.
        measure_noise: estimate gradient noise; micro-batches are then random parts, which pad more. A number ``n``
            measures only every n-th update. Needs a controller; ``"auto"`` measures every 8th.
        memory: reads the peak memory of every update, for policies that follow it; None finds the device's own if the
            policy is a ``memory_driven``. On a CPU that is the memory of the process.
        eval_budget: what a batch of evaluation may cost; ``"same"`` takes ``budget``, None does not plan evaluation.
            ``"auto"`` finds what fits without a backward pass, as ``"same"`` does with ``budget="auto"``.
        plan_options: further options of ``BatchSampler``, e.g. ``{"keep_first": 3}``.
        graphs: True captures forward and backward of every planned shape in CUDA graphs and replays them; use it with
            ``grouping=Buckets(32)``. Batches are padded to the planned lengths. Clipping and the optimizer's step stay
            the trainer's. What cannot be captured runs eagerly, and a warning says why once. ``"auto"`` keeps graphs
            only where they pay, and warns where True is refused.
        curriculum: a ``size.Curriculum``, which chooses the examples of every epoch; needs a controller.
        measure_entropy: measure the entropy of the model's output from the logits of the loss, over the labels that
            count. None measures it if the policy is an ``entropy_driven``, or says that it ``needs`` it.
        history: True prints a line per change of the size, with its reason, and logs it with the trainer's own ``log``;
            a function gets the line instead.
        beta2_rule: ``"half_life"`` or a function of ``(batch_size, base_size, beta2)`` that returns another ``beta2``
            for optimizers like Adam, only inside their step. None leaves it, except with ``controller="auto"``.
        **kwargs: of the trainer.
    """

    args: Any
    accelerator: Any
    model: Any
    state: Any
    callback_handler: Any
    control: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    compute_metrics: Callable[..., Any] | None
    compute_loss_func: Callable[..., Any] | None
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        budget: BudgetChoice | None = None,
        controller: Any = None,
        grouping: Grouping | None = None,
        lengths: npt.ArrayLike | None = None,
        weighting: Weighting = "tokens",
        on_oom: OnOom = "split",
        micro_batch: FitToMemory | None = None,
        lr_rule: str | Rule | None = None,
        base_size: int | None = None,
        measure_noise: bool | int = False,
        memory: MemoryMonitor | None = None,
        eval_budget: Budget | Literal["same", "auto"] | None = "same",
        plan_options: Mapping[str, Any] | None = None,
        graphs: Choice = False,
        curriculum: Any = None,
        measure_entropy: bool | None = None,
        history: History = False,
        beta2_rule: str | Beta2Rule | None = None,
        **kwargs: Any,
    ) -> None:
        check_trainer_class(transformers.Trainer, transformers.__version__)
        check_can_be_planned(type(self))
        check_order(type(self))
        plan_options = dict(plan_options or {})
        settings = Settings(**shared_options(Settings, locals()))
        self._batching, self._finder = Batching(settings), BudgetFinder()
        super().__init__(*args, **kwargs)
        if is_auto(controller):
            settings = with_controller(settings, self)
            self._batching = Batching(settings)
        check_trainer(settings, self)
        check_stream(settings, self)
        check_sentences(self)
        has_controller, has_limit = controller is not None, micro_batch is not None
        self._batching.graphs.check(self, has_controller=has_controller, on_oom=on_oom, has_limit=has_limit)
        # First, so that other callbacks see the epoch and the size that hold.
        self.callback_handler.callbacks.insert(0, self._batching.callback)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does; even after an error, the learning rate is the one of the schedule."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._batching.close()
            self._finder.checkpoint = None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; logs of training get the figures of their batches."""
        if "loss" in logs:
            logs.update(self._batching.take_figures())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        is_due = self.control.should_log
        for change in self._batching.callback.take_changes():
            with without_figures(self):
                self.log({**change.figures(), "batch_size_reason": change.decision.reason})  # type: ignore[dict-item]
        self.control.should_log = is_due  # a log of a change does not stand for that of the update
        self._batching.losses.leave(self.args)  # a callback may have run a step
        return super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    # The training data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the trainer's own loader with the batches of this rank."""
        check_stream(self._batching.settings, self)  # it may have been set later
        base = super().get_train_dataloader()  # type: ignore[misc]
        check_loader(self, base)
        self._follow_data(base)
        own = self._uses_own_loss()
        return self._batching.data.loader(base, self.train_dataset, has_own_loss=own, **self._loading())

    def _follow_data(self, base: Any) -> None:
        """Follow the data that is trained on: it bounds ``controller="auto"``, and ``budget="auto"`` is found on it."""
        before, settings = self._batching, for_data(self._batching.settings, self.train_dataset)
        if settings.finds_budget and self.train_dataset is not None:
            found = budget_of_trainer(self, settings, base, self._finder)
            settings = settings if found == settings.budget else replace(settings, budget=found)
        if settings is not before.settings:
            self._batching = Batching(settings, before.lengths)
            callbacks = self.callback_handler.callbacks
            callbacks[callbacks.index(before.callback)] = self._batching.callback

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(transformers.Trainer._inner_training_loop, args, kwargs)
        self._finder.checkpoint = call.arguments.get("resume_from_checkpoint")
        return call.hand_on(super()._inner_training_loop)  # type: ignore[misc]

    @property
    def found_budget(self) -> FoundBudget | None:
        """Return what ``budget="auto"`` found, to be given as ``budget`` elsewhere; None before training."""
        found = self._batching.settings.budget
        return found if isinstance(found, FoundBudget) else None

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return Unused(self.train_dataset)

    def set_initial_training_values(self, args: Any, dataloader: Any, *rest: Any) -> tuple[Any, ...]:
        """Return the trainer's numbers of epochs, steps and examples; epochs may have unequal numbers of steps."""
        values = tuple(super().set_initial_training_values(args, dataloader, *rest))  # type: ignore[misc]
        return self._batching.data.training_values(values, args, dataloader, self._finder.checkpoint)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs_trained, num_skipped = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        if self._batching.data.batches is None:
            return epochs_trained, num_skipped
        self._batching.updates.start(self.model)
        self._batching.data.begin(self.state)
        if self.state.global_step == 0:
            return epochs_trained, num_skipped
        saved = self.state.stateful_callbacks.get(STATE_NAME)
        # Our loader continues at the saved place, so the trainer has no batches to skip.
        return self._batching.restore(saved, epochs_trained, ignores_place=self.args.ignore_data_skip), 0

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(transformers.Trainer._run_epoch, args, kwargs)
        # An item of a stream is a whole update, so that the last one of a pass may have fewer batches.
        with accumulating(self, self._batching.data.accumulation and 1), self._batching.losses.instead_of(self):
            if isinstance(call.arguments["train_dataloader"], TrainLoader):
                self._batching.data.begin_epoch(call.arguments, self.args.gradient_accumulation_steps)
            return call.hand_on(super()._run_epoch)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self._batching.data.batches is not None:
            self.state.stateful_callbacks[STATE_NAME] = self._batching.state_dict()
        with accumulating(self, self._batching.data.accumulation):  # which the saved arguments should hold
            return super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _loading(self) -> dict[str, Any]:
        """Return what a loader of planned batches depends on, besides the data."""
        return {"collator": self.data_collator, "model": self.model, "devices": Devices.of(self)}

    # The updates

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the items of an update, and begin it."""
        batches = self._batching.data.batches
        if self._batching.data.has_ended:
            return [], None
        call = Call(transformers.Trainer.get_batch_samples, args, kwargs)
        given = call.arguments
        if batches is not None:
            given["epoch_iterator"] = iter(fetch_together(given["epoch_iterator"], given["num_batches"], self.args))
        items, num_items = call.hand_on(super().get_batch_samples)  # type: ignore[misc]
        if items and batches is not None:
            self._batching.updates.begin(
                micro_batches_of(items),
                batches.take_received(),
                loss=self._trainer_loss(),
                devices=Devices.of(self),
                optimizer=self.optimizer,
            )
        return items, num_items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of an item, micro-batch by micro-batch."""
        updates, step = self._batching.updates, super().training_step  # type: ignore[misc]
        is_weighed, devices, parts = updates.whole is not None, Devices.of(self), micro_batches_of([inputs])
        self._batching.graphs.begin(model, self.optimizer, self._captured_loss, devices, is_weighed=is_weighed)
        with undivided(self) if is_weighed else nullcontext():
            loss = updates.run(
                lambda module, part: step(module, part, *args, **kwargs), model, parts, devices, self.optimizer
            )
        self._batching.losses.begin(self)
        return loss

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss: in training its part of the update's mean, in evaluation the mean of the batch."""
        compute = functools.partial(self._loss_of_one_process, model, inputs)
        weights, entropy = self._batching.weights, self._batching.updates.entropy
        labels = entropy.labels(inputs)
        with_outputs = return_outputs or labels is not None
        with self._batching.call_figures.noted(self, inputs, row_key(inputs, self.model)):
            found = weights.loss(compute, inputs, with_outputs=with_outputs)
            if found is None:
                found = super().compute_loss(model, inputs, return_outputs=with_outputs, **kwargs)  # type: ignore[misc]
                found = found if with_outputs else (found, None)
        if labels is not None:
            entropy.note(found[1], labels, shifts=weights.shifts(unwrapped(self.model), labels.get("labels")))
        return found if return_outputs else found[0]

    def _captured_loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the loss of a micro-batch with its weights, as a graph holds it."""
        whole = UpdateWeight(batch["total"], Devices.of(self).num_replicas)
        with captured(self), self._batching.weights.weighing(whole, weight=batch["weight"]):
            inputs = self._prepare_inputs(dict(batch["inputs"]))  # type: ignore[attr-defined]
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=batch["total"])
                return loss

    def graph_summary(self) -> GraphSummary:
        """Return what graphs did in the newest training: shapes, how often they were replayed, memory and seconds."""
        return self._batching.graphs.summary()

    def _loss_of_one_process(
        self, model: Any, inputs: dict[str, Any], num_items: Any, return_outputs: bool = False
    ) -> Any:
        with one_process(self.args):
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items
            )

    def _tried_loss(self, model: Any, inputs: dict[str, Any], num_items: Any) -> Any:
        with on_its_own(self):
            return self._loss_of_one_process(model, inputs, num_items)

    def _trainer_loss(self) -> TrainerLoss:
        return TrainerLoss(
            self._tried_loss,
            self.model,
            self._prepare_inputs,  # type: ignore[attr-defined]
            needs_whole=self._needs_whole_batch(),
            is_own=self._uses_own_loss(),
            smooths=self.args.label_smoothing_factor > 0,
            pairs=pair_loss(self, super().compute_loss),  # type: ignore[misc]
        )

    def _uses_own_loss(self) -> bool:
        """Say whether the trainer takes the loss as the model returns it."""
        return takes_own_loss(super().compute_loss, self.compute_loss_func)  # type: ignore[misc]

    def _needs_whole_batch(self) -> bool:
        """Say whether ``whole_batch`` marks the trainer's ``compute_loss``, its losses or the model."""
        theirs = super().compute_loss  # type: ignore[misc]
        marked = (self.compute_loss, theirs, self.compute_loss_func, unwrapped(self.model), *losses_of(self))
        return needs_whole(self) or any(map(needs_whole_batch, marked))

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of an item, whose loss the trainer has just added."""
        self._batching.losses.end(self)
        return sum(map(super().floating_point_ops, micro_batches_of([inputs])))  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for part in micro_batches_of([inputs]):
            super()._track_num_input_tokens(part)  # type: ignore[misc]


@functools.cache
def adaptive(trainer_cls: type) -> type:
    """Return the class ``Adaptive<Trainer>`` of a trainer class; every call returns the same one.

    Args:
        trainer_cls: ``Trainer``, ``Seq2SeqTrainer`` or your own class.

    >>> from transformers import Seq2SeqTrainer
    >>> adaptive(Seq2SeqTrainer)
    <class 'batchwright.integrations.huggingface.AdaptiveSeq2SeqTrainer'>
    """
    if not (isinstance(trainer_cls, type) and issubclass(trainer_cls, transformers.Trainer)):
        kind = type(trainer_cls).__name__
        got = repr(trainer_cls) if isinstance(trainer_cls, type) else f"an object of type {kind}"
        raise ArgumentError(f"adaptive takes a transformers Trainer class, got {got}; write adaptive(Trainer)(model=…)")
    if issubclass(trainer_cls, AdaptiveTrainerMixin):
        return trainer_cls
    return type(f"Adaptive{trainer_cls.__name__}", (AdaptiveTrainerMixin, trainer_cls), {"__module__": __package__})
