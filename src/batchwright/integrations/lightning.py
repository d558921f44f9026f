"""Lightning: planned or resizable batches that survive DDP and checkpoints, and exact updates in a small module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from .._optional import is_installed, require
from ..errors import ArgumentError, StateMismatchError

# The package has two names. With both installed, Trainers of the other one take all of this but PlannedDataModule.
if TYPE_CHECKING or is_installed("lightning") or not is_installed("pytorch_lightning"):
    require("lightning", extra="lightning")
    from lightning.pytorch import Callback, LightningDataModule
else:
    from pytorch_lightning import Callback, LightningDataModule

# After the check, so that its message is read.
from ..step import Stepper, StepReport
from ..step.losses import Sums
from ._lightning_checks import check_options, check_overfitting
from ._lightning_figures import log_padding, log_report
from ._lightning_loader import EvaluationLoader, TrainLoader
from ._lightning_update import make_stepper, run_update
from ._ranked import controller_of, sampler_of

__all__ = ["AdaptiveBatching", "ExactUpdates", "PlannedDataModule", "planned_loader"]


class ExactUpdates(ABC):
    """Mixin of a ``LightningModule`` whose updates are exact, whatever the batch and however it is split.

    Lightning's automatic optimisation takes the mean of the means of micro-batches and of ranks. That is the mean of
    the batch only if all are equally large, which planned batches are not. So the update is run by hand, by a
    ``Stepper`` that ``AdaptiveBatching`` makes. Write ``loss_sums`` in place of ``training_step``; ``forward``,
    ``configure_optimizers`` and ``validation_step`` stay as they are. Schedulers of the learning rate advance as in
    automatic optimisation, by ``interval`` and ``frequency``; ``ReduceLROnPlateau`` is left to you.

    ``Trainer(gradient_clip_val=…)`` and ``accumulate_grad_batches`` belong to automatic optimisation; use
    ``AdaptiveBatching(clip_norm=…)`` and larger batches.

    >>> import torch
    >>> from lightning.pytorch import LightningModule
    >>> class Regression(ExactUpdates, LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(4, 1)
    ...
    ...     def loss_sums(self, batch):
    ...         x, y = batch
    ...         return (self.layer(x) - y).square().sum(), len(x)  # the summed loss, and what it sums over
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
    >>> Regression().automatic_optimization
    False
    """

    trainer: Any

    @abstractmethod
    def loss_sums(self, batch: Any) -> Sums:
        """Return ``(loss_sum, weight)`` of a micro-batch, or ``(loss_sum, weight, {name: sum})``."""

    @property
    def automatic_optimization(self) -> bool:
        """Return False: the update is run by hand."""
        return False

    @automatic_optimization.setter
    def automatic_optimization(self, value: bool) -> None:
        if value:
            raise ArgumentError("ExactUpdates runs the update by hand; leave automatic_optimization at False")

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, StepReport]:
        """Run one update."""
        return {"report": find_callback(self.trainer).run_update(self.trainer, self, batch)}


@final
class AdaptiveBatching(Callback):
    """Holds planned data, exact updates and batch sizes together: epochs, ranks, checkpoints, logs.

    A checkpoint holds the place in the data, the state of the controller and what the stepper learned, so that
    ``trainer.fit(…, ckpt_path=…)`` goes on with the very next batch. Lightning saves no random state: dropout draws
    other masks after a restart. What the first rank learned about memory is given to all.

    Where the length of an epoch is not known, as with ``ResizableBatchSampler``, Lightning fetches one batch ahead: a
    new size takes effect one update later.

    Logged every ``log_every_n_steps``: ``loss``, ``batch_size``, ``num_micro_batches``, ``ooms`` (over all ranks, since
    the start), and ``noise_scale`` and ``memory_fraction`` where they are measured; ``padding`` once an epoch, where a
    plan knows it.

    Args:
        controller: observes every update; None takes that of the sampler.
        prefix: of the logged names.
        **stepper_options: of ``Stepper``, e.g. ``micro_batch``, ``clip_norm``, ``collate``; ``weight_of`` is needed
            with ``precision="16-mixed"``.

    Attributes:
        stepper: made when training starts; None for modules without ``ExactUpdates``.
        controller: what observes, None where there is none.
        loader: the training data, None where Lightning divides it.
        report: of the newest update.
        num_ooms: how often ranks ran out of memory since the start, all together.
    """

    def __init__(self, *, controller: Any = None, prefix: str = "batchwright/", **stepper_options: Any) -> None:
        super().__init__()
        check_options(stepper_options)
        self.stepper: Stepper | None = None
        self.controller: Any = None
        self.loader: TrainLoader | None = None
        self.report: StepReport | None = None
        self.num_ooms = 0
        self._given_controller = controller
        self._prefix = prefix
        self._options = stepper_options
        self._loaded: dict[str, Any] = {}  # states that wait for the part they belong to

    def attach(self, loader: TrainLoader) -> None:
        """Take charge of the training data; ``planned_loader`` calls it."""
        self.loader = loader
        # Now, not when training starts: Lightning may fetch a batch before, at the size of a restored controller.
        self.controller = controller_of(loader, self._given_controller)
        self._hand_out()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the stepper, now that the model and the optimizer are where they stay."""
        self.controller = controller_of(self.loader, self._given_controller)
        if isinstance(pl_module, ExactUpdates):
            self.stepper = make_stepper(trainer, pl_module, self._options)
        elif self.controller is not None or self._options:
            raise ArgumentError(
                f"{type(pl_module).__name__} runs updates of its own; a controller and options of Stepper need exact "
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
        assert self.stepper is not None
        report = self.report = run_update(trainer, module, self.stepper, batch)
        self.num_ooms += report.ooms
        if self.controller is not None:
            completed = trainer.current_epoch + trainer.is_last_batch
            self.controller.observe(epoch=completed, **report.observation())
        return report

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Log the padding of the epoch."""
        if self.loader is not None:
            log_padding(pl_module, self.loader.source, prefix=self._prefix)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the update."""
        if self.report is not None:
            log_report(trainer, pl_module, self.report, num_ooms=self.num_ooms, prefix=self._prefix)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and the states of the controller and the stepper, as JSON values."""
        state = dict(self._loaded)
        if self.loader is not None:
            state["place"] = self.loader.place()
        for name, part in (("stepper", self.stepper), ("controller", self.controller)):
            if part is not None:
                state[name] = part.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a state was taken; parts that do not exist yet get theirs when they do."""
        self._loaded = dict(state_dict)
        self._hand_out()

    def _hand_out(self) -> None:
        if self.loader is not None and "place" in self._loaded:
            self.loader.go_to(self._loaded.pop("place"))
        for name, part in (("stepper", self.stepper), ("controller", self.controller)):
            if part is not None and name in self._loaded:
                part.load_state_dict(self._loaded.pop(name))


def planned_loader(loader: Any, trainer: Any, *, training: bool = True) -> TrainLoader | EvaluationLoader:
    """Return a loader for Lightning whose batchwright sampler divides the data over ranks itself.

    Return it from ``train_dataloader`` of a module or data module, or hand it to ``trainer.fit``. Lightning cannot
    replace its sampler under DDP, so every example comes once an epoch over all ranks, in equal steps.

    Args:
        loader: a ``DataLoader`` with ``batch_sampler=`` a batchwright sampler, or what ``regroup`` made.
        trainer: has an ``AdaptiveBatching`` among its callbacks.
        training: False for validation and tests, which run the same epoch each time.
    """
    if not training:
        return EvaluationLoader(loader, trainer)
    check_overfitting(trainer)
    planned = TrainLoader(loader, trainer)
    find_callback(trainer).attach(planned)
    return planned


@final
class PlannedDataModule(LightningDataModule):
    """Loaders with batchwright samplers as a data module: ``trainer.fit(model, PlannedDataModule(train, val=val))``.

    Args:
        train: as for ``planned_loader``.
        val: a loader for validation; one without a batchwright sampler is left to Lightning.
        test: a loader for tests, likewise.
    """

    def __init__(self, train: Any, *, val: Any = None, test: Any = None) -> None:
        super().__init__()
        self._train = train
        self._planned: tuple[Any, TrainLoader | EvaluationLoader] | None = None
        # Lightning looks for methods: one that is there but returns nothing is a mistake to it.
        if val is not None:
            self.val_dataloader = lambda: self._evaluation(val)  # type: ignore[method-assign]
        if test is not None:
            self.test_dataloader = lambda: self._evaluation(test)  # type: ignore[method-assign]

    def train_dataloader(self) -> Any:
        """Return the training data, the same object every time a Trainer asks."""
        if self._planned is None or self._planned[0] is not self.trainer:
            self._planned = (self.trainer, planned_loader(self._train, self.trainer))
        return self._planned[1]

    def _evaluation(self, loader: Any) -> Any:
        return loader if sampler_of(loader) is None else planned_loader(loader, self.trainer, training=False)


def find_callback(trainer: Any) -> AdaptiveBatching:
    """Return the ``AdaptiveBatching`` of a Trainer."""
    found = [callback for callback in trainer.callbacks if isinstance(callback, AdaptiveBatching)]
    if len(found) != 1:
        raise ArgumentError(f"Trainer(callbacks=…) needs one AdaptiveBatching, got {len(found)}")
    return found[0]
