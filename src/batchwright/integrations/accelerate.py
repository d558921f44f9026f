"""Accelerate: planned or resizable batches and exact updates, with ``prepare`` in place of ``accelerator.prepare``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from .._optional import require
from ..errors import ArgumentError

accelerate = require("accelerate", extra="accelerate")

# After the check, so that its message is read.
from ..step import Stepper  # noqa: E402
from ..step.losses import LossFunction  # noqa: E402
from ._accelerate_checks import (  # noqa: E402
    autocast_of,
    check_accelerator,
    check_data_settings,
    check_model,
    check_options,
)
from ._accelerate_loader import PreparedLoader  # noqa: E402
from ._accelerate_stepper import AcceleratedStepper  # noqa: E402
from ._ranked import controller_of, give_rank, sampler_of  # noqa: E402

__all__ = ["AcceleratedStepper", "Prepared", "PreparedLoader", "prepare"]


@final
class Prepared(NamedTuple):
    """What ``prepare`` returns."""

    model: nn.Module
    optimizer: Any
    loader: Any
    stepper: AcceleratedStepper


def prepare(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    *,
    loss_fn: LossFunction,
    scheduler: Any = None,
    controller: Any = None,
    **stepper_options: Any,
) -> Prepared:
    """Prepare for training with an Accelerator: ``stepper.step(batch)`` is then a whole, exact update.

    Accelerate places and wraps the model and the optimizer and sets the precision. ``stepper.step`` stands for
    ``accelerator.backward``, clipping, ``optimizer.step`` and ``scheduler.step``; ``accelerator.accumulate`` is not
    needed.

    A loader with a batchwright sampler is not divided by Accelerate. Its sampler is told rank and world size and
    divides the data itself: every example once an epoch over all ranks, equal steps. Other loaders are prepared by
    Accelerate as usual.

    ``accelerator.save_state`` saves the place in the epoch, what the stepper learned and the controller's state;
    after ``accelerator.load_state`` the loop goes on with the very next batch:
    ``for epoch in range(loader.epoch, num_epochs)``. What the first rank learned about memory is given to all.

    Args:
        accelerator: on one device or with DDP; DeepSpeed, Megatron-LM, FSDP and gradient accumulation are refused.
        model: to be trained, prepared already or not.
        optimizer: of its parameters, likewise.
        loader: a ``DataLoader`` with ``batch_sampler=`` a ``BatchSampler`` or ``ResizableBatchSampler``, what
            ``regroup`` made, or any other ``DataLoader``.
        loss_fn: ``loss_fn(model, micro_batch) -> (loss_sum, weight)``, as for ``Stepper``.
        scheduler: of the learning rate, advanced with every update. It counts the batches of the loader as given:
            if ``prepare`` divides those over W ranks it advances W an update, as Accelerate does; with a
            ``ResizableBatchSampler``, or a sampler made for this rank, once.
        controller: observes every update; None takes that of the sampler.
        **stepper_options: of ``Stepper``, e.g. ``micro_batch``, ``clip_norm``, ``collate``; ``weight_of`` is needed
            with ``mixed_precision="fp16"``.

    Returns:
        ``(model, optimizer, loader, stepper)``.

    >>> import torch, batchwright as bw
    >>> model, data = nn.Linear(2, 1), torch.randn(10, 2)
    >>> sampler = bw.BatchSampler([1] * 10, bw.MaxItems(4))
    >>> model, optimizer, loader, stepper = prepare(
    ...     accelerate.Accelerator(cpu=True),
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     DataLoader(data, batch_sampler=sampler),
    ...     loss_fn=lambda model, batch: (model(batch).square().sum(), len(batch)),
    ... )
    >>> sorted(stepper.step(batch).batch_size for batch in loader)
    [2, 4, 4]
    """
    check_accelerator(accelerator)
    check_options(stepper_options)
    sampler = sampler_of(loader)
    if sampler is None and not isinstance(loader, DataLoader):
        raise ArgumentError(f"loader must be a DataLoader or what regroup made, got {type(loader).__name__}")
    if sampler is not None:
        check_data_settings(accelerator)
    chosen = controller_of(sampler, controller)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ArgumentError("ReduceLROnPlateau needs a metric; call its step yourself, after evaluation")

    collate = stepper_options.get("collate")
    if collate is not None:
        stepper_options["collate"] = _collate_and_move(accelerator, collate)
    is_divided = sampler is not None and _divide(accelerator, loader, sampler)
    model, optimizer = accelerator.prepare(model, optimizer)
    check_model(model, accelerator.num_processes)
    stepper = Stepper(
        model,
        optimizer.optimizer,  # the bare one: the prepared one would use the scaler a second time
        loss_fn,
        autocast=autocast_of(accelerator),
        scaler=accelerator.scaler,
        **stepper_options,
    )
    if sampler is None:
        prepared = accelerator.prepare(loader)
    else:
        prepared = PreparedLoader(loader, sampler, _mover(accelerator, has_examples=collate is not None))
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
        scheduler.split_batches |= sampler is not None and not is_divided  # then one step an update
    accelerated = AcceleratedStepper(stepper, optimizer, prepared, scheduler, chosen)
    accelerator.register_for_checkpointing(accelerated)
    return Prepared(model, optimizer, prepared, accelerated)


def _divide(accelerator: Any, loader: Any, sampler: Any) -> bool:
    """Give the sampler its rank; say whether one update now takes as many batches of the loader as there are ranks."""
    changed = give_rank(
        sampler,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        is_loader=sampler is loader,
    )
    # A sampler with a controller counts its batches over all ranks whatever their number.
    return changed and not hasattr(sampler, "controller")


def _collate_and_move(accelerator: Any, collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    move = _mover(accelerator, has_examples=False)
    return lambda examples: move(collate(examples))


def _mover(accelerator: Any, *, has_examples: bool) -> Callable[[Any], Any]:
    """Return what puts a batch on the device; a list of examples waits until a micro-batch is collated."""

    def move(batch: Any) -> Any:
        if not accelerator.device_placement or (has_examples and isinstance(batch, list)):
            return batch
        return accelerate.utils.send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)

    return move
