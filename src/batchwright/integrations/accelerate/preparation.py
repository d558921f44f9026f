"""``prepare``: an Accelerator's model, optimizer and data with exact updates, and the settings it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import accelerate
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from ...errors import ArgumentError
from ...step import Stepper
from ...step.losses import LossFunction
from .._auto import Ticks, chose_vectors, is_auto, resizable_loader
from .._auto import stepper_options as auto_options
from .._auto_budget import BudgetFinder
from .._graphs import graph_options
from .._observing import Change, History, LiveHistory, with_memory
from .._options import check_options, move_after_collate
from .._planned_budget import PlannedBudget, check_sampler, find_planned, wants_auto
from .._ranked import controller_of, give_rank, sampler_of
from .._vector_fallback import VectorFallback, in_parts
from .training import AcceleratedStepper, Prepared, PreparedLoader

_REFUSED = {
    "DEEPSPEED": "DeepSpeed runs its own update",
    "MEGATRON_LM": "Megatron-LM runs its own update",
    "FSDP": "its gradients are averaged before Stepper can weigh them",
    "XLA": "its gradients are reduced inside the optimizer",
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    *,
    loss_fn: LossFunction,
    scheduler: Any = None,
    controller: Any = None,
    history: History = False,
    budget: Literal["auto"] | None = None,
    **stepper_options: Any,
) -> Prepared:
    """Prepare for training with an Accelerator; after that, ``stepper.step(batch)`` is a whole, exact update.

    Accelerate places and wraps the model and the optimizer and sets the precision. ``stepper.step`` replaces
    ``accelerator.backward``, clipping, ``optimizer.step`` and ``scheduler.step``; ``accelerator.accumulate`` is not
    needed.

    Accelerate does not divide a loader that has a batchwright sampler. The sampler is told its rank and world size and
    divides the data itself: every example once per epoch over all ranks, in equally many steps. Accelerate prepares
    other loaders as usual.

    ``accelerator.save_state`` saves the position in the epoch, what the stepper learned (with a ``FitToMemory`` also
    its size) and the controller's state.
    After ``accelerator.load_state`` the loop continues with the very next batch:
    ``for epoch in range(loader.epoch, num_epochs)``. All ranks get what the first rank learned about memory.

    Args:
        accelerator: on one device or with DDP; DeepSpeed, Megatron-LM, FSDP and gradient accumulation are refused.
        model: the model to train, prepared already or not.
        optimizer: the optimizer of its parameters, prepared already or not. It may train others as well, such as the
            weights of a loss; put these on the device yourself.
        loader: a ``DataLoader`` with ``batch_sampler=`` a ``BatchSampler`` or ``ResizableBatchSampler``, what
            ``regroup`` made, or any other ``DataLoader``.
        loss_fn: ``loss_fn(model, micro_batch) -> (loss_sum, weight)``, as for ``Stepper``.
        scheduler: the schedule of the learning rate, advanced after every update. It counts the batches of the loader
            as given: if ``prepare`` divides them over W ranks, it advances W times per update, as in Accelerate; with
            a ``ResizableBatchSampler``, or a sampler made for this rank, once.
        controller: observes every update; None takes the sampler's. Its policy may read memory: the device's own is
            found without ``memory=``, on a CPU that of the process. Entropy is what ``loss_fn`` returns under that
            name, as ``huggingface_loss(with_entropy=True)`` does. ``"auto"`` looks for the size that learns fastest,
            by ``size.goodput``: the loader is a ``DataLoader`` with a ``batch_size``, and the size begins at that times
            the ranks. Rate and beta2 follow the size as they should with the optimizer, gradient noise is measured,
            and the scheduler advances once per ``batch_size`` examples; options given here stay.
        history: True prints a line per change of the size, with its reason, and logs figures with ``accelerator.log``;
            a function gets the line instead.
        budget: None keeps that of the ``BatchSampler``; ``"auto"`` finds one on batches of the data, which are put back
            to the bit: what fits in 0.9 of the memory, but no more than throughput gains 5 % from. All ranks agree; it
            is kept in ``~/.cache/batchwright`` and by ``save_state``.
        **stepper_options: options of ``Stepper``, such as ``micro_batch``, ``clip_norm`` or ``collate``;
            ``mixed_precision="fp16"`` needs ``weight_of``. With ``graphs`` the shapes are those of the sampler.

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
    _check_accelerator(accelerator)
    check_options(stepper_options, "Accelerator(mixed_precision=…)")
    ticks, given = None, stepper_options
    if is_auto(controller):
        base_size, ticks = stepper_options.get("base_size"), Ticks(getattr(loader, "batch_size", None) or 1)
        loader, controller = resizable_loader(loader, accelerator.num_processes, base_size=base_size)
        stepper_options = auto_options(given, model, optimizer, controller.min_size)
    sampler = _find_sampler(accelerator, loader)
    if wants_auto(budget):
        check_sampler(sampler)
    observer, live = controller_of(sampler, controller), LiveHistory(history)
    _check_scheduler(scheduler)

    is_divided = sampler is not None and _divide(accelerator, loader, sampler)
    model, optimizer = accelerator.prepare(model, optimizer)
    _check_model(model, accelerator.num_processes)
    collate = stepper_options.get("collate")
    has_examples = collate is not None
    found = None
    if budget is not None:
        move = _mover(accelerator, has_examples=has_examples)
        found = _find(accelerator, model, optimizer, loader, sampler, loss_fn, stepper_options, move)
    padded_by = collate if has_examples else getattr(loader, "collate_fn", None)
    options = graph_options(stepper_options, sampler, padded_by, accelerator.device)
    options = with_memory(options, observer, accelerator.device)
    make = functools.partial(_make_stepper, accelerator, model, optimizer, loss_fn)
    fallback = VectorFallback(model, lambda: make(in_parts(options))) if chose_vectors(options, given) else None
    stepper = make(options) if fallback is None else fallback.first(lambda: make(options))
    prepared = _prepare_loader(accelerator, loader, sampler, has_examples=has_examples)
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
        scheduler.split_batches |= sampler is not None and not is_divided  # then it advances once per update
    announce = functools.partial(_announce, accelerator, live) if live.is_wanted else None
    parts: dict[str, Any] = {"announce": announce, "ticks": ticks, "fallback": fallback, "budget": found}
    accelerated = AcceleratedStepper(stepper, optimizer, prepared, scheduler, observer, **parts)
    accelerator.register_for_checkpointing(accelerated)
    return Prepared(model, optimizer, prepared, accelerated)


