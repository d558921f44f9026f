"""The share that a micro-batch has in the mean of an update: by its labels, or by its examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError
from ..step.huggingface import IGNORED, counts_tokens
from ._huggingface_settings import Weighting
from ._trainer_step import Weighing, find_weighing, weighted

# compute(model, inputs, return_outputs, num_items_in_batch): what the trainer would do for a single process.
Compute: TypeAlias = "Callable[[nn.Module, dict[str, Any], bool, Any], Any]"

_OTHER = "take weighting='tokens', or let the loss itself be a mean over examples"


class Update(NamedTuple):
    """What a micro-batch is a part of."""

    total: Tensor  # what the whole update weighs
    num_replicas: int  # whose gradients are averaged later


@final
class Weights:
    """Finds out what a trainer's loss is a mean over, counts that, and weighs losses by it.

    Args:
        weighting: ``"tokens"``: every label counts the same. ``"examples"``: every example does, with the mean over
            its own labels, taken from the logits.
    """

    def __init__(self, weighting: Weighting) -> None:
        self._by_example = weighting == "examples"
        self._weighing: Weighing | None = None
        self._is_checked = False

    def learn(self, compute: Compute, model: nn.Module, inputs: Mapping[str, Any], key: str) -> None:
        """Look at a micro-batch."""
        self._weighing = find_weighing(
            lambda module, part, num: compute(module, part, False, num), model, inputs, key=key
        )

    @property
    def is_sure(self) -> bool:
        """Return whether a micro-batch has told; the first may not."""
        return self._weighing is not None and self._weighing.is_sure

    @property
    def is_known(self) -> bool:
        """Return whether anything was learned."""
        return self._weighing is not None

    def count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the weight of a micro-batch, on its device."""
        assert self._weighing is not None
        labels = self._labels_of_rows(inputs)
        return self._weighing.count(inputs) if labels is None else (labels != IGNORED).any(dim=1).sum()

    def part(
        self, compute: Compute, model: nn.Module, inputs: dict[str, Any], update: Update, with_outputs: bool = False
    ) -> tuple[Tensor, Any]:
        """Return the part that a micro-batch has in the mean of an update, and the outputs where they were needed."""
        assert self._weighing is not None
        if self._weighing.divides and self._labels_of_rows(inputs) is None:
            loss, outputs = _computed(compute, model, inputs, with_outputs, update.total)
            return loss * update.num_replicas, outputs
        weight = self.count(inputs)  # before the loss, which may take the labels away
        loss, outputs = self.mean(compute, model, inputs, with_outputs=with_outputs)
        return weighted(loss, weight, update.total, update.num_replicas), outputs

    def mean(
        self, compute: Compute, model: nn.Module, inputs: dict[str, Any], *, with_outputs: bool = False
    ) -> tuple[Tensor, Any]:
        """Return the mean loss of a micro-batch over what is counted, and the outputs where they were needed."""
        labels = self._labels_of_rows(inputs)
        if labels is None:
            return _computed(compute, model, inputs, with_outputs, None)
        loss, outputs = compute(model, inputs, True, None)
        losses, counts = _losses_of_rows(_logits_of(outputs), labels, self._shifts)
        if not self._is_checked:
            self._check(loss.detach(), losses.detach().sum() / counts.sum())
        rows = losses.sum(dim=1) / counts.clamp(min=1)
        return rows.sum() / (counts > 0).sum().clamp(min=1), outputs

    @property
    def _shifts(self) -> bool:
        assert self._weighing is not None
        return self._weighing.reading is not None and self._weighing.reading.shifts

    def _labels_of_rows(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the labels of tokens, None where a label or the whole loss is one an example."""
        labels = inputs.get("labels")
        if not self._by_example or self._weighing is None or self._weighing.reading is None:
            return None
        if not (isinstance(labels, Tensor) and counts_tokens(labels)):
            return None
        return labels[:, 1:] if self._shifts else labels

    def _check(self, loss: Tensor, found: Tensor) -> None:
        """Refuse, on the first micro-batch, a loss that is something else than the cross entropy of the logits."""
        theirs, ours = float(loss), float(found)
        tolerance = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 2e-2
        if math.isfinite(theirs) and not math.isclose(theirs, ours, rel_tol=tolerance, abs_tol=1e-12):
            raise ArgumentError(
                f"weighting='examples' takes the cross entropy of the logits, {ours:.6g}, but the loss is "
                f"{theirs:.6g}; {_OTHER}"
            )
        self._is_checked = math.isfinite(theirs)


def _computed(
    compute: Compute, model: nn.Module, inputs: dict[str, Any], with_outputs: bool, num_items: Any
) -> tuple[Tensor, Any]:
    """Return the loss, and the outputs or None."""
    found = compute(model, inputs, with_outputs, num_items)
    return found if with_outputs else (found, None)


def _logits_of(outputs: Any) -> Tensor:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs[1] if len(outputs) > 1 else None
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ArgumentError(f"weighting='examples' needs the logits of every token, which the model keeps; {_OTHER}")
    return logits


def _losses_of_rows(logits: Tensor, labels: Tensor, shifts: bool) -> tuple[Tensor, Tensor]:
    """Return the loss of every label, 0 where none counts, and how many count in each row."""
    logits = logits[:, :-1] if shifts else logits
    labels = labels.to(logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape), (labels != IGNORED).sum(dim=1)
