"""An exact training step for Hugging Face trainers: weights of micro-batches, and retries after out of memory."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._ranks import Ranks
from .._tree import leaves
from ..errors import ArgumentError
from ..step.huggingface import IGNORED, LossReading, read_loss, usual_reading
from ..step.memory.fit_to_memory import MicroLimit
from ..step.oom import (
    Snapshot,
    add_back,
    devices_of,
    drop_gradients,
    free_memory,
    is_out_of_memory,
    present,
    set_aside,
)
from ._inputs import num_rows, take_rows, trim_padding

# compute(model, inputs, num_items_in_batch) -> loss, what a trainer calls compute_loss
Compute: TypeAlias = Callable[[nn.Module, dict[str, Any], Any], Tensor]
# step(model, inputs) -> detached loss, forward and backward
Step: TypeAlias = Callable[[nn.Module, dict[str, Any]], Tensor]
Strategy: TypeAlias = Literal["split_retry", "skip"]

logger = logging.getLogger(__name__)


def parallel_size(trainer: Any) -> int:
    """Return how many ranks of a trainer work on the same batch: tensor, context and sequence parallelism."""
    return math.prod(max(1, getattr(trainer, f"get_{kind}_size", int)()) for kind in ("tp", "cp", "sp"))


def is_divided(trainer: Any) -> bool:
    """Say whether ranks hold parts of the model or of an example: FSDP, DeepSpeed, or ``parallel_size`` above 1."""
    is_sharded = getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False)
    return bool(is_sharded) or parallel_size(trainer) > 1


@final
@dataclass(frozen=True)
class Devices:
    """The processes that a trainer runs on.

    Attributes:
        args: the ``TrainingArguments``.
        accelerator: of the trainer.
        parallel_size: ranks that work on the same batch.
        is_divided: ranks hold parts of the model or of an example, so the trainer weighs micro-batches by its own rule.
    """

    args: Any
    accelerator: Any
    parallel_size: int
    is_divided: bool

    @classmethod
    def of(cls, trainer: Any) -> Devices:
        """Return the devices of a trainer as they are now."""
        return cls(trainer.args, trainer.accelerator, parallel_size(trainer), is_divided(trainer))

    @property
    def rank(self) -> int:
        """Return which share of the data is ours."""
        return int(self.args.process_index // self.parallel_size)

    @property
    def world_size(self) -> int:
        """Return the number of shares."""
        return int(max(1, self.args.world_size // self.parallel_size))

    @property
    def num_replicas(self) -> int:
        """Return over how many processes gradients of the update are averaged; 1 if every rank keeps its own mean."""
        return int(self.accelerator.num_processes) if self.args.average_tokens_across_devices else 1

    def add_up(self, figures: Tensor) -> Tensor:
        """Sum figures over all ranks; ranks that share a batch count once."""
        if self.args.world_size == 1:
            return figures
        summed: Tensor = self.accelerator.reduce(figures.to(self.args.device), reduction="sum")
        return summed / self.parallel_size


@contextmanager
def one_process(args: Any) -> Iterator[None]:
    """Keep a trainer from multiplying its loss by the number of processes."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


@contextmanager
def undivided(trainer: Any) -> Iterator[None]:
    """Keep a trainer from dividing losses by the accumulation steps, as the weights of an update sum to one."""
    steps, accelerator = trainer.current_gradient_accumulation_steps, trainer.accelerator
    divisor = accelerator.gradient_accumulation_steps  # Accelerate divides before transformers 5.6; it is 1 later
    trainer.current_gradient_accumulation_steps = accelerator.gradient_accumulation_steps = 1
    try:
        yield
    finally:
        trainer.current_gradient_accumulation_steps, accelerator.gradient_accumulation_steps = steps, divisor


@final
@dataclass(frozen=True)
class Weighing:
    """How much a micro-batch counts in the mean of an update: its labels, or its examples.

    Attributes:
        reading: how to read the loss; None counts examples.
        is_sure: False if the batch could not tell; a later batch may.
        key: the input whose length is the number of examples.
    """

    reading: LossReading | None
    is_sure: bool
    key: str

    @property
    def divides(self) -> bool:
        """Return whether the loss divides a sum by ``num_items_in_batch`` itself."""
        return self.reading is not None and self.reading.sums

    def count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the weight of a micro-batch, on its device."""
        labels = inputs.get("labels")
        if self.reading is None or not isinstance(labels, Tensor):
            return torch.tensor(num_rows(inputs, self.key))
        if labels.is_floating_point():
            return torch.tensor(len(labels))
        return ((labels[:, 1:] if self.reading.shifts else labels) != IGNORED).sum()


def find_weighing(compute: Compute, model: nn.Module, inputs: Mapping[str, Any], *, key: str) -> Weighing:
    """Find out from two examples what the loss of a trainer is a mean over; model and random state stay as they were.

    Args:
        compute: the trainer's own loss, made by the model, by label smoothing or by a function of the user.
        model: without wrappers for several devices.
        inputs: a micro-batch on the model's device.
        key: the input whose length is the number of examples.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim not in (1, 2):
        return Weighing(None, True, key)
    try:
        reading = read_loss(_LossOf(model, compute), inputs, labels)
    except ArgumentError as error:
        warnings.warn(f"micro-batches are weighted by their examples: {error}", stacklevel=2)
        return Weighing(None, True, key)
    return Weighing(reading or usual_reading(model, labels), reading is not None, key)


@final
class _LossOf(nn.Module):
    """A trainer's loss in the form of a model, so that it can be read like the loss of a model."""

    def __init__(self, model: nn.Module, compute: Compute) -> None:
        super().__init__()
        self.module = model
        self._compute = compute

    def forward(self, num_items_in_batch: Any = None, **inputs: Any) -> dict[str, Tensor]:
        """Return only the loss."""
        return {"loss": self._compute(self.module, inputs, num_items_in_batch)}


