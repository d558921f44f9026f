"""One loss function a task; every model answers with outputs that it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional as F

from ..step import entropy_sum, supervised_loss
from ..step.losses import LossFunction, Sums
from ._records import Dataset

# Outputs that are there already pass through it into the loss, so that the model runs once for all sums.
_OUTPUTS = nn.Identity()


def loss_fn_for(dataset: Dataset) -> LossFunction:
    """Return the loss function of a data set: sums, as a ``Stepper`` takes them.

    ``loss_fn(model, (inputs, targets)) -> (loss_sum, weight, {"entropy": sum, "correct": sum})`` with cross-entropy
    over classes, or over every next token; ``(loss_sum, weight)`` with squared errors of the standardised target for
    regression, which has no entropy. The weight counts targets.

    >>> import torch
    >>> from batchwright.lab.datasets import load
    >>> batch = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([0, 2])
    >>> loss_sum, weight, sums = loss_fn_for(load("wine"))(nn.Identity(), batch)
    >>> int(weight), int(sums["correct"])
    (2, 1)
    """
    return _regression_loss() if dataset.task == "regression" else _classification_loss()


def _classification_loss() -> LossFunction:
    cross_entropy = supervised_loss(partial(F.cross_entropy, reduction="sum"))

    def loss_fn(model: nn.Module, batch: Any) -> Sums:
        inputs, targets = batch
        outputs = model(inputs)
        loss_sum, weight = cross_entropy(_OUTPUTS, (outputs, targets))[:2]
        sums = {
            "entropy": entropy_sum(outputs.movedim(1, -1), targets),
            "correct": (outputs.detach().argmax(dim=1) == targets).sum(),
        }
        return loss_sum, weight, sums

    return loss_fn


def _regression_loss() -> LossFunction:
    squared_error = supervised_loss(partial(F.mse_loss, reduction="sum"))

    def loss_fn(model: nn.Module, batch: Any) -> Sums:
        inputs, targets = batch
        # One output an example, in a column; subtracted from a row of targets it would give a square of differences.
        return squared_error(_OUTPUTS, (model(inputs).squeeze(1), targets))

    return loss_fn
