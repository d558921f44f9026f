"""One update inside a ``training_step``: the stepper of a Trainer's model, and the schedulers after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..step import Stepper, StepReport
from ..step.losses import Sums
from ._lightning_checks import autocast_of, check_optimizer, check_strategy


def make_stepper(trainer: Any, module: Any, options: Mapping[str, Any]) -> Stepper:
    """Return the stepper of a module, once the Trainer has placed and wrapped it."""
    check_strategy(trainer)
    optimizer = check_optimizer(module.optimizers())
    scaler = _scaler_of(trainer)
    collate = options.get("collate")
    if collate is not None:
        options = {
            **options,
            "collate": lambda found: module.transfer_batch_to_device(collate(found), module.device, 0),
        }
    return Stepper(
        trainer.strategy.model,
        # Lightning's step counts and calls hooks; with a scaler it would use that a second time.
        optimizer if scaler is None else optimizer.optimizer,
        _loss_of,
        autocast=autocast_of(trainer.precision),
        scaler=scaler,
        **options,
    )


def run_update(trainer: Any, module: Any, stepper: Stepper, batch: Any) -> StepReport:
    """Run one update, and then the schedulers of the learning rate as automatic optimisation does."""
    # A Trainer has autocast on around the whole step; Stepper has it on in forward passes alone.
    with _counted(trainer, module), torch.autocast(module.device.type, enabled=False):
        report = stepper.step(batch)
    counts = {"step": trainer.fit_loop.batch_idx + 1}
    if trainer.is_last_batch:
        counts["epoch"] = trainer.current_epoch + 1
    for config in trainer.lr_scheduler_configs:
        count = counts.get(config.interval)
        if count is not None and count % config.frequency == 0 and not isinstance(config.scheduler, ReduceLROnPlateau):
            module.lr_scheduler_step(config.scheduler, None)
    return report


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


def _scaler_of(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _loss_of(module: Any, batch: Any) -> Sums:
    sums: Sums = module.loss_sums(batch)
    return sums
