"""The learning rate follows the batch, around ``optimizer.step`` alone: a scheduler keeps its own sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


@contextmanager
def scaled_lr(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rate of every group inside the context, and put back what was there.

    Schedulers that are recursive on ``group["lr"]`` (``ExponentialLR``) would compound any lasting change.
    """
    before = [group["lr"] for group in optimizer.param_groups]
    if factor != 1:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