def _find(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    sampler: Any,
    loss_fn: LossFunction,
    options: Mapping[str, Any],
    move: Callable[[Any], Any],
) -> PlannedBudget:
    """Find the budget of the sampler, and plan with it."""
    found = find_planned(
        BudgetFinder(),
        sampler,
        loader,
        module=model.module if isinstance(model, DistributedDataParallel) else model,
        optimizer=optimizer,
        loss_fn=loss_fn,
        options=move_after_collate(options, _mover(accelerator, has_examples=False)),
        move=move,
        device=accelerator.device,
        world_size=accelerator.num_processes,
        autocast=_autocast_of(accelerator),
        name="accelerate",
        is_shown=accelerator.is_main_process,
    )
    return PlannedBudget(sampler, found)


def _announce(accelerator: Any, history: LiveHistory, change: Change) -> None:
    """Show a change of the size on the first rank, and hand its figures to the trackers."""
    if accelerator.is_main_process:
        history.show(change, print)
    accelerator.log(change.figures(), step=change.decision.step)


def _find_sampler(accelerator: Any, loader: Any) -> Any:
    """Return the batchwright sampler of a loader, None if it has none; refuse what cannot be prepared."""
    sampler = sampler_of(loader)
    if sampler is not None:
        _check_data_settings(accelerator)
    elif not isinstance(loader, DataLoader):
        raise ArgumentError(f"loader must be a DataLoader or what regroup made, got {type(loader).__name__}")
    return sampler


