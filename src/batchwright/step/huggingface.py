"""Losses of Hugging Face models as exact sums, whichever way the model counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._tree import num_examples, take
from ..errors import ArgumentError
from ._loss_probe import HALF_TOLERANCE as HALF_TOLERANCE
from ._loss_probe import OWN_LOSS, ModelLoss, loss_of
from ._loss_probe import TOLERANCE as TOLERANCE
from ._loss_probe import LossReading as LossReading
from ._loss_probe import ProbedLoss as ProbedLoss
from ._loss_probe import adds_up as adds_up
from ._loss_probe import evaluating as evaluating
from ._loss_probe import has_usual_loss as has_usual_loss
from ._loss_probe import read_views as read_views
from ._loss_probe import shared_term as shared_term
from ._loss_probe import try_out as try_out
from ._loss_probe import unwrapped as unwrapped
from ._loss_probe import usual_reading as usual_reading
from ._loss_samples import IGNORED as IGNORED
from ._loss_samples import LABELS as LABELS
from ._loss_samples import Novelty as Novelty
from ._loss_samples import Views as Views
from ._loss_samples import choose_rows as choose_rows
from ._loss_samples import counts_tokens as counts_tokens
from ._loss_samples import is_telling as is_telling
from ._loss_samples import label_views as label_views
from ._loss_samples import name_of_labels as name_of_labels
from ._loss_samples import num_labels as num_labels
from ._loss_samples import row_views as row_views
from ._loss_samples import sample as sample
from ._loss_samples import sequence_views as sequence_views
from .filler import ROW_WEIGHT, without_filler
from .losses import LossFunction, Sums, entropy_sum
from .packing.rows import PackedRow, is_flat


def huggingface_loss(*, with_entropy: bool = False) -> LossFunction:
    """Make a loss function for transformers models: the loss as a sum, and the labels it sums over.

    ``loss_sum = loss(num_items_in_batch=1)`` if the model honours it, else ``mean loss × labels that count``. Labels
    other than -100 count; if the model predicts the next token, the first label of a row does not. With one class per
    example, or with floats as labels, examples count. Filler rows of ``PadCollator`` never count. The examples of
    flat batches, of ``PackCollator(layout="flat")``, count as if they had rows of their own.

    The first batch shows which of these holds: the losses of two of its examples, each on its own, must add up to the
    loss of both. They run without dropout and gradients, and leave no trace in random state and buffers. A loss that
    does not add up is refused.

    Args:
        with_entropy: also return the summed entropy of the softmax of the logits, for ``size.entropy_driven``.

    Returns:
        ``loss_fn(model, batch) -> (loss_sum, weight)`` for batches that are mappings with ``labels``.

    >>> class Model(nn.Module):
    ...     def forward(self, logits, labels):
    ...         return {"loss": F.cross_entropy(logits, labels), "logits": logits}
    >>> batch = {"logits": torch.zeros(3, 2), "labels": torch.tensor([0, 1, -100])}
    >>> loss_sum, weight = huggingface_loss()(Model(), batch)
    >>> round(float(loss_sum), 4), int(weight)
    (1.3863, 2)
    """
    return _HuggingFaceLoss(with_entropy)


@final
class _HuggingFaceLoss:
    """Remembers how to read the loss of each model."""

    def __init__(self, with_entropy: bool) -> None:
        self._with_entropy = with_entropy
        self._known: WeakKeyDictionary[nn.Module, LossReading] = WeakKeyDictionary()
        self._novelty: WeakKeyDictionary[nn.Module, Novelty] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Sums:
        """Return the summed loss of a micro-batch and the labels that count."""
        reading = self._read(model, batch)
        batch = _without_weights(batch)
        # Trimmed labels are a view of the batch, and models call labels.view(-1).
        labels = batch["labels"].contiguous()
        batch = {**batch, "labels": labels}
        outputs = model(**batch, num_items_in_batch=1) if reading.sums else model(**batch)
        loss = loss_of(outputs)
        # A count in half precision is wrong from 257 on.
        weight = num_labels(batch, reading.shifts).to(loss.device, torch.promote_types(loss.dtype, torch.float32))
        # The mean over no label is NaN, though its gradient is zero.
        loss_sum = loss if reading.sums else torch.where(weight > 0, loss * weight, 0)
        if not self._with_entropy:
            return loss_sum, weight
        return loss_sum, weight, {"entropy": output_entropy(outputs, batch, shifts=reading.shifts)[0]}

    def _read(self, model: nn.Module, batch: Mapping[str, Any]) -> LossReading:
        _check_labels(batch)
        found, is_usual = self._known.get(model), has_usual_loss(model)
        if found is not None and is_usual:
            return found
        batch = _without_weights(without_filler(batch))  # labels of filler would show nothing, or something wrong
        labels = batch["labels"].contiguous()
        batch = {**batch, "labels": labels}
        found = found or read_loss(model, batch, labels)
        if not is_usual and (found is None or not is_telling(batch, is_usual=False)):
            raise ModelLoss(model).complaint(
                "this batch does not show it, as the loss is 0, not finite, or the same for all labels"
            )
        shifts = usual_reading(model, labels).shifts if found is None else found.shifts
        if is_flat(batch):
            _check_flat(model, batch, shifts=shifts)
        if found is None:  # a later batch may tell
            return usual_reading(model, labels)
        self._known[model] = found
        new = None if is_usual else self._novelty.setdefault(model, Novelty()).notice(batch)
        if new:
            _check_rows(model, batch, found, new)
        return found


def _check_flat(model: nn.Module, batch: Mapping[str, Any], *, shifts: bool) -> None:
    """Refuse a flat batch whose sequences see each other, or whose labels are predicted across their bounds."""
    row, base = PackedRow(batch), unwrapped(model)
    if shifts:
        row.check_labels()
    attention = getattr(getattr(base, "config", None), "_attn_implementation", None)
    keeps_apart = attention is None or "varlen" in attention or "flash" in attention
    if not keeps_apart and not any(getattr(module, "is_causal", False) for module in base.modules()):
        raise ArgumentError(
            f"{type(base).__name__} would let the sequences of a flat batch see each other, as encoders do not look "
            f"for their bounds with attn_implementation={attention!r}; call use_varlen(model) first"
        )


def _check_labels(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise ArgumentError(f"huggingface_loss takes batches that are mappings, got {type(batch).__name__}; {OWN_LOSS}")
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise ArgumentError(
            f"the batch has no labels, only {sorted(batch)}; add a tensor 'labels' in your collator, or {OWN_LOSS}"
        )
    if labels.ndim not in (1, 2):
        raise ArgumentError(f"labels must have shape (B,) or (B, L), got {tuple(labels.shape)}; {OWN_LOSS}")


def _without_weights(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch as a model takes it: without weights of rows, and with no label that counts in filler."""
    if ROW_WEIGHT not in batch:
        return batch
    if batch["labels"].is_floating_point():
        batch = without_filler(batch)  # every row counts
    inputs = {name: value for name, value in batch.items() if name != ROW_WEIGHT}
    is_filler = batch[ROW_WEIGHT] == 0
    for name in LABELS:
        labels = inputs.get(name)
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            inputs[name] = labels.masked_fill(is_filler.reshape(-1, *[1] * (labels.ndim - 1)), IGNORED)
    return inputs


