"""``AdaptiveBatching(budget="auto")``: found when a Trainer has its model and asks for the length of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...errors import ArgumentError
from ...step.calibration.found import FoundBudget
from ...step.losses import Sums
from .._auto_budget import BudgetFinder
from .._options import move_after_collate
from .._planned_budget import check_sampler, find_planned
from .modules import ExactUpdates


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
    module = trainer.lightning_module
    if not isinstance(module, ExactUpdates):
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
    loss_fn.__qualname__ = f"{type(module).__qualname__}.loss_sums"
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
