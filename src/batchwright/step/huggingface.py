"""Losses of Hugging Face models as exact sums, whichever way the model counts them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._tree import num_examples, take
from ..errors import ArgumentError
from ._full_precision import in_float32, noting_half
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
from .oom import is_out_of_memory
from .packing.attention import is_flash, is_prepared
from .packing.collator import PackCollator, block_mask
from .packing.probing import complaint_about_rows, doubt_about_rows, why_not_packed
from .packing.rows import PackedRow, is_flat, starts_again


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
        self._packed: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()  # how rows that are right were made

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
        self._check_packed(model, batch)
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
        if is_flat(batch) and shifts:
            PackedRow(batch).check_labels()
        if found is None:  # a later batch may tell
            return usual_reading(model, labels)
        self._known[model] = found
        new = None if is_usual else self._novelty.setdefault(model, Novelty()).notice(batch)
        if new:
            _check_rows(model, batch, found, new)
        return found

    def _check_packed(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Refuse a model in whose packed rows examples do not have the losses that they have alone."""
        mask, known = batch.get("attention_mask"), self._packed.setdefault(model, set())
        # What can be told without a look at the device.
        kind = ("cu_seq_lens_q" in batch, mask.dtype if isinstance(mask, Tensor) and mask.ndim == 4 else None)
        if "position_ids" not in batch or kind in known:
            return
        collator = _collator_of(model, batch)
        if collator is None:
            return  # a later batch may be packed
        options = {name: value for name, value in batch.items() if name == "use_cache"}
        reason = why_not_packed(model, collator, options)
        if reason is not None:
            raise ArgumentError(complaint_about_rows(model, collator, reason))
        if not known and batch["labels"].is_cuda and not is_flash(model):
            warnings.warn(doubt_about_rows(collator), stacklevel=2)
        known.add(kind)


def _collator_of(model: nn.Module, batch: Mapping[str, Any]) -> PackCollator | None:
    """Return what makes rows like those of a batch; None if they hold one sequence each, or are known to be right."""
    positions, mask = batch["position_ids"], batch.get("attention_mask")
    predicts_next = usual_reading(model, batch["labels"]).shifts
    if is_flat(batch):
        return None if is_prepared(model) or is_flash(model) else PackCollator(layout="flat", causal=predicts_next)
    if not isinstance(positions, Tensor) or positions.ndim != 2 or not starts_again(positions):
        return None
    if mask is None:
        return PackCollator()
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    if not torch.equal(mask, block_mask(positions, causal=predicts_next, dtype=mask.dtype)):
        return None  # the user's own
    return PackCollator(layout="block", mask_dtype=mask.dtype, causal=predicts_next)


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
        return _read_flat(ModelLoss(model), batch)
    views = row_views(batch, num_examples(batch), lambda inputs, rows: take(dict(inputs), rows))
    return read_views(ModelLoss(model), views)


def _read_flat(loss: ModelLoss, batch: Mapping[str, Any]) -> LossReading | None:
    """Read the loss of a flat batch from two of its sequences, which must not depend on each other."""
    pair = sequence_views(batch)
    # The same row with other labels that count: its logits are the same to the bit, in half precision too.
    views = label_views(batch if pair is None else pair.both)
    found = None if views is None else read_views(loss, views)
    reason = "" if pair is None or found is None else why_not_apart(loss, pair)
    if reason:
        raise ArgumentError(
            f"{type(unwrapped(loss.module)).__name__} cannot train on flat batches: {reason}; call use_varlen(model) "
            "first, or train on padded batches"
        )
    return found


# The loss of a sequence when only its neighbour changes: the same kernels on the same shapes, which add zeros.
_SAME = 1e-6
# How often a loss is taken that is not the same in two runs.
_RUNS = 4
# The loss of a sequence in another row runs in other kernels. On a GPU float32 may be computed in TF32.
_TOLERANCE_ON_GPU = 1e-3


def why_not_apart(loss: ProbedLoss, views: Views) -> str:
    """Return why two sequences of a packed row do not have the losses that they have alone; an empty text if they do.

    Args:
        loss: to be tried out.
        views: of ``sequence_views``.
    """
    tokens, name = views.both.get("input_ids"), name_of_labels(views.both)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return "it has no input_ids, so that nothing shows whether sequences see each other"
    num = views.first[name].shape[1]
    second = {**views.both, name: views.both[name].clone()}
    second[name][:, :num] = IGNORED
    other = {**second, "input_ids": _other_tokens(tokens, num)}
    before, after = try_out(loss, second, other)
    if not math.isclose(before, after, rel_tol=_SAME) and not _is_noise(loss, second, other):
        return f"the loss of a sequence is {before:.7g}, and {after:.7g} after other tokens, so it sees its neighbour"
    inside, alone, tolerance = _at_full_precision(loss, second, views.second)
    if math.isclose(inside, alone, rel_tol=tolerance):
        return ""
    return f"the loss of a sequence is {inside:.7g} after another one and {alone:.7g} alone; positions may go on"


def _is_noise(loss: ProbedLoss, *inputs: Mapping[str, Any]) -> bool:
    """Say whether two losses differ only because kernels in half precision do not round alike in every run.

    Then the losses of the same inputs differ as much, and in float32 the two are equal.
    """
    before, after = ([value for _ in range(_RUNS) for value in try_out(loss, given)] for given in inputs)
    spread = max(max(found) - min(found) for found in (before, after))
    if not abs(sum(after) - sum(before)) <= _RUNS * spread:
        return False
    try:
        with in_float32(loss.module):
            first, second = try_out(loss, *inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return True
    return math.isclose(first, second, rel_tol=_SAME)


def _other_tokens(tokens: Tensor, num: int) -> Tensor:
    """Return a row in which all of the first tokens are the least or the greatest of it, whichever is another row."""
    least, most = int(tokens.min()), int(tokens.max())
    if least == most:
        most = 0 if least else 1
    others = tokens.clone()
    others[:, :num] = most if bool((tokens[:, :num] == least).all()) else least
    return others


def _at_full_precision(loss: ProbedLoss, *inputs: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return two losses without autocast, where the model can do without, and how far rounding may set them apart."""
    device = next(loss.module.parameters()).device.type
    # Their kernels take half precision only.
    needs_half = device != "cpu" and (is_prepared(loss.module) or is_flash(loss.module))
    with noting_half(loss.module) as halves:
        try:
            with nullcontext() if needs_half else torch.autocast(device, enabled=False):
                first, second = try_out(loss, *inputs)
        except Exception as error:
            if needs_half or is_out_of_memory(error):
                raise
            first, second = try_out(loss, *inputs)
    if halves or needs_half:
        return first, second, HALF_TOLERANCE
    return first, second, max(loss.tolerance, TOLERANCE if device == "cpu" else _TOLERANCE_ON_GPU)
