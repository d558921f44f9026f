"""What keeps a Keras model from exact updates in pieces whatever its examples are: settings, layers, state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ...errors import ArgumentError
from ._parts import state_variables

# Methods that hold a training step of the user's own; pieces would leave out what it does.
_OWN_STEP = ("train_step", "compute_loss", "_compute_loss", "compute_metrics", "make_train_function")


def check_model(model: Any) -> None:
    """Refuse a model whose steps cannot run in pieces whatever the data are."""
    if not isinstance(model, keras.Model):
        raise ArgumentError(f"adaptive takes a keras.Model, got {type(model).__name__}")
    own = [name for name in _OWN_STEP if getattr(type(model), name) is not getattr(keras.Model, name)]
    own += [name for name in _OWN_STEP if name in vars(model)]
    if own:
        raise ArgumentError(
            f"{type(model).__name__} has its own {own[0]}, which nobody can cut into pieces; give compile() a loss and "
            "metrics, use add_loss for more terms, or train without adaptive()"
        )


def check_compiled(model: Any, refusals: Sequence[str]) -> None:
    """Refuse what a compiled model was told that pieces of a batch cannot keep.

    Args:
        model: compiled.
        refusals: of the backend.
    """
    found = list(refusals)
    if model.steps_per_execution != 1:
        found.append(
            f"steps_per_execution is {model.steps_per_execution}: several updates in one call cannot be repeated when "
            "one runs out of memory; pass steps_per_execution=1 to compile()"
        )
    if keras.distribution.distribution() is not None:
        found.append("keras.distribution divides batches over devices; train without a distribution")
    if found:
        raise ArgumentError(f"adaptive updates are not possible: {found[0]}")


def check_weights(model: Any) -> None:
    """Refuse a built model that has nothing to train, or weights whose gradients do not add up."""
    if model.optimizer is None or not model.trainable_weights:
        raise ArgumentError("there is nothing to train: the model needs an optimizer and trainable weights")
    if any(getattr(weight, "overwrite_with_gradient", False) for weight in model.trainable_weights):
        raise ArgumentError(
            "weights that are overwritten with their gradient, as float8 scales are, do not add up over pieces"
        )


def check_layers(model: Any, *, per_piece: bool) -> None:
    """Refuse layers that make an example depend on the others of its piece, or on the piece before it.

    Args:
        model: built.
        per_piece: whether the user takes statistics of pieces.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) and hasattr(layer, "reset_state") and not isinstance(layer, keras.Metric):
            raise ArgumentError(f"layer {layer.name} is stateful: its state belongs to the rows of a whole batch")
        is_norm = isinstance(layer, keras.layers.BatchNormalization)
        if is_norm and layer.trainable and not per_piece:
            raise ArgumentError(
                f"layer {layer.name} normalises by the statistics of what runs at once, so an update in pieces would "
                "be another one; freeze it (layer.trainable = False), use LayerNormalization or GroupNormalization, "
                'or take statistics of pieces with batch_statistics="per_piece"'
            )
    known = [model._loss_tracker, model._compile_metrics]
    known += [] if model._compile_loss is None else model._compile_loss.metrics
    own = [metric for metric in model.metrics if not any(metric is other for other in known)]
    if own:
        raise ArgumentError(
            f"the metric {own[0].name} is updated by a layer in its call, once per piece, so pieces would count as "
            "batches; give metrics to compile()"
        )


def check_state(model: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Refuse a model that changed state in a piece, other than its random seeds and metrics.

    Args:
        model: built.
        before: the values of ``state_variables`` before the piece.
        after: the values now.
    """
    seeds = {id(seed.state) for layer in model._flatten_layers() for seed in getattr(layer, "_seed_generators", ())}
    metrics = {id(variable) for variable in model.metrics_variables}
    for variable, old, new in zip(state_variables(model), before, after, strict=True):
        if id(variable) in seeds or id(variable) in metrics or np.array_equal(old, new):
            continue
        raise ArgumentError(
            f"the forward pass changes {variable.path}, so pieces of a batch would change it several times; freeze the "
            'layer, or accept a change per piece with batch_statistics="per_piece"'
        )
