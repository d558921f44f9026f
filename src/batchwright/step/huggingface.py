"""Losses of Hugging Face models as exact sums, whichever way the model counts them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._tree import num_examples, take
from ..errors import ArgumentError
from .losses import LossFunction, Sums, entropy_sum
from .oom import Snapshot

IGNORED = -100
OWN_LOSS = "write a loss_fn(model, micro_batch) that returns (loss_sum, weight) instead of huggingface_loss()"
# Rounding of a loss, by the type the model returns it in.
_TOLERANCE = 1e-4
_HALF_TOLERANCE = 2e-2


def huggingface_loss(*, with_entropy: bool = False) -> LossFunction:
    """Make a loss function for transformers models: the loss as a sum, and the labels it sums over.

    ``loss_sum = loss(num_items_in_batch=1)`` if the model honours it, else ``mean loss × labels that count``. Labels
    other than -100 count; if the model predicts the next token, the first label of a row does not. With one class per
    example, or with floats as labels, examples count.

    The first batch shows which of these holds: the losses of two of its examples, each on its own, must add up to the
    loss of both. They run without dropout and gradients, and leave no trace in random state and buffers.

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

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Sums:
        """Return the summed loss of a micro-batch and the labels that count."""
        # Trimmed labels are a view of the batch, and models call labels.view(-1).
        labels = _labels_of(batch).contiguous()
        batch = {**batch, "labels": labels}
        reading = self._read(model, batch, labels)
        if reading.shifts:
            labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        outputs = model(**batch, num_items_in_batch=1) if reading.sums else model(**batch)
        loss = loss_of(outputs)
        # A count in half precision is wrong from 257 on.
        weight = _count(labels).to(loss.device, torch.promote_types(loss.dtype, torch.float32))
        # The mean over no label is NaN, though its gradient is zero.
        loss_sum = loss if reading.sums else torch.where(weight > 0, loss * weight, 0)
        if not self._with_entropy:
            return loss_sum, weight
        return loss_sum, weight, {"entropy": _entropy(outputs, labels)}

    def _read(self, model: nn.Module, batch: Mapping[str, Any], labels: Tensor) -> LossReading:
        found = self._known.get(model) or read_loss(model, batch, labels)
        if found is None:  # a later batch may tell
            return usual_reading(model, labels)
        self._known[model] = found
        return found


def _labels_of(batch: Any) -> Tensor:
    if not isinstance(batch, Mapping):
        raise ArgumentError(f"huggingface_loss takes batches that are mappings, got {type(batch).__name__}; {OWN_LOSS}")
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise ArgumentError(
            f"the batch has no labels, only {sorted(batch)}; add a tensor 'labels' in your collator, or {OWN_LOSS}"
        )
    if labels.ndim not in (1, 2):
        raise ArgumentError(f"labels must have shape (B,) or (B, L), got {tuple(labels.shape)}; {OWN_LOSS}")
    return labels


def _count(labels: Tensor) -> Tensor:
    """Count labels, or examples if labels are floats; on the device, as reading the count would make the step wait."""
    if labels.is_floating_point():
        return torch.tensor(len(labels))
    return (labels != IGNORED).sum()


def _entropy(outputs: Any, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        raise ArgumentError("with_entropy needs labels that are classes, got floats; leave it out for regression")
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1]
    return entropy_sum(logits, labels.to(logits.device))


class LossReading(NamedTuple):
    """How to read the loss of a model."""

    sums: bool  # num_items_in_batch=1 makes it a sum
    shifts: bool  # the first label of a row belongs to no output


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model under ``torch.compile``, data-parallel and adapter wrappers."""
    while True:
        base = getattr(model, "get_base_model", None)
        inner = base() if callable(base) else getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode; afterwards every module is in the mode that it had."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def counts_tokens(labels: Tensor) -> bool:
    """Say whether labels are classes of tokens, rather than one per example or numbers."""
    return labels.ndim == 2 and not labels.is_floating_point()


def usual_reading(model: nn.Module, labels: Tensor) -> LossReading:
    """Return the reading that is right for most models of this kind; every model can give a mean."""
    base = unwrapped(model)
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    predicts_next = any(part in type(base).__name__ for part in ("CausalLM", "LMHead")) and not is_encoder_decoder
    return LossReading(sums=False, shifts=predicts_next and counts_tokens(labels))


def loss_of(outputs: Any) -> Tensor:
    """Return the loss from the outputs of a model."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ArgumentError(f"the model returned no loss for the labels, got {type(loss).__name__}; {OWN_LOSS}")
    return loss.reshape(())


