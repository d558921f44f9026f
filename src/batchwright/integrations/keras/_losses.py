"""The losses of a compiled Keras model as sums that add up over pieces of a batch, and what divides them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import keras
from keras import ops, tree
from keras.src.losses.loss import apply_mask, reduce_weighted_values

from ...errors import ArgumentError

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
NO_REDUCTION = (None, "none")


class Term(NamedTuple):
    """One loss of a piece of a batch.

    With ``S`` the sum of the weighted values of the piece, ``D`` what the reduction divides by, and ``c`` the number of
    values in the whole batch, the piece has ``total = S / c`` and ``weight = D / c``. Over all pieces the loss is
    ``sum of total / sum of weight``. Where ``is_known``, the weights of all pieces add up to 1, or nothing divides.

    Attributes:
        total: what the gradient is taken of.
        weight: the share of the divisor.
        shown: what the logs show; other than ``total`` only without a reduction, where Keras logs the mean.
        is_known: nothing is left to divide by.
        factor: the loss weight of ``compile``, None for 1.
    """

    total: Any
    weight: Any
    shown: Any
    is_known: bool
    factor: Any


def read_terms(model: Any, y: Any, y_pred: Any, sample_weight: Any, share: Any) -> list[Term]:
    """Return the losses of a piece, one per loss that ``compile`` was given.

    Args:
        model: compiled and built.
        y: the targets of the piece.
        y_pred: the outputs for it, with their masks.
        sample_weight: weights of examples or tokens, None for none.
        share: rows of the piece / rows of the whole batch.
    """
    compiled = model._compile_loss
    if compiled is None:
        return []
    if not compiled.built:
        raise ArgumentError("the losses of the model are not built; let fit or train_on_batch build them")
    found: list[Term] = []
    with replaced_losses(compiled, lambda entry: _Recorder(entry, found, share)):
        compiled(y, y_pred, sample_weight)
    # Of several losses for one output that is not nested, Keras counts only the first.
    return found if tree.is_nested(y) or tree.is_nested(y_pred) else found[:1]


@contextmanager
def replaced_losses(compiled: Any, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Let a compiled loss call others in place of its losses for a while, without updates of its own metrics.

    Args:
        compiled: the ``CompileLoss`` of a model.
        replace: returns what to call for an entry, which has ``loss`` and ``loss_weights``.
    """
    entries, metrics = compiled._flat_losses, compiled._metrics
    compiled._flat_losses = [entry._replace(loss=replace(entry)) for entry in entries]
    compiled._metrics = [None] * len(metrics)
    try:
        yield
    finally:
        compiled._flat_losses, compiled._metrics = entries, metrics


@final
class _Recorder:
    """Stands in for a loss and records its term."""

    def __init__(self, entry: Any, found: list[Term], share: Any) -> None:
        self._loss, self._factor, self._found, self._share = entry.loss, entry.loss_weights, found, share

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        values, mask = (None, None) if _has_own_call(self._loss) else loss_values(self._loss, y_true, y_pred)
        if values is not None and len(values.shape):
            term = _term(self._loss, values, mask, sample_weight, self._share)
        else:  # what a trial refuses before a batch is cut; until then the loss is taken as it is
            total = self._loss(y_true, y_pred, sample_weight)
            term = Term(ops.sum(total), self._share, ops.mean(total), True, None)
        self._found.append(term._replace(factor=self._factor))
        return term.total


def _has_own_call(loss: Any) -> bool:
    return type(loss).__call__ is not keras.losses.Loss.__call__


def check_own_call(loss: Any) -> None:
    """Refuse a loss that weights and reduces its values itself."""
    if _has_own_call(loss):
        raise ArgumentError(
            f"the loss {loss.name} has its own __call__, which weights and reduces in a way that nobody can cut into "
            "pieces; write call(y_true, y_pred), which returns one value per example"
        )


def loss_values(loss: Any, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Return the values of a loss before weights and reduction, and their mask; as ``Loss.__call__`` makes them."""
    given = getattr(y_pred, "_keras_mask", None)
    y_pred, y_true = (
        tree.map_structure(lambda leaf: ops.convert_to_tensor(leaf, dtype=loss.dtype), value)
        for value in (y_pred, y_true)
    )
    values = loss.call(y_true, y_pred)
    made = getattr(values, "_keras_mask", None)
    mask = ops.logical_and(given, made) if given is not None and made is not None else made if given is None else given
    return values, mask


def _term(loss: Any, values: Any, mask: Any, sample_weight: Any, share: Any) -> Term:
    reduction, dtype = loss.reduction, loss.dtype
    weighted = reduce_weighted_values(values, sample_weight=sample_weight, mask=mask, reduction=None, dtype=dtype)
    total, share = ops.sum(weighted), ops.cast(share, weighted.dtype)
    scale = share / _num_elements(weighted, weighted.dtype)  # 1 / c
    if reduction in NO_REDUCTION:
        return Term(total, share, total * scale, True, None)
    if reduction not in MEANS:  # "sum"
        return Term(total, share, total, True, None)
    mean = total * scale
    if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        weights = apply_mask(_as_float(sample_weight, dtype), mask, dtype=weighted.dtype, reduction=reduction)
        return Term(mean, ops.cast(ops.sum(weights), weighted.dtype) * scale, mean, False, None)
    if mask is None:
        return Term(mean, share, mean, True, None)
    valid = ops.sum(ops.cast(mask, weighted.dtype))
    return Term(mean, share * valid / _num_elements(mask, weighted.dtype), mean, False, None)


def _as_float(weights: Any, dtype: Any) -> Any:
    return None if weights is None else ops.convert_to_tensor(weights, dtype=dtype)


def _num_elements(tensor: Any, dtype: Any) -> Any:
    return ops.cast(ops.prod(ops.convert_to_tensor(ops.shape(tensor), dtype="int32")), dtype)


def flat_losses(model: Any) -> list[Any]:
    """Return the loss objects of a compiled and built model."""
    compiled = model._compile_loss
    return [] if compiled is None else [entry.loss for entry in compiled._flat_losses]


def added_losses(model: Any) -> list[Any]:
    """Return what layers added by ``add_loss`` and by regularizing activities in the last forward pass, as scalars."""
    layers = [model, *model._flatten_layers(include_self=False)]
    found = [loss for layer in layers for loss in layer._get_own_losses()]
    return [model._aggregate_additional_loss(loss) for loss in found]


def weight_losses(model: Any) -> list[Any]:
    """Return the losses of weight regularizers: they depend on no example, so an update has them once."""
    return [model._aggregate_additional_loss(loss) for loss in model._get_regularization_losses()]
