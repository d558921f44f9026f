"""The settings of a Stepper, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..plan import Budget, MaxItems
from ..size.learning_rate import Rule, get_rule
from ._split import ExampleBatch, LogicalBatch, TensorBatch
from .losses import LossFunction

_ITEMS = MaxItems(1)


@final
@dataclass(frozen=True)
class Settings:
    """What a user asked of a Stepper; the arguments of the same names."""

    loss_fn: LossFunction
    micro_batch: Any
    lengths: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any] | None
    trim: Callable[[Any], Any] | None
    weight_of: Callable[[Any], float | Tensor] | None
    clip_norm: float | None
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None
    on_oom: Literal["split", "raise"]
    measure_noise: bool | int
    lr_rule: str | Rule | None
    base_size: int | None

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise ArgumentError(f"loss_fn must be a function of (model, micro_batch), got {self.loss_fn!r}")
        check_micro_batch(self.micro_batch, self.lengths)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ArgumentError(f"clip_norm must be above 0, got {self.clip_norm!r}")
        if self.scaler is not None and self.scaler.is_enabled() and self.weight_of is None:
            raise ArgumentError(
                "a GradScaler needs the weight of a batch before it runs: weight_of=lambda batch: number of tokens; "
                "its skips depend on the size of gradients"
            )
        if self.on_oom not in ("split", "raise"):
            raise ArgumentError(f"on_oom must be 'split' or 'raise', got {self.on_oom!r}")
        if not isinstance(self.measure_noise, int) or self.measure_noise < 0:
            raise ArgumentError(
                f"measure_noise must be True, False or a number of updates of 1 or more, got {self.measure_noise!r}"
            )
        rule = get_rule(self.lr_rule)
        if rule is not None and (self.base_size is None or self.base_size < 1):
            raise ArgumentError(
                "lr_rule needs base_size, the batch size that the optimizer's learning rate is meant for"
            )
        if rule == "adascale" and not self.measure_noise:
            raise ArgumentError("lr_rule='adascale' needs measure_noise=True")

    def wrap(self, batch: Any) -> LogicalBatch:
        """Return the batch as something that can be split."""
        if self.collate is not None and isinstance(batch, list):
            return ExampleBatch(batch, self.collate, self.lengths)
        return TensorBatch(batch, lengths=self.lengths, trim=self.trim)

    @property
    def cost_budget(self) -> Budget | None:
        """Return what a micro-batch is counted in: shares of the budget, items, or None for tokens."""
        if isinstance(self.micro_batch, Budget):
            return self.micro_batch
        return None if self.micro_batch == "auto" else _ITEMS

    @property
    def asked(self) -> float:
        """Return the most a micro-batch may cost by the setting alone."""
        given = self.micro_batch
        if isinstance(given, Budget):
            return 1.0
        if isinstance(given, str):
            return math.inf
        return float(given if isinstance(given, int) else int(given.size))

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


def check_micro_batch(value: Any, lengths: Any) -> Any:
    """Return the micro-batch setting, or say which there are."""
    if isinstance(value, Budget):
        if lengths is None:
            raise ArgumentError(f"micro_batch={value} needs lengths=, the lengths of the examples of a batch")
        return value
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if is_number or (isinstance(value, str) and value == "auto") or hasattr(value, "size"):
        return value
    raise ArgumentError(f"micro_batch must be 'auto', a number of 1 or more, a budget or a controller, got {value!r}")