def read_loss(model: nn.Module, batch: Mapping[str, Any], labels: Tensor) -> LossReading | None:
    """Find out from two examples how to read a loss; None if this batch cannot tell.

    The model runs in evaluation mode without gradients; random state and buffers are put back.
    """
    if counts_tokens(labels) and labels.shape[1] < 3:
        return None
    model = getattr(model, "_orig_mod", model)  # the shapes of two examples are not worth compiling
    snapshot = Snapshot.of(model)
    try:
        with evaluating(model), torch.no_grad():
            return _Probe(model, batch, labels).read()
    finally:
        snapshot.restore()


@final
class _Probe:
    """Two examples of a batch, thinned to few labels, and their losses apart and together."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], labels: Tensor) -> None:
        self._model, self._base = model, unwrapped(model)
        self._inputs = {name: value for name, value in batch.items() if name != "labels"}
        self._places = [0, min(1, num_examples(dict(batch)) - 1)]
        self._counts_tokens = counts_tokens(labels)
        self._labels = labels[self._places] if labels.is_floating_point() else self._thinned(labels)
        usual = usual_reading(model, labels).shifts
        self._ways = (usual, not usual) if self._counts_tokens else (False,)

    def read(self) -> LossReading | None:
        """Return the reading under which sums add up, the usual one first; None if the loss is not finite."""
        mean = self._loss(0, 1)
        total = self._loss(0, 1, num_items_in_batch=1) if _takes_num_items(self._base) else mean
        if not (torch.isfinite(mean) and torch.isfinite(total)):
            return None
        tolerance = _TOLERANCE if mean.dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE
        is_close = partial(math.isclose, rel_tol=tolerance, abs_tol=1e-12)
        is_sum = not is_close(float(total), float(mean))
        first, second = (0.0, 0.0) if is_sum else (float(self._loss(0, 0)), float(self._loss(1, 1)))
        for shifts in self._ways:
            num_first, num_second = self._num_labels(shifts)
            added = float(total) if is_sum else num_first * first + num_second * second
            if is_close(float(mean) * (num_first + num_second), added):
                return LossReading(is_sum, shifts)
        how = f"{total:.6g} with num_items_in_batch=1" if is_sum else f"{first:.6g} and {second:.6g} apart"
        raise self._complaint(f"that of two examples with {num_first} and {num_second} labels is {mean:.6g}, {how}")

    def _thinned(self, labels: Tensor) -> Tensor:
        """Keep one label in the first row and three in the second, so that no two ways of counting agree."""
        rows = labels[self._places]
        kept = torch.ones_like(rows, dtype=torch.bool)
        if self._counts_tokens:
            kept[0, :-1] = False
            kept[1, 1:-2] = False
        # The largest label is a valid class; class 0 may be padding, which makes no decoder input in some models.
        stand_in = labels.max().clamp(min=0)
        return torch.where(kept, torch.where(rows == IGNORED, stand_in, rows), IGNORED)

    def _num_labels(self, shifts: bool) -> tuple[int, int]:
        return (1, 2 if shifts else 3) if self._counts_tokens else (1, 1)

    def _loss(self, first: int, second: int, **options: Any) -> Tensor:
        """Return the loss of two rows; always two, as other shapes run in other kernels and round differently."""
        inputs = take(self._inputs, [self._places[first], self._places[second]])
        outputs = self._model(**inputs, labels=self._labels[[first, second]], **options)
        found = outputs if isinstance(outputs, Mapping) else {}
        extra = [name for name in found if name.endswith(("aux_loss", "z_loss")) and found[name] is not None]
        if extra:
            raise self._complaint(f"it holds {extra[0]}, which belongs to a batch as a whole; turn that off if you can")
        return loss_of(outputs)

    def _complaint(self, why: str) -> ArgumentError:
        name = type(self._base).__name__
        return ArgumentError(f"the loss of {name} is not a mean over its labels: {why}; {OWN_LOSS}")


def _takes_num_items(base: nn.Module) -> bool:
    parameters = inspect.signature(base.forward).parameters
    takes = "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes and getattr(base, "accepts_loss_kwargs", True) is not False