def _make_stepper(
    accelerator: Any, model: nn.Module, optimizer: Any, loss_fn: LossFunction, options: Mapping[str, Any]
) -> Stepper:
    return Stepper(
        model,
        optimizer.optimizer,  # the bare one: the prepared one would use the scaler a second time
        loss_fn,
        autocast=_autocast_of(accelerator),
        scaler=accelerator.scaler,
        **move_after_collate(options, _mover(accelerator, has_examples=False)),
    )


def _prepare_loader(accelerator: Any, loader: Any, sampler: Any, *, has_examples: bool) -> Any:
    if sampler is None:
        return accelerator.prepare(loader)
    return PreparedLoader(loader, sampler, _mover(accelerator, has_examples=has_examples))


def _check_accelerator(accelerator: Any) -> None:
    """Refuse an Accelerator whose settings would make an update something other than Stepper's."""
    kind = accelerator.distributed_type.name
    if kind in _REFUSED:
        raise ArgumentError(f"prepare cannot work with {kind}: {_REFUSED[kind]}; use DDP or a single device")
    parallel = accelerator.parallelism_config
    if parallel is not None and (parallel.tp_enabled or parallel.cp_enabled):
        raise ArgumentError(
            "prepare cannot work with tensor or context parallelism: several ranks share an example; use DDP"
        )
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise ArgumentError(
            f"the Accelerator has gradient_accumulation_steps={steps}, but Stepper accumulates: a batch of the loader "
            "is one update and runs in pieces that fit; leave it at 1 and let the sampler make larger batches"
        )
    if accelerator.mixed_precision not in ("no", *_DTYPES):
        raise ArgumentError(
            f"prepare works with mixed_precision 'no', 'bf16' and 'fp16', but the Accelerator has "
            f"{accelerator.mixed_precision!r}; choose one of the three"
        )


def _check_data_settings(accelerator: Any) -> None:
    """Refuse settings by which Accelerate, and not the sampler, divides the data."""
    if accelerator.split_batches or accelerator.dispatch_batches:
        name = "split_batches" if accelerator.split_batches else "dispatch_batches"
        raise ArgumentError(
            f"the Accelerator has {name}=True, but a batchwright sampler divides the data over ranks itself; leave it "
            "out, and for a batch size counted over all ranks use ResizableBatchSampler"
        )


def _check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler that cannot advance after every update."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ArgumentError("ReduceLROnPlateau needs a metric; call its step yourself, after evaluation")


def _check_model(model: nn.Module, world_size: int) -> None:
    """Refuse a prepared model whose ranks Stepper would not see."""
    if world_size > 1 and not isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            f"Accelerate wrapped the model in {type(model).__name__}, but on several ranks Stepper needs "
            "DistributedDataParallel; to compile, call torch.compile on the model before prepare"
        )


def _autocast_of(accelerator: Any) -> torch.dtype | None:
    """Return the type of the forward pass, None if the Accelerator does not use autocast."""
    handler = accelerator.autocast_handler
    if not accelerator.native_amp or (handler is not None and not handler.enabled):
        return None
    return _DTYPES[accelerator.mixed_precision]


def _divide(accelerator: Any, loader: Any, sampler: Any) -> bool:
    """Give the sampler its rank; return whether each update now uses one batch of the loader per rank."""
    changed = give_rank(
        sampler,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        is_loader=sampler is loader,
    )
    # A sampler with a controller counts its batches over all ranks, however many there are.
    return changed and not hasattr(sampler, "controller")


def _mover(accelerator: Any, *, has_examples: bool) -> Callable[[Any], Any]:
    """Return a function that puts a batch on the device; a list of examples waits until a micro-batch is collated."""

    def move(batch: Any) -> Any:
        if not accelerator.device_placement or (has_examples and isinstance(batch, list)):
            return batch
        return accelerate.utils.send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)

    return move
