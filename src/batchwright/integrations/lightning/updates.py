"""Exact updates under a Lightning Trainer: a mixin for modules, and the callback that keeps data and sizes with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..._checks import as_state, load_parts
from ...errors import ArgumentError, StateMismatchError
from ...step import Stepper, StepReport
from ...step.calibration.found import FoundBudget
from ...step.graphs.summary import GraphSummary
from ...step.losses import LossFunction, Sums, needs_whole_batch, whole_batch
from .._auto import Ticks, chose_vectors, is_auto, resizable_loader
from .._auto import stepper_options as auto_options
from .._auto_budget import BudgetFinder
from .._graphs import ReplayError, replayable
from .._observing import Change, History, LiveHistory, observe, with_memory
from .._options import check_options, move_after_collate
from .._planned_budget import PlannedBudget, check_sampler, wants_auto
from .._ranked import controller_of
from .._vector_fallback import VectorFallback, in_parts
from ._loaders import TrainLoader, check_planned
from ._package import Callback
from .modules import ExactUpdates, Hooks, find_for_trainer, options_with_graphs, refuse_methods, without_graphs

# Other precisions of Lightning do not use autocast.
_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
_HINTS = {
    "entropy": "loss_fn is your loss_sums",
    "noise": "pass measure_noise=True to AdaptiveBatching",
}


@final
class AdaptiveBatching(Callback):
    """Keeps planned data, exact updates and batch sizes together: epochs, ranks, checkpoints, logs.

    A checkpoint holds the place in the data, the state of the controller and what the stepper learned, so that
    ``trainer.fit(…, ckpt_path=…)`` continues with the very next batch. Lightning saves no random state: dropout draws
    other masks after a restart. All ranks get what the first rank learned about memory.

    Where the length of an epoch is not known, as with ``ResizableBatchSampler``, Lightning fetches one batch ahead: a
    new size takes effect one update later.

    Logged every ``log_every_n_steps``: ``loss``, ``batch_size``, ``num_micro_batches``, ``ooms`` (over all ranks, since
    the start), and ``noise_scale``, ``entropy`` and ``memory_fraction`` if they are measured; ``padding`` once per
    epoch, if batches are planned.

    Args:
        controller: observes every update; None takes the sampler's. Its policy may read memory: the device's own is
            found without ``memory=``, on a CPU that of the process. Entropy is what ``loss_sums`` returns in its third
            place: ``{"entropy": entropy_sum(logits, targets)}``. ``"auto"`` looks for the size that learns fastest, by
            ``size.goodput``: the training data is a ``DataLoader`` with a ``batch_size``, and the size begins at that
            times the ranks. Rate and beta2 follow the size as they should with the optimizer, gradient noise is
            measured, and schedulers advance once per so many examples; options given here stay.
        prefix: goes before the logged names.
        history: True prints a line per change of the size, with its reason, and hands its figures to the Trainer's
            loggers; a function gets the line instead.
        budget: None keeps that of the ``BatchSampler``; ``"auto"`` finds one on batches of the data when training
            begins: what fits in 0.9 of the memory, but no more than throughput gains 5 % from. Everything is put back,
            all ranks agree, and the result is kept in ``~/.cache/batchwright`` and in checkpoints.
        **stepper_options: options of ``Stepper``, such as ``micro_batch``, ``clip_norm`` or ``collate``;
            ``precision="16-mixed"`` needs ``weight_of``. With ``graphs`` the shapes are those of the sampler, and
            ``loss_sums`` neither logs nor reads the Trainer.

    Attributes:
        stepper: made when training starts; None for modules without ``ExactUpdates``.
        controller: what observes, or None.
        loader: the training data, None if Lightning divides it.
        report: the report of the newest update.
        num_ooms: how often the ranks ran out of memory since the start, all together.
    """

    def __init__(
        self,
        *,
        controller: Any = None,
        prefix: str = "batchwright/",
        history: History = False,
        budget: Literal["auto"] | None = None,
        **stepper_options: Any,
    ) -> None:
        super().__init__()
        self._history = LiveHistory(history)
        check_options(stepper_options, "Trainer(precision=…)")
        self.stepper: Stepper | None = None
        self.controller: Any = None
        self.loader: TrainLoader | None = None
        self.report: StepReport | None = None
        self.num_ooms = 0
        self._hooks: Hooks | None = None
        self._given_controller = controller
        self._prefix = prefix
        self._options = stepper_options  # as given: every fit adds its own
        self._in_use: dict[str, Any] = {}
        self._fallback: VectorFallback | None = None
        self._loaded: dict[str, Any] = {}  # states that wait for the part they belong to
        self._is_auto = is_auto(controller)
        self._ticks: Ticks | None = None
        self._finds_budget, self._finder = wants_auto(budget), BudgetFinder()
        self._budget: PlannedBudget | None = None

    @property
    def found_budget(self) -> FoundBudget | None:
        """Return what ``budget="auto"`` found, None before training."""
        return None if self._budget is None else self._budget.budget

    def resizable(self, loader: Any, world_size: int) -> Any:
        """Return the training data with batches of any size, if it is to be found; ``planned_loader`` calls it."""
        if not self._is_auto:
            return loader
        base_size, batch_size = self._options.get("base_size"), getattr(loader, "batch_size", None)
        loader, self._given_controller = resizable_loader(loader, world_size, base_size=base_size)
        self._ticks = Ticks((batch_size or 1) * world_size)
        return loader

    def attach(self, loader: TrainLoader) -> None:
        """Take charge of the training data; ``planned_loader`` calls it."""
        self.loader, self._budget = loader, None
        if self._finds_budget:
            check_sampler(loader.source)
            loader.before_plan = self._find_budget
        # Now, not when training starts: Lightning may fetch a batch earlier, at the size of a restored controller.
        self.controller = controller_of(loader, self._given_controller)
        self._hand_out()

    def _find_budget(self) -> bool:
        """Give the sampler the budget that is found, unless a checkpoint has given it one; return that it has one."""
        assert self.loader is not None
        if self._budget is None:
            autocast = _DTYPES.get(self.loader.trainer.precision)
            found = find_for_trainer(self._finder, self.loader.trainer, self.loader, self._options, autocast)
            self._budget = PlannedBudget(self.loader.source, found)
        return True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the stepper: by now the Trainer has placed and wrapped the model and the optimizer."""
        check_planned(self.loader, finds_size=self._is_auto, finds_budget=self._finds_budget)
        self.controller = controller_of(self.loader, self._given_controller)
        if isinstance(pl_module, ExactUpdates):
            refuse_methods(pl_module)
            optimizer = _only_optimizer(pl_module).optimizer
            self._in_use, model = dict(self._options), trainer.strategy.model
            if self._is_auto:
                self._in_use = auto_options(self._options, model, optimizer, self.controller.min_size)
            self._hooks = Hooks(trainer, pl_module, optimizer, has_scaler=_scaler_of(trainer) is not None)
            self._fallback = None
            if chose_vectors(self._in_use, self._options):
                self._fallback = VectorFallback(model, lambda: self._make_in_parts(trainer, pl_module))
            make = partial(self._make_stepper, trainer, pl_module)
            self.stepper = make() if self._fallback is None else self._fallback.first(make)
        elif self.controller is not None or self._options:
            raise ArgumentError(
                f"{type(pl_module).__name__} runs its own updates; a controller and options of Stepper need exact "
                "ones: derive it from ExactUpdates"
            )
        self._hand_out()
        if self._loaded:
            raise StateMismatchError(
                f"the checkpoint holds the state of {', '.join(sorted(self._loaded))}, which this run does not have; "
                "use the same parts, or start without the checkpoint"
            )

    def run_update(self, trainer: Any, module: Any, batch: Any) -> StepReport:
        """Run one update and let the controller observe it; ``ExactUpdates.training_step`` calls it."""
        # A Trainer opens autocast around the whole step; Stepper opens it only in forward passes.
        with _counted(trainer, module), torch.autocast(module.device.type, enabled=False):
            try:
                report = self.report = self._run(batch)
            except ReplayError as error:
                self._leave_graphs(trainer, module, error)
                report = self.report = self._run(batch)
        _advance_schedulers(trainer, module, self._ticks, report.batch_size)
        self.num_ooms += report.ooms
        if self.controller is not None:
            completed = trainer.current_epoch + trainer.is_last_batch
            change = observe(self.controller, hints=_HINTS, epoch=completed, **report.observation())
            if change is not None and self._history.is_wanted:
                self._announce(trainer, change)
        return report

    def _announce(self, trainer: Any, change: Change) -> None:
        if trainer.is_global_zero:
            self._history.show(change, trainer.print)
        figures = {self._prefix + name: value for name, value in change.figures().items()}
        for logger in trainer.loggers:  # its methods do nothing on other ranks
            logger.log_metrics(figures, step=trainer.global_step)

    def _make_stepper(self, trainer: Any, module: Any) -> Stepper:
        assert self._hooks is not None
        options = options_with_graphs(self._in_use, trainer, module, self.loader)
        return _make_stepper(trainer, module, self._hooks, with_memory(options, self.controller, module.device))

    def _make_in_parts(self, trainer: Any, module: Any) -> Stepper:
        self._in_use = in_parts(self._in_use)
        return self._make_stepper(trainer, module)

    def _leave_graphs(self, trainer: Any, module: Any, error: ReplayError) -> None:
        """Go on eagerly with ``graphs="auto"``, after an update that has changed nothing; otherwise raise."""
        if self.stepper is None or self._in_use.get("graphs") != "auto":
            raise error
        warnings.warn(f"steps run eagerly, without graphs: {error}", stacklevel=4)
        self.stepper.abandon()
        state = self.stepper.state_dict()
        self._in_use = without_graphs(self._in_use)
        self.stepper = self._make_stepper(trainer, module)
        self.stepper.load_state_dict(state)

    def graph_summary(self) -> GraphSummary:
        """Return what graphs did so far: shapes, how often they were replayed, memory, seconds spent and saved."""
        return GraphSummary() if self.stepper is None else self.stepper.graph_summary()

    def _run(self, batch: Any) -> StepReport:
        assert self.stepper is not None
        if self._fallback is None:
            return self._step(batch, self.stepper)
        self.stepper, report = self._fallback.run(self.stepper, partial(self._step, batch))
        return report

    def _step(self, batch: Any, stepper: Stepper) -> StepReport:
        """Run one update and the hooks in it."""
        assert self._hooks is not None
        stepper.accumulate(batch)
        stepper.reduce()
        try:
            self._hooks.after_backward()
            with self._hooks.around_step():
                return stepper.update()
        except BaseException:
            stepper.abandon()
            raise

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Log the padding of the rest of the epoch, if batches are planned."""
        plan = getattr(self.loader.source, "plan", None) if self.loader is not None else None
        if plan is not None and len(plan) > 0:
            padding = _padding_of(plan)
            pl_module.log(f"{self._prefix}padding", padding, on_step=False, on_epoch=True, batch_size=1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the update when a log is due; between logs nothing is read from the device."""
        every = trainer.log_every_n_steps  # 0 turns logs off
        if self.report is None or every == 0 or trainer.global_step % every:
            return
        figures = {**_figures_of(self.report), "ooms": float(self.num_ooms)}
        known = {self._prefix + name: value for name, value in figures.items() if value is not None}
        pl_module.log_dict(known, on_step=True, on_epoch=False, batch_size=self.report.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and the states of the controller and the stepper, as JSON values."""
        state = dict(self._loaded)
        if self.loader is not None:
            state["place"] = self.loader.place()
        if self._budget is not None:
            state["budget"] = {"found": self._budget.budget.to_json()}
        state.update({name: part.state_dict() for name, part in self._parts().items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a state was taken; a part that does not exist yet gets its state once it does."""
        before, self._loaded = self._loaded, dict(as_state(state_dict, of="AdaptiveBatching"))
        try:
            self._hand_out()
        except Exception:
            self._loaded = before
            raise

    def _hand_out(self) -> None:
        if self._fallback is not None and self.stepper is not None and "stepper" in self._loaded:
            self.stepper = self._fallback.for_state(self.stepper, self._loaded["stepper"])
        parts = self._parts()
        if self._finds_budget and self.loader is not None and "budget" in self._loaded:
            # First, as the place is one in its plan.
            found = as_state(self._loaded.pop("budget"), of="AdaptiveBatching", needs=["found"])["found"]
            self._budget = PlannedBudget(self.loader.source, FoundBudget.from_json(found))
        if self.loader is not None:
            parts = {"place": SimpleNamespace(state_dict=self.loader.place, load_state_dict=self.loader.go_to), **parts}
        parts = {name: part for name, part in parts.items() if name in self._loaded}
        load_parts(parts, self._loaded)
        self._loaded = {name: state for name, state in self._loaded.items() if name not in parts}

    def _parts(self) -> dict[str, Any]:
        parts = {"stepper": self.stepper, "controller": self.controller, "schedule": self._ticks}
        return {name: part for name, part in parts.items() if part is not None}


def _make_stepper(trainer: Any, module: Any, hooks: Hooks, options: Mapping[str, Any]) -> Stepper:
    _check_strategy(trainer)
    has_graphs = options.get("graphs", False) is not False
    loss_fn = _loss_of(module, None if has_graphs else hooks)
    optimizer, scaler = _only_optimizer(module), _scaler_of(trainer)
    return Stepper(
        trainer.strategy.model,
        # Lightning's step counts and calls hooks; with a scaler it would use that a second time.
        optimizer if scaler is None else optimizer.optimizer,
        loss_fn,
        autocast=_DTYPES.get(trainer.precision),
        scaler=scaler,
        **move_after_collate(options, lambda batch: module.transfer_batch_to_device(batch, module.device, 0)),
    )


def _check_strategy(trainer: Any) -> None:
    """Refuse strategies whose gradients Stepper would not see whole, or whose optimizer is not torch's."""
    strategy, model = trainer.strategy, trainer.strategy.model
    is_plain = trainer.world_size == 1 and model is trainer.lightning_module
    if strategy.handles_gradient_accumulation or not (is_plain or isinstance(model, DistributedDataParallel)):
        raise ArgumentError(
            f"ExactUpdates needs one device or strategy='ddp', but the Trainer has {type(strategy).__name__}"
        )


def _only_optimizer(module: Any) -> Any:
    optimizers = module.optimizers()
    if isinstance(optimizers, list):
        raise ArgumentError(
            f"ExactUpdates needs a single optimizer, but configure_optimizers returned {len(optimizers)}; "
            "give groups of parameters to one, or call Stepper in a training_step of your own"
        )
    return optimizers


def _loss_of(module: Any, hooks: Hooks | None) -> LossFunction:
    """Return ``loss_sums`` as a Stepper calls it; what was said about splitting the batch stays said.

    Args:
        module: has ``loss_sums``.
        hooks: run before the backward pass; None where steps are replayed.
    """

    def loss_fn(model: Any, batch: Any) -> Sums:
        if hooks is None:
            with replayable(module):
                return model.loss_sums(batch)
        sums: Sums = model.loss_sums(batch)
        if isinstance(sums, tuple):  # anything else is refused by the Stepper
            hooks.before_backward(sums[0])
        return sums

    return whole_batch(loss_fn) if needs_whole_batch(module.loss_sums) else loss_fn


def _scaler_of(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


@contextmanager
def _counted(trainer: Any, module: Any) -> Iterator[None]:
    """Count an update whose optimizer is not stepped through Lightning; ``trainer.global_step`` is this count."""
    if _scaler_of(trainer) is None:
        yield
        return
    optimizer = module.optimizers()
    optimizer._on_before_step()
    yield
    optimizer._on_after_step()


def _advance_schedulers(trainer: Any, module: Any, ticks: Ticks | None, num_examples: int) -> None:
    """Advance the schedulers of the learning rate as automatic optimisation does, by interval and frequency.

    With ticks, the interval ``"step"`` counts updates of the base size, at any size.
    """
    step = trainer.fit_loop.batch_idx + 1
    counts = {"step": range(step, step + 1) if ticks is None else ticks.take(num_examples)}
    if trainer.is_last_batch:
        counts["epoch"] = range(trainer.current_epoch + 1, trainer.current_epoch + 2)
    for config in trainer.lr_scheduler_configs:
        for count in counts.get(config.interval, ()):
            if count % config.frequency == 0 and not isinstance(config.scheduler, ReduceLROnPlateau):
                module.lr_scheduler_step(config.scheduler, None)


def _figures_of(report: StepReport) -> dict[str, float | None]:
    return {
        "loss": report.loss,
        "batch_size": float(report.batch_size),
        "num_micro_batches": float(report.num_micro_batches),
        "entropy": report.entropy,
        "noise_scale": None if report.noise is None else report.noise.scale,
        "memory_fraction": report.memory_fraction,
    }


def _padding_of(plan: Any) -> float:
    """Return the share of padding: ``1 - tokens / padded tokens``."""
    shapes = plan.shapes.astype("int64")
    padded = int((shapes[:, 0] * shapes[:, 1:].sum(axis=1)).sum())
    real = int(plan.lengths[plan.indices].sum(dtype="int64"))
    return 1 - real / padded
