"""LossFilter: a logged loss leaves NaN and infinite losses out, and the host waits for no device to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from transformers.utils.import_utils import is_torch_xla_available

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
        self._follows = False
        self._before: Tensor | None = None

    @contextmanager
    def instead_of(self, trainer: Any) -> Iterator[None]:
        """Stand in for the trainer's own filter inside the context, wherever that is on."""
        self._follows = _can_follow(trainer)
        try:
            yield
        finally:
            self._follows = False
            self.leave(trainer.args)

    def begin(self, trainer: Any) -> None:
        """Note the sum, as a step is done and the trainer adds its loss next.

        Only from here to ``end`` the trainer's own filter is off: evaluation reads the setting too, and checkpoints
        save it; callbacks may run both at any time.
        """
        args = trainer.args
        if self._follows and (args.logging_nan_inf_filter or self._before is not None):
            self._before, args.logging_nan_inf_filter = trainer._tr_loss.clone(), False

    def end(self, trainer: Any) -> None:
        """Put the sum right, as a loss was added."""
        before = self._before
        self.leave(trainer.args)
        if before is None:
            return
        num_updates = 1 + trainer.state.global_step - trainer._globalstep_last_logged  # as the trainer counts
        total = trainer._tr_loss
        total.copy_(torch.where(total.isfinite(), total, before + before / num_updates))

    def leave(self, args: Any) -> None:
        """Give the setting back as it was: the loss was added, or nobody will add it."""
        if self._before is not None:
            self._before, args.logging_nan_inf_filter = None, True


def _can_follow(trainer: Any) -> bool:
    """Say whether the loop is that of transformers, and calls our methods, not some above them."""
    loops = {kind.__module__ for kind in type(trainer).__mro__ if "_run_epoch" in vars(kind)}
    calls = {getattr(getattr(trainer, name), "__module__", None) for name in _CALLED}
    if is_torch_xla_available():  # there the trainer filters nothing
        return False
    return loops <= {_OURS, _THEIRS} and calls == {_OURS} and isinstance(getattr(trainer, "_tr_loss", None), Tensor)
