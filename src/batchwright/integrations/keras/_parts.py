"""One piece of a batch forward, what of it is differentiated, and how the gradients of all pieces become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final

import keras
from keras import ops

from ...errors import ArgumentError
from ._losses import NO_REDUCTION, Term, added_losses, flat_losses, read_terms, weight_losses
from ._pieces import leaves

# How a loss that a layer adds belongs to its piece: a mean over its rows, or a sum over them.
AddedKind: TypeAlias = Literal["mean", "sum"]


class Figures(NamedTuple):
    """What the pieces of a batch add up besides gradients: a value per loss, its weight, and what layers added."""

    shown: list[Any]
    weights: list[Any]
    added: Any


@final
@dataclass(frozen=True)
class Layout:
    """Which losses of a model share a gradient.

    All losses whose divisor is known, and everything that layers add, have one gradient. A loss whose divisor is known
    only after the last piece, such as a masked one, has a gradient of its own, divided at the end.

    Attributes:
        known: per loss, whether its divisor is known.
        factors: per loss, its weight in ``compile``.
        has_added: whether layers add losses.
    """

    known: tuple[bool, ...]
    factors: tuple[Any, ...]
    has_added: bool

    def divisors(self, weights: Sequence[Any]) -> list[Any]:
        """Return what each gradient is divided by, None for nothing."""
        common = [None] if self.has_added or any(self.known) else []
        return common + [weight for weight, known in zip(weights, self.known, strict=True) if not known]

    def losses(self, figures: Figures) -> list[Any]:
        """Return the losses of the whole batch, without their factors."""
        parts = zip(figures.shown, figures.weights, self.known, strict=True)
        return [shown if known else ops.divide_no_nan(shown, weight) for shown, weight, known in parts]

    def total(self, figures: Figures) -> Any:
        """Return the loss of the whole batch, without that of the weights."""
        values = [_times(value, factor) for value, factor in zip(self.losses(figures), self.factors, strict=True)]
        return _sum([*values, *([figures.added] if self.has_added else [])])


class Forward(NamedTuple):
    """What a piece gives before it is differentiated."""

    objectives: list[Any]
    figures: Figures
    layout: Layout


def share_dtype() -> str:
    """Return the type in which shares of a batch are computed: wide enough for the losses."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


def forward(model: Any, piece: Any, num_examples: Any, kinds: Sequence[AddedKind] | None) -> Forward:
    """Run a piece through the model, count its examples in the metrics, and return what to differentiate.

    Args:
        model: compiled and built.
        piece: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
        num_examples: rows of the whole batch, as a scalar of ``share_dtype``.
        kinds: of the losses that layers add, in their order; None takes all of them as means.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(piece)
    y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
    share = ops.cast(ops.shape(leaves(x)[0])[0], share_dtype()) / num_examples
    terms = read_terms(model, y, y_pred, sample_weight, share)
    added = [
        value if kind == "sum" else value * ops.cast(share, value.dtype)
        for value, kind in _with_kinds(added_losses(model), kinds)
    ]
    if len(terms) + len(added) + len(weight_losses(model)) > 1 and any(
        loss.reduction in NO_REDUCTION for loss in flat_losses(model)
    ):
        raise ArgumentError("a loss without reduction cannot be added to other losses; give it a reduction")
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(y, y_pred, sample_weight)
    known = tuple(term.is_known for term in terms)
    layout = Layout(known, tuple(term.factor for term in terms), bool(added))
    figures = Figures([term.shown for term in terms], [term.weight for term in terms], _sum(added) if added else None)
    return Forward(_objectives(terms, added), figures, layout)


def _with_kinds(values: Sequence[Any], kinds: Sequence[AddedKind] | None) -> list[tuple[Any, AddedKind]]:
    return list(zip(values, ["mean"] * len(values) if kinds is None else kinds, strict=True))


def _objectives(terms: Sequence[Term], added: Sequence[Any]) -> list[Any]:
    common = [_times(term.total, term.factor) for term in terms if term.is_known] + list(added)
    own = [_times(term.total, term.factor) for term in terms if not term.is_known]
    return ([_sum(common)] if common else []) + own


def log_losses(model: Any, layout: Layout, figures: Figures, of_weights: Any, num_examples: Any) -> dict[str, Any]:
    """Count the losses of a whole batch in the model's metrics, once, and return the logs of the batch."""
    total = layout.total(figures)
    model._loss_tracker.update_state(total if of_weights is None else total + of_weights, sample_weight=num_examples)
    values = layout.losses(figures)
    metrics = [] if model._compile_loss is None else model._compile_loss.metrics
    # Of several losses for one output Keras counts the first, and logs none of them.
    for metric, value in zip(metrics, values, strict=True) if len(metrics) == len(values) else ():
        metric.update_state(value, sample_weight=num_examples)
    logs: dict[str, Any] = model.get_metrics_result()
    return logs


def state_variables(model: Any) -> list[Any]:
    """Return the variables of a model that a forward pass may change, each once: metrics, seeds, statistics.

    Frozen weights are none of them, and may be large.
    """
    frozen = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
    found = {id(variable): variable for variable in [*model.non_trainable_variables, *model.metrics_variables]}
    return [variable for key, variable in found.items() if key not in frozen]


def _times(value: Any, factor: Any) -> Any:
    return value if factor is None else ops.multiply(value, factor)


def _sum(values: Sequence[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + ops.cast(value, total.dtype)
    return total
