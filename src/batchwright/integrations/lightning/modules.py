"""Modules whose updates are exact under a Lightning Trainer: the mixin, its hooks, what would not run, its budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...errors import ArgumentError
from ...step import StepReport
from ...step.calibration.found import FoundBudget
from ...step.losses import Sums
from .._auto_budget import BudgetFinder
from .._graphs import check_graphs, graph_options, refuse_graphs
from .._options import move_after_collate
from .._planned_budget import check_sampler, find_planned

# What a module does in these would be missing from its update. The rest of the text says where to do it instead.
_REFUSED = {
    "optimizer_step": "on_before_optimizer_step for what comes before the step, a scheduler for a warm-up",
    "backward": "on_before_backward and on_after_backward",
    "configure_gradient_clipping": "AdaptiveBatching(clip_norm=…), or on_before_optimizer_step",
}
# What would not run where the backward pass is replayed.
_UNREPLAYED = "on_before_backward"


class ExactUpdates(ABC):
    """Mixin of a ``LightningModule`` whose updates are exact, whatever the batch and however it is split.

    Lightning's automatic optimisation takes the mean of the means of micro-batches and of ranks. That equals the mean
    of the batch only if all have the same size, and planned batches do not. So a ``Stepper``, made by
    ``AdaptiveBatching``, runs the update by hand. Write ``loss_sums`` in place of ``training_step``; ``forward``,
    ``configure_optimizers`` and ``validation_step`` stay as they are. Schedulers of the learning rate advance as in
    automatic optimisation, by ``interval`` and ``frequency``; ``ReduceLROnPlateau`` is left to you.

    ``Trainer(gradient_clip_val=…)`` and ``accumulate_grad_batches`` belong to automatic optimisation; use
    ``AdaptiveBatching(clip_norm=…)`` and larger batches.

    Hooks of the module and of callbacks run once per update: ``on_after_backward`` with the gradient of the whole batch
    on all ranks, ``on_before_optimizer_step``, and ``on_before_zero_grad`` after the step. ``on_before_backward`` runs
    per micro-batch, with its summed loss. ``optimizer_zero_grad`` does not run; a module with an ``optimizer_step``,
    ``backward`` or ``configure_gradient_clipping`` of its own is refused.

    >>> import torch
    >>> from lightning.pytorch import LightningModule
    >>> class Regression(ExactUpdates, LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(4, 1)
    ...
    ...     def loss_sums(self, batch):
    ...         x, y = batch
    ...         return (self.layer(x) - y).square().sum(), len(x)  # the summed loss, and how many it sums over
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
    >>> Regression().automatic_optimization
    False
    """

    trainer: Any

    @abstractmethod
    def loss_sums(self, batch: Any) -> Sums:
        """Return ``(loss_sum, weight)`` of a micro-batch, or ``(loss_sum, weight, {name: sum})``.

        It runs again if memory runs out, and what it logs or counts is then there twice. Return sums to be logged in
        the third place: ``AdaptiveBatching.report.metrics`` has each once. ``@whole_batch`` above it refuses a split.
        """

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


def find_callback(trainer: Any) -> Any:
    """Return the ``AdaptiveBatching`` of a Trainer."""
    found = [callback for callback in trainer.callbacks if hasattr(callback, "run_update")]
    if len(found) != 1:
        raise ArgumentError(f"Trainer(callbacks=…) needs one AdaptiveBatching, got {len(found)}")
    return found[0]


def refuse_methods(module: Any) -> None:
    """Refuse a module with methods of automatic optimisation that an exact update would leave out in silence."""
    for name, instead in _REFUSED.items():
        owner = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
        if owner is not None and not owner.__module__.startswith(("lightning.", "pytorch_lightning.")):
            raise ArgumentError(
                f"{owner.__name__}.{name} belongs to automatic optimisation and would not run; use {instead}"
            )


@final
class Hooks:
    """Calls the hooks of one update in Lightning's order: callbacks first, then the module.

    Args:
        trainer: has the callbacks.
        module: has hooks of its own.
        optimizer: torch's own, not Lightning's wrapper.
        has_scaler: a scaler steps the optimizer past Lightning, which then calls no ``on_before_optimizer_step``.
    """

    def __init__(self, trainer: Any, module: Any, optimizer: Any, *, has_scaler: bool) -> None:
        self._trainer = trainer
        self._module = module
        self._optimizer = optimizer
        self._has_scaler = has_scaler

    def before_backward(self, loss: Tensor) -> None:
        """Call ``on_before_backward`` with the summed loss of a micro-batch."""
        # The forward pass that has just ended ran under autocast; hooks do not.
        with torch.autocast(loss.device.type, enabled=False):
            self._call("on_before_backward", loss)

    def after_backward(self) -> None:
        """Call ``on_after_backward``: gradients are those of the whole batch on all ranks."""
        self._call("on_after_backward")

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Call the hooks right before and right after the optimizer's step while this is open."""
        handles = [self._optimizer.register_step_post_hook(lambda *_: self._of_optimizer("on_before_zero_grad"))]
        if self._has_scaler:
            before = self._optimizer.register_step_pre_hook(lambda *_: self._of_optimizer("on_before_optimizer_step"))
            handles.append(before)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _of_optimizer(self, name: str) -> None:
        self._call(name, self._optimizer)

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self._trainer.callbacks:
            getattr(callback, name)(self._trainer, self._module, *arguments)
        getattr(self._module, name)(*arguments)


def options_with_graphs(options: Mapping[str, Any], trainer: Any, module: Any, loader: Any) -> dict[str, Any]:
    """Return the options of the Stepper, with the shapes of the training data, or without graphs.

    Args:
        options: of ``AdaptiveBatching``.
        trainer: has callbacks.
        module: has hooks of its own.
        loader: of the training data, None if Lightning divides it.
    """
    choice = check_graphs(options.get("graphs", False))
    listener = None if choice is False else next(filter(_listens, (*trainer.callbacks, module)), None)
    if listener is not None:
        refuse_graphs(choice, f"{type(listener).__name__}.{_UNREPLAYED} would not run at a replay")
        return without_graphs(options)
    collate = options.get("collate") or (None if loader is None else loader.collate)
    return graph_options(options, None if loader is None else loader.source, collate, module.device)


def without_graphs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an eager Stepper."""
    return {name: value for name, value in options.items() if name not in ("graphs", "shapes")}


def _listens(part: Any) -> bool:
    owner = next(kind for kind in type(part).__mro__ if _UNREPLAYED in vars(kind))
    return not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def find_for_trainer(
    finder: BudgetFinder, trainer: Any, loader: Any, options: Mapping[str, Any], autocast: torch.dtype | None
) -> FoundBudget:
    """Return the budget of a Trainer's batches. A collective.

    Args:
        finder: keeps what is known.
        trainer: is about to train.
        loader: the ``TrainLoader``.
        options: of the ``Stepper``.
        autocast: the type of the forward pass.
    """
    check_sampler(loader.source)
    module: Any = trainer.lightning_module
    if not issubclass(type(module), ExactUpdates):
        raise ArgumentError(
            f"budget='auto' runs loss_sums, which {type(module).__name__} does not have; derive it from ExactUpdates, "
            "or give a budget to the sampler"
        )
    if len(trainer.optimizers) != 1:
        raise ArgumentError(
            "the number of batches is known only after budget='auto' was found, when the Trainer has its optimizer: "
            "configure_optimizers cannot ask for it; set max_steps, or give a budget to the sampler"
        )
    if trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel):
        raise ArgumentError(
            f"budget='auto' needs one device or strategy='ddp', but the Trainer has {type(trainer.strategy).__name__}"
        )

    def loss_fn(model: Any, batch: Any) -> Sums:
        sums: Sums = model.loss_sums(batch)
        return sums

    def move(batch: Any) -> Any:
        return module.transfer_batch_to_device(batch, module.device, 0)

    has_examples = options.get("collate") is not None
    with _silent(module):
        return find_planned(
            finder,
            loader.source,
            loader.loader,
            module=module,
            optimizer=trainer.optimizers[0],
            loss_fn=loss_fn,
            options=move_after_collate(options, move),
            move=(lambda batch: batch) if has_examples else move,
            device=module.device,
            world_size=trainer.world_size,
            autocast=autocast,
            name="lightning",
            is_shown=trainer.is_global_zero and trainer.progress_bar_callback is not None,
            runs=module.loss_sums,
        )


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """Keep a module from logging: what is measured is not trained on."""
    names = ("log", "log_dict")
    for name in names:  # over the methods of its class
        object.__setattr__(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(module, name)