def weighted(loss: Tensor, weight: Tensor, total: Tensor, num_replicas: int) -> Tensor:
    """Return what a mean over ``weight`` adds to the mean over ``total``.

    ``loss * weight / total``, times the number of replicas whose gradients are averaged later.
    """
    # bfloat16 cannot hold whole numbers above 256.
    share = weight.to(loss.device, torch.float64) / total.to(loss.device, torch.float64) * num_replicas
    # Without labels the mean is NaN, though its gradient is zero.
    return torch.where(share > 0, loss * share.to(torch.promote_types(loss.dtype, torch.float32)), 0)


@final
class SafeSteps:
    """Runs forward and backward of micro-batches; the gradient stays exact if memory runs out.

    A micro-batch that does not fit is run again in smaller pieces, as if it had been cut like that from the beginning:
    its partial gradients are dropped, random state and buffers are restored. The size that failed is remembered, so
    that later micro-batches are cut before they fail. Under DDP, forward and backward run without collectives; ranks
    meet in one reduction after the last micro-batch of an update.

    Args:
        strategy: ``"split_retry"``, or ``"skip"`` to leave out a micro-batch that does not fit.
        first_size: the largest number of examples in a piece at the first retry.
        key: the input whose length is the number of examples.
        on_oom: called after every failure.
    """

    def __init__(self, strategy: Strategy, first_size: int, key: str, on_oom: Callable[[], None]) -> None:
        self._strategy = strategy
        self._first_size = first_size
        self._key = key
        self._on_oom = on_oom
        self._limit = MicroLimit()
        self._ranks: tuple[nn.Module, Ranks] | None = None

    def run(
        self, model: nn.Module, inputs: dict[str, Any], step: Step, *, is_last: bool, has_scaler: bool = False
    ) -> Tensor:
        """Add the gradient of a micro-batch to the gradients; return its loss, 0 if all of it was left out.

        Args:
            model: as the trainer wraps it.
            inputs: the micro-batch.
            step: runs forward and backward on a piece, with the weight of the piece in the update.
            is_last: the micro-batch ends the update, so ranks add up their gradients.
            has_scaler: a ``GradScaler`` follows.
        """
        ranks = self._ranks_of(model)
        parameters = [parameter for parameter in ranks.module.parameters() if parameter.requires_grad]
        held = set_aside(parameters)
        try:
            with ranks.no_sync():
                loss = self._run_until_it_fits(ranks.module, inputs, step, parameters)
        except BaseException:
            drop_gradients(parameters)
            raise
        finally:
            add_back(held)
        if is_last and ranks.world_size > 1:
            _average(ranks, parameters)
        if is_last and has_scaler and not present(parameters):
            # A scaler fails without any gradient. An infinite one makes it skip the update, which is intended.
            parameters[0].grad = torch.full_like(parameters[0], torch.inf)
        return loss

    def _run_until_it_fits(
        self, module: nn.Module, inputs: dict[str, Any], step: Step, parameters: list[nn.Parameter]
    ) -> Tensor:
        num = num_rows(inputs, self._key)
        row_cost = sum(tensor.numel() for tensor in leaves(inputs)) / num
        snapshot = Snapshot.of(module)
        rows, most = list(range(num)), num
        while rows:
            most = max(1, min(most, int(min(self._limit.ceiling / row_cost, num))))
            pieces = [piece.tolist() for piece in np.array_split(rows, -(-len(rows) // most))]
            outcome = _attempt(module, inputs, num, pieces, step)
            if isinstance(outcome, Tensor):
                self._limit = self._limit.after_success(max(map(len, pieces)) * row_cost)
                return outcome
            drop_gradients(parameters)
            snapshot.restore()
            free_memory(devices_of(module))
            self._on_oom()
            if self._strategy == "skip":
                logger.warning("A micro-batch of %d examples ran out of memory and is left out.", num)
                break
            if len(outcome) == 1:
                logger.warning(
                    "Example %d of %d does not fit by itself and is left out of this update.", outcome[0], num
                )
                rows = [row for row in rows if row != outcome[0]]
            else:
                self._limit = self._limit.after_failure(len(outcome) * row_cost)
                most = min(-(-len(outcome) // 2), self._first_size)
        return torch.zeros((), device=parameters[0].device)

    def _ranks_of(self, model: nn.Module) -> Ranks:
        if self._ranks is None or self._ranks[0] is not model:
            inner = getattr(model, "_orig_mod", model)
            self._ranks = model, Ranks(inner if isinstance(inner, DistributedDataParallel) else model)
        return self._ranks[1]


def _attempt(
    module: nn.Module, inputs: dict[str, Any], num: int, pieces: list[list[int]], step: Step
) -> Tensor | list[int]:
    """Run all pieces; return the sum of their losses, or the piece that ran out of memory."""
    total: Tensor | None = None
    piece: list[int] = []
    try:
        for piece in pieces:
            part = inputs if len(piece) == num else trim_padding(take_rows(inputs, piece, num))
            loss = step(module, dict(part))
            total = loss if total is None else total + loss
        assert total is not None
        return total
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block: the traceback is gone, and with it the activations it held.
    return piece


def _average(ranks: Ranks, parameters: list[nn.Parameter]) -> None:
    """Do what DDP would have done: average gradients, and share the buffers of the first rank."""
    ranks.sum_gradients(parameters)
    gradients = present(parameters)
    if gradients:
        torch._foreach_mul_(gradients, 1 / ranks.world_size)
    ranks.share_buffers()
