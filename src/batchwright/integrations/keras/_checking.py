"""What keeps a Keras model from exact updates in pieces: settings that are refused, and a trial on a few examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from ...errors import ArgumentError
from ._losses import added_losses, flat_losses, loss_values, replaced_losses
from ._parts import AddedKind, state_variables
from ._pieces import as_array, leaves, take_rows

# Methods that hold a training step of the user's own; pieces would leave out what it does.
_OWN_STEP = ("train_step", "compute_loss", "_compute_loss", "compute_metrics", "make_train_function")
# Rows that a trial runs: one by itself and the rest together, so that means and sums differ.
_NUM_TRIED = 4
# Relative differences that rounding explains: kernels differ with the number of rows.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}


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


def try_pieces(model: Any, data: Any, num: int, *, added: AddedKind | None) -> tuple[AddedKind, ...]:
    """Run a few examples whole and in two pieces, and refuse what does not add up; return the kinds of added losses.

    The model runs without training behaviour. The caller puts back metrics and seeds.

    Args:
        model: compiled and built.
        data: a batch of at least two examples.
        num: rows of the batch.
        added: the kind of all losses that layers add, if the user has said it.
    """
    rows = min(num, _NUM_TRIED)
    whole, first, rest = (_run(model, take_rows(data, *part)) for part in ((0, rows), (0, 1), (1, rows)))
    tolerance = max(_TOLERANCE.get(layer.compute_dtype, 1e-3) for layer in model._flatten_layers())
    _check_outputs(whole[0], first[0], rest[0], tolerance)
    _check_losses(model, data, whole[0], rows, tolerance)
    kinds = _added_kinds(whole[1], first[1], rest[1], rows, added, tolerance)
    _check_metrics(model, data, (whole[0], first[0], rest[0]), rows, tolerance)
    return kinds


def _run(model: Any, part: Any) -> tuple[Any, list[float]]:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(part)
    outputs = model(x, training=False) if model._call_has_training_arg else model(x)
    return outputs, [float(as_array(loss)) for loss in added_losses(model)]


def _as_arrays(value: Any) -> list[Any]:
    return [as_array(leaf) for leaf in leaves(value)]


def _are_close(first: Any, second: Any, tolerance: float) -> bool:
    """Say whether rounding explains the difference, relative to the largest value."""
    scale = max(float(np.max(np.abs(first), initial=0.0)), 1e-6)
    return first.shape == second.shape and bool(
        np.allclose(first, second, rtol=0, atol=tolerance * scale, equal_nan=True)
    )


def _check_outputs(whole: Any, first: Any, rest: Any, tolerance: float) -> None:
    for one, *parts in zip(*map(_as_arrays, (whole, first, rest)), strict=True):
        if one.ndim == 0 or not _are_close(one, np.concatenate(parts), tolerance):
            raise ArgumentError(
                "the outputs of the model for an example depend on the other examples of its batch, so pieces would "
                "give another update; let the batch run whole"
            )


def _check_losses(model: Any, data: Any, outputs: Any, rows: int, tolerance: float) -> None:
    """Compare the values of every loss on all rows with those on parts of them."""
    if model._compile_loss is None:
        return
    _, y, _ = keras.utils.unpack_x_y_sample_weight(take_rows(data, 0, rows))
    found = [_values(model, y, outputs, start, stop) for start, stop in ((0, rows), (0, 1), (1, rows))]
    for loss, whole, first, rest in zip(flat_losses(model), *found, strict=True):
        if not _are_close(whole, np.concatenate([first, rest]), tolerance):
            raise ArgumentError(
                f"the loss {loss.name} of an example depends on the other examples of its batch, so pieces would give "
                "another update; let the batch run whole"
            )


def _values(model: Any, y: Any, outputs: Any, start: int, stop: int) -> list[Any]:
    """Return the values of every loss on some rows, before weights and reduction."""
    found: list[Any] = []

    def recorder(entry: Any) -> Callable[..., Any]:
        def record(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            values, _ = loss_values(entry.loss, y_true, y_pred)
            if len(values.shape) == 0:
                raise ArgumentError(
                    f"the loss {entry.loss.name} returns one number per batch, so nobody can tell how pieces "
                    "of a batch add up; return one value per example, and let its reduction make the mean"
                )
            found.append(as_array(values))
            return ops.sum(values)

        return record

    with replaced_losses(model._compile_loss, recorder):
        model._compile_loss(take_rows(y, start, stop), take_rows(outputs, start, stop))
    if any(len(values) != stop - start for values in found):
        raise ArgumentError("a loss must return one value, or one row of values, per example")
    return found


def _added_kinds(
    whole: Sequence[float],
    first: Sequence[float],
    rest: Sequence[float],
    rows: int,
    added: AddedKind | None,
    tolerance: float,
) -> tuple[AddedKind, ...]:
    if added is not None:
        return (added,) * len(whole)
    kinds: list[AddedKind] = []
    for one, alone, others in zip(whole, first, rest, strict=True):
        near = tolerance * max(abs(one), abs(alone), abs(others))
        is_mean = abs(one - (alone + (rows - 1) * others) / rows) <= near
        is_sum = abs(one - (alone + others)) <= near
        if is_mean == is_sum:
            raise ArgumentError(
                "a layer adds a loss of which a trial could not tell whether it is a mean or a sum over the examples "
                f"({one:g} for {rows} examples, {alone:g} and {others:g} for parts of them); pass "
                'added_losses="mean" or added_losses="sum" to adaptive()'
            )
        kinds.append("mean" if is_mean else "sum")
    return tuple(kinds)


def _check_metrics(model: Any, data: Any, outputs: Sequence[Any], rows: int, tolerance: float) -> None:
    """Compare the metrics of ``compile`` after all rows with those after parts of them."""
    metrics = model._compile_metrics
    if metrics is None:
        return
    found = []
    for parts in (((0, rows, outputs[0]),), ((0, 1, outputs[1]), (1, rows, outputs[2]))):
        metrics.reset_state()
        for start, stop, y_pred in parts:
            _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(take_rows(data, start, stop))
            metrics.update_state(y, y_pred, sample_weight)
        found.append({name: as_array(value) for name, value in metrics.result().items()})
    for name, whole in found[0].items():
        if not _are_close(whole, found[1][name], tolerance):
            raise ArgumentError(
                f"the metric {name} is {whole} after a batch and {found[1][name]} after its pieces; return one value "
                "per example from it, or keep it for evaluate()"
            )
