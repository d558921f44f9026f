"""How good a model is on examples that it was not trained on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ..plan import MaxItems, MaxTokens, Sorted, plan_batches
from ._collate import collate_for
from ._loss import loss_fn_for
from ._records import Dataset, Part, Split

# Of texts sorted by length; large enough to be quick, small enough for any machine.
_BUDGET = MaxTokens(16_384) & MaxItems(1024)


def evaluate(model: nn.Module, dataset: Dataset, *, part: Part = "validation") -> dict[str, float]:
    """Return the mean loss and the accuracy of a model, or for regression ``r2 = 1 − squared errors / variance``.

    Args:
        model: a model of ``make_model``, or any that answers alike; left in the mode it was in.
        dataset: the data set.
        part: ``"validation"`` or ``"train"``.

    Returns:
        ``{"loss": …, "accuracy": …}`` or ``{"loss": …, "r2": …}``. The accuracy of a language model is that of the next
        token. A model that always answers the mean has an ``r2`` of 0.
    """
    was_training = model.training
    model.eval()
    try:
        totals = _totals(model, dataset, part)
    finally:
        model.train(was_training)
    result = {"loss": totals["loss"] / totals["weight"]}
    if dataset.task == "regression":
        return result | {"r2": _r2(totals["loss"], getattr(dataset, part))}
    return result | {"accuracy": totals["correct"] / totals["weight"]}


@torch.no_grad()
def _totals(model: nn.Module, dataset: Dataset, part: Part) -> dict[str, float]:
    split: Split = getattr(dataset, part)
    device = next(model.parameters()).device
    collate, loss_fn = collate_for(dataset, part=part, device=device), loss_fn_for(dataset)
    lengths = np.ones(len(split), dtype=np.int64) if split.lengths is None else split.lengths
    totals = {"loss": 0.0, "weight": 0.0, "correct": 0.0}
    plan = plan_batches(lengths, _BUDGET, grouping=Sorted(), shuffle=False, oversize="alone")
    for places in np.split(plan.indices, plan.offsets[1:-1]):
        loss_sum, weight, *more = loss_fn(model, collate(places))
        sums: Mapping[str, Tensor | float] = {"loss": loss_sum, "weight": weight, **(more[0] if more else {})}
        totals = {name: total + float(sums.get(name, 0.0)) for name, total in totals.items()}
    return totals


def _r2(squared_errors: float, split: Split) -> float:
    targets = split.labels.astype(np.float64)
    variance = float(((targets - targets.mean()) ** 2).sum())
    if variance == 0:  # every target the same: 1 where all were met, else no better than their mean
        return float(squared_errors == 0)
    return 1 - squared_errors / variance
