"""The processes that a Hugging Face trainer runs on, and what it leaves undone while micro-batches are weighed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ._keeping import kept

# Where losses of TRL and of sentence-transformers note figures of every call.
_NOTED = ("_metrics", "_total_train_tokens", "accum_loss_components")


def accelerators() -> list[torch.device]:
    """Return the accelerator that torch sees, an empty list if there is none."""
    if torch.cuda.is_available():
        return [torch.device("cuda")]
    return [torch.device("mps")] if torch.backends.mps.is_available() else []


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
def on_its_own(trainer: Any) -> Iterator[None]:
    """Let a loss be tried out: it gathers nothing from other ranks, logs nothing, and what trainers note stays."""
    accelerator, mine = trainer.accelerator, vars(trainer)
    log = mine.get("log")  # of this trainer alone
    noted = {name: kept(mine[name]) for name in _NOTED if name in mine}
    names = ("gather", "gather_for_metrics")
    for name in names:  # over the methods of its class
        setattr(accelerator, name, lambda tensor, *args, **kwargs: tensor)
    mine["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if log is None:
            del mine["log"]
        else:
            mine["log"] = log
        for name in names:
            delattr(accelerator, name)
        for name, put_back in noted.items():
            mine[name] = put_back()


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