def output_entropy(outputs: Any, batch: Mapping[str, Any], *, shifts: bool) -> tuple[Tensor, Tensor]:
    """Return the entropy of a model's logits, summed over the labels that count, and the number of these labels.

    Args:
        outputs: of the model, a mapping with ``logits`` or a tuple.
        batch: has ``labels`` or ``shift_labels``; without either, rows of logits ``(B, classes)`` count.
        shifts: the model predicts the next label.

    >>> batch = {"labels": torch.tensor([1, -100])}
    >>> entropy, num = output_entropy({"logits": torch.zeros(2, 4)}, batch, shifts=False)
    >>> round(float(entropy), 4), int(num)  # log 4
    (1.3863, 1)
    """
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.is_floating_point():
        raise ArgumentError("entropy needs labels that are classes, got floats; leave it out for regression")
    logits = _logits_of(outputs)
    if isinstance(batch.get("shift_labels"), Tensor):
        labels = batch["shift_labels"]
    elif isinstance(labels, Tensor) and shifts:
        labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    if not isinstance(labels, Tensor):
        if logits.ndim != 2:
            raise ArgumentError(
                f"entropy needs labels, which tell the positions that count in logits {tuple(logits.shape)}, but the "
                "batch has none; name them 'labels', -100 where none counts"
            )
        labels = torch.zeros(len(logits), dtype=torch.long)
    if labels.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"entropy needs the logits of every label, but labels are {tuple(labels.shape)} and logits "
            f"{tuple(logits.shape)}; return all of them, or choose a policy that reads something else"
        )
    labels = labels.to(logits.device)
    return entropy_sum(logits, labels), (labels != IGNORED).sum()


def _logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's outputs; in a tuple they are the first tensor that is no single number."""
    is_named = isinstance(outputs, Mapping)
    tensors = [value for value in ([] if is_named else outputs) if isinstance(value, Tensor) and value.ndim > 1]
    logits = outputs.get("logits") if is_named else next(iter(tensors), None)
    if not isinstance(logits, Tensor) or logits.ndim < 2 or logits.shape[-1] < 2:
        found = f"only {', '.join(map(str, outputs))}" if is_named else "a tuple without them"
        found = f"logits of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else found
        raise ArgumentError(
            f"entropy needs the logits of the classes, but the model returns {found}; let it return 'logits' of two or "
            "more classes, or choose a policy that reads something else"
        )
    return logits


def _check_rows(model: nn.Module, batch: Mapping[str, Any], reading: LossReading, new: set[Any]) -> None:
    """Refuse a loss under which the rows of a batch do not add up."""
    rows, loss = choose_rows(batch, new), ModelLoss(model)
    if len(rows) < 2:
        return
    samples = sample(batch, rows, lambda chosen: take(dict(batch), chosen))
    if not adds_up(loss, samples, lambda part: int(num_labels(part, reading.shifts)), sums=reading.sums):
        raise loss.complaint(f"those of the examples {rows} of a batch do not add up to that of all of them")


def read_loss(model: nn.Module, batch: Mapping[str, Any], labels: Tensor) -> LossReading | None:
    """Find out from two examples how to read a loss; None if this batch cannot tell."""
    batch = {**batch, "labels": labels}
    if is_flat(batch):
        flat_views = sequence_views(batch) or label_views(batch)
        return None if flat_views is None else read_views(ModelLoss(model), flat_views)
    views = row_views(batch, num_examples(batch), lambda inputs, rows: take(dict(inputs), rows))
    return read_views(ModelLoss(model), views)
