"""LossFilter: a logged loss leaves NaN and infinite losses out, and the host waits for no device to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

# The trainer calls them before and after it adds a loss. With others in their place nobody would put the sum right.
_CALLED = ("training_step", "floating_point_ops")
_OURS, _THEIRS = f"{__package__}.trainer", "transformers.trainer"


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
        if not (args.logging_nan_inf_filter and _can_follow(trainer)):
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


def _can_follow(trainer: Any) -> bool:
    """Say whether the loop is that of transformers, and calls our methods, not some above them."""
    loops = {kind.__module__ for kind in type(trainer).__mro__ if "_run_epoch" in vars(kind)}
    calls = {getattr(getattr(trainer, name), "__module__", None) for name in _CALLED}
    return loops <= {_OURS, _THEIRS} and calls == {_OURS} and isinstance(getattr(trainer, "_tr_loss", None), Tensor)
