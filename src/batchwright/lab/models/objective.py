"""What a task asks of a model: the tensors of a batch, the loss to lower, the memory it takes, how good a model is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, final, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ..._checks import check_choice
from ..._types import IntArray
from ...errors import ArgumentError
from ...plan import MaxItems, MaxTokens, Sorted, plan_batches
from ...step import entropy_sum, supervised_loss
from ...step.losses import LossFunction, Sums
from ..datasets.dataset import PADDING, Array, Dataset, Ids, Part, Split

METRICS = {"classification": "accuracy", "regression": "r2", "language": "loss"}

Batch: TypeAlias = tuple[Tensor, Tensor]
Places: TypeAlias = Sequence[int] | IntArray
Collate: TypeAlias = Callable[[Places], Batch]
# Passes outputs that are already there into the loss, so that the model runs once for all sums.
_OUTPUTS = nn.Identity()
# For texts sorted by length: large enough to be quick, small enough for any machine.
_BUDGET = MaxTokens(16_384) & MaxItems(1024)


def collate_for(dataset: Dataset, *, part: Part = "train", device: torch.device | str = "cpu") -> Collate:
    """Return a function from a list of places in a part to ``(inputs, targets)``; texts are padded to the longest.

    Use it as the ``collate`` of a ``Stepper`` whose examples are places, with ``lengths=dataset.lengths.item``.

    Args:
        dataset: the data set.
        part: ``"train"`` or ``"validation"``.
        device: where the tensors go.

    >>> from batchwright.lab.datasets import load
    >>> inputs, targets = collate_for(load("digits"))([0, 5, 9])
    >>> inputs.shape, targets.shape
    (torch.Size([3, 1, 8, 8]), torch.Size([3]))
    """
    check_choice("part", part, get_args(Part))
    split: Split = getattr(dataset, part)
    features, labels = split.features, split.labels

    def collate(places: Places) -> Batch:
        rows = np.asarray(places, dtype=np.int64)
        if not rows.size:
            raise ArgumentError("a batch needs at least one example, got none")
        inputs = _padded([features[row] for row in rows]) if isinstance(features, list) else _taken(features, rows)
        return inputs.to(device), _taken(labels, rows).to(device)

    return collate


def _taken(array: Array, rows: Ids) -> Tensor:
    return torch.from_numpy(array[rows])


def _padded(texts: list[Ids]) -> Tensor:
    lengths = np.array([len(ids) for ids in texts])
    padded = np.full((len(texts), lengths.max()), PADDING, dtype=np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(texts)
    return torch.from_numpy(padded)


def loss_fn_for(dataset: Dataset) -> LossFunction:
    """Return the loss function of a data set, which returns sums as a ``Stepper`` takes them.

    ``loss_fn(model, (inputs, targets)) -> (loss_sum, weight, {"entropy": sum, "correct": sum})`` with the cross-entropy
    over classes, or over every next token. For regression, which has no entropy, ``(loss_sum, weight)`` with the
    squared errors of the standardised target. The weight counts targets.

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
        # The output is a column; a row of targets minus a column would be a square of differences.
        return squared_error(_OUTPUTS, (model(inputs).squeeze(1), targets))

    return loss_fn


def evaluate(model: nn.Module, dataset: Dataset, *, part: Part = "validation") -> dict[str, float]:
    """Return the mean loss and the accuracy of a model, or for regression ``r2 = 1 − squared errors / variance``.

    Args:
        model: from ``make_model``, or any that returns the same shapes; it stays in the mode it was in.
        dataset: the data set.
        part: ``"validation"`` or ``"train"``.

    Returns:
        ``{"loss": …, "accuracy": …}`` or ``{"loss": …, "r2": …}``. For language the accuracy is the share of next
        tokens that were predicted. A model that always predicts the mean has an ``r2`` of 0.
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
    if variance == 0:  # all targets are the same: 1 if every one was met, else 0
        return float(squared_errors == 0)
    return 1 - squared_errors / variance


def metric_of(dataset: Dataset, figures: Mapping[str, float]) -> float:
    """Return the metric from what ``evaluate`` returned; higher is better, so that of language is minus the loss."""
    return -figures["loss"] if dataset.task == "language" else figures[METRICS[dataset.task]]


@final
class ActivationMemory:
    """Counts the bytes of activations that a micro-batch keeps for its backward pass, in a memory of simulated size.

    A CPU has no device memory that runs out, and the resident memory of a process does not follow the batch of a small
    model. What does grow with the batch is what autograd keeps: it is counted here, exactly and the same in every run.
    Only the size of the memory is made up: room for ``room`` examples like those of the first micro-batch.

    Use it as the ``source`` of a ``MemoryMonitor``.

    Args:
        room: how many examples fit.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._total_bytes: int | None = None
        self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Return 0: between updates nothing is kept."""
        return 0

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of the largest micro-batch since ``reset_peak``."""
        return self._peak_bytes

    @property
    def total_bytes(self) -> int:
        """Return the size of the memory; 1 before the first micro-batch, so that it can be divided by."""
        return self._total_bytes or 1

    def reset_peak(self) -> None:
        """Forget the micro-batches so far."""
        self._peak_bytes = 0

    def watch(self, loss_fn: LossFunction) -> LossFunction:
        """Return the loss function with its activations counted; its batches are ``(inputs, targets)``."""

        def watched(model: nn.Module, batch: Any) -> Sums:
            # Parameters are in memory anyway, and views that share memory count once.
            parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            kept: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in parameters:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                sums = loss_fn(model, batch)
            self._add(sum(kept.values()), num_items=len(batch[1]))
            return sums

        return watched

    def _add(self, num_bytes: int, *, num_items: int) -> None:
        if self._total_bytes is None:
            self._total_bytes = max(1, round(self._room * num_bytes / num_items))
        self._peak_bytes = max(self._peak_bytes, num_bytes)
