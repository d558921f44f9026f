"""LossFilter: a logged loss leaves NaN and infinite losses out, and the host waits for no device to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor


@final
class LossFilter:
    """Does on the device what ``logging_nan_inf_filter`` makes a trainer do on the host.

    The trainer asks of every loss whether it is finite. The host then waits until the device has run the step, and the
    device waits while the host launches the next one: time that replayed graphs would save. Here the trainer adds every
    loss, and its sum is put right afterwards: in place of a loss that is not finite stands the mean of those before.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._before: Tensor | None = None

    @contextmanager
    def instead_of(self, trainer: Any) -> Iterator[None]:
        """Stand in for the trainer's own filter inside the context, if that is on."""
        args = trainer.args
        # Releases that sum up losses in a local variable, which nobody else can put right, keep their own filter.
        if not (args.logging_nan_inf_filter and isinstance(getattr(trainer, "_tr_loss", None), Tensor)):
            yield
            return
        self._is_on, args.logging_nan_inf_filter = True, False
        try:
            yield
        finally:
            self._is_on, self._before, args.logging_nan_inf_filter = False, None, True

    @contextmanager
    def shown(self, args: Any) -> Iterator[None]:
        """Show the setting as it was given inside the context: evaluation reads it, and checkpoints save it."""
        if not self._is_on:
            yield
            return
        args.logging_nan_inf_filter = True
        try:
            yield
        finally:
            args.logging_nan_inf_filter = False

    def begin(self, trainer: Any) -> None:
        """Note the sum, as a loss is about to be added."""
        if self._is_on:
            self._before = trainer._tr_loss.clone()

    def end(self, trainer: Any) -> None:
        """Put the sum right, as a loss was added."""
        before, self._before = self._before, None
        if before is None:
            return
        num_updates = 1 + trainer.state.global_step - trainer._globalstep_last_logged  # as the trainer counts
        total = trainer._tr_loss
        total.copy_(torch.where(total.isfinite(), total, before + before / num_updates))
