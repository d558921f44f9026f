"""A trial of a few examples, whole and in two pieces: what does not add up is refused before a batch is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import keras
import numpy as np
from keras import ops

from ...errors import ArgumentError
from ._losses import added_losses, check_own_call, flat_losses, loss_values, replaced_losses
from ._parts import AddedKind
from ._pieces import as_array, leaves, take_rows

# Relative differences that rounding explains: kernels differ with the number of rows.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}


class _Run(NamedTuple):
    """What some rows gave: outputs, and the losses that layers added."""

    outputs: Any
    added: list[float]


@final
class Trial:
    """Runs a few examples whole and in two pieces, and refuses what does not add up.

    A model that draws nothing at random in training runs as in training. Another one runs as outside of it, where an
    example gives the same outputs twice. The caller puts back metrics, seeds and statistics.

    Args:
        model: compiled and built.
        data: a batch.
        rows: how many of its rows to run, at least 2: one by itself and the rest together, so that means and sums
            differ.
        per_piece: whether the user takes statistics of pieces, which change what examples give in training.
    """

    def __init__(self, model: Any, data: Any, rows: int, *, per_piece: bool) -> None:
        self._model, self._data, self._rows = model, data, rows
        self._tolerance = max(_TOLERANCE.get(layer.compute_dtype, 1e-3) for layer in model._flatten_layers())
        training, again = self._run(0, rows, training=True), self._run(0, rows, training=True)
        self._num_added = len(training.added)
        self._in_training = not per_piece and self._is_same(training, again)
        self._whole = training if self._in_training else self._repeatable()
        self._first, self._rest = (self._run(*part, training=self._in_training) for part in ((0, 1), (1, rows)))

    def _run(self, start: int, stop: int, *, training: bool) -> _Run:
        model = self._model
        x, _, _ = keras.utils.unpack_x_y_sample_weight(take_rows(self._data, start, stop))
        outputs = model(x, training=training) if model._call_has_training_arg else model(x)
        return _Run(outputs, [float(as_array(loss)) for loss in added_losses(model)])

    def _is_same(self, one: _Run, other: _Run) -> bool:
        pairs = zip(_as_arrays((one.outputs, *one.added)), _as_arrays((other.outputs, *other.added)), strict=True)
        return all(_are_close(first, second, self._tolerance) for first, second in pairs)

    def _repeatable(self) -> _Run:
        found = self._run(0, self._rows, training=False)
        if not self._is_same(found, self._run(0, self._rows, training=False)):
            raise ArgumentError(
                "the model draws at random outside of training too, so a trial cannot tell whether pieces of a batch "
                "add up; draw only where training is true, or let the batch run whole"
            )
        return found

    def check(self, added: AddedKind | None) -> tuple[AddedKind, ...]:
        """Refuse outputs, losses and metrics that do not add up, and return the kinds of added losses.

        Args:
            added: the kind of all losses that layers add, if the user has said it.
        """
        self._check_outputs()
        self._check_losses()
        kinds = self._added_kinds(added)
        self._check_metrics()
        return kinds

    def _check_outputs(self) -> None:
        for whole, *parts in zip(*(_as_arrays(run.outputs) for run in self._runs), strict=True):
            if whole.ndim == 0 or not _are_close(whole, np.concatenate(parts), self._tolerance):
                raise ArgumentError(
                    "the outputs of the model for an example depend on the other examples of its batch, so pieces "
                    "would give another update; let the batch run whole"
                )

    @property
    def _runs(self) -> tuple[_Run, _Run, _Run]:
        return self._whole, self._first, self._rest

    def _check_losses(self) -> None:
        """Compare the values of every loss on all rows with those on parts of them."""
        if self._model._compile_loss is None:
            return
        rows = self._rows
        found = [self._values(start, stop) for start, stop in ((0, rows), (0, 1), (1, rows))]
        for loss, whole, first, rest in zip(flat_losses(self._model), *found, strict=True):
            if not _are_close(whole, np.concatenate([first, rest]), self._tolerance):
                raise ArgumentError(
                    f"the loss {loss.name} of an example depends on the other examples of its batch, so pieces would "
                    "give another update; let the batch run whole"
                )

    def _values(self, start: int, stop: int) -> list[Any]:
        """Return the values of every loss on some rows, before weights and reduction."""
        found: list[Any] = []
        compiled = self._model._compile_loss
        _, y, _ = keras.utils.unpack_x_y_sample_weight(take_rows(self._data, start, stop))
        with replaced_losses(compiled, lambda entry: _recorder(entry.loss, found)):
            compiled(y, take_rows(self._whole.outputs, start, stop))
        if any(len(values) != stop - start for values in found):
            raise ArgumentError("a loss must return one value, or one row of values, per example")
        return found

    def _added_kinds(self, added: AddedKind | None) -> tuple[AddedKind, ...]:
        if added is not None:
            return (added,) * self._num_added
        if self._num_added != len(self._whole.added):
            raise ArgumentError(
                f"layers add {self._num_added} losses in training and {len(self._whole.added)} outside of it, and what "
                'is drawn at random hides whether they are means or sums over the examples; pass added_losses="mean" '
                'or added_losses="sum" to adaptive()'
            )
        parts = zip(self._whole.added, self._first.added, self._rest.added, strict=True)
        return tuple(_added_kind(*values, rows=self._rows, tolerance=self._tolerance) for values in parts)

    def _check_metrics(self) -> None:
        """Compare the metrics of ``compile`` after all rows with those after parts of them.

        A model that has learned nothing may score the same in every piece, so outputs that are right for every second
        row are tried too.
        """
        if self._model._compile_metrics is None:
            return
        self._compare_metrics([run.outputs for run in self._runs])
        _, y, _ = keras.utils.unpack_x_y_sample_weight(take_rows(self._data, 0, self._rows))
        made = _half_right(y, self._whole.outputs)
        if made is not None:
            self._compare_metrics([made, take_rows(made, 0, 1), take_rows(made, 1, self._rows)])

    def _compare_metrics(self, outputs: Sequence[Any]) -> None:
        metrics, rows, found = self._model._compile_metrics, self._rows, []
        for parts in (((0, rows, outputs[0]),), ((0, 1, outputs[1]), (1, rows, outputs[2]))):
            metrics.reset_state()
            for start, stop, y_pred in parts:
                _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(take_rows(self._data, start, stop))
                with _one_value_per_row(metrics, stop - start):
                    metrics.update_state(y, y_pred, sample_weight)
            found.append({name: as_array(value) for name, value in metrics.result().items()})
        for name, whole in found[0].items():
            if not _are_close(whole, found[1][name], self._tolerance):
                raise ArgumentError(
                    f"the metric {name} is {whole} after a batch and {found[1][name]} after its pieces; return one "
                    "value per example from it, or keep it for evaluate()"
                )


def _as_arrays(value: Any) -> list[Any]:
    return [as_array(leaf) for leaf in leaves(value)]


def _are_close(first: Any, second: Any, tolerance: float) -> bool:
    """Say whether rounding explains the difference, relative to the largest value."""
    scale = max(float(np.max(np.abs(first), initial=0.0)), 1e-6)
    return first.shape == second.shape and bool(
        np.allclose(first, second, rtol=0, atol=tolerance * scale, equal_nan=True)
    )


def _recorder(loss: Any, found: list[Any]) -> Callable[..., Any]:
    """Return what stands in for a loss and notes its values."""

    def record(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        check_own_call(loss)
        values, _ = loss_values(loss, y_true, y_pred)
        if len(values.shape) == 0:
            raise ArgumentError(
                f"the loss {loss.name} returns one number per batch, so nobody can tell how pieces "
                "of a batch add up; return one value per example, and let its reduction make the mean"
            )
        found.append(as_array(values))
        return ops.sum(values)

    return record


def _added_kind(whole: float, first: float, rest: float, *, rows: int, tolerance: float) -> AddedKind:
    near = tolerance * max(abs(whole), abs(first), abs(rest))
    is_mean = abs(whole - (first + (rows - 1) * rest) / rows) <= near
    is_sum = abs(whole - (first + rest)) <= near
    if is_mean == is_sum:
        raise ArgumentError(
            "a layer adds a loss of which a trial could not tell whether it is a mean or a sum over the examples "
            f"({whole:g} for {rows} examples, {first:g} and {rest:g} for parts of them); pass "
            'added_losses="mean" or added_losses="sum" to adaptive()'
        )
    return "mean" if is_mean else "sum"


@contextmanager
def _one_value_per_row(metrics: Any, rows: int) -> Iterator[None]:
    """Refuse metrics made of functions that return one number per batch: Keras averages these per update of a state."""
    wrapped = [one for one in metrics.metrics if isinstance(one, keras.metrics.MeanMetricWrapper)]
    functions = [one._fn for one in wrapped]
    for one, function in zip(wrapped, functions, strict=True):
        one._fn = _checked(one.name, function, rows)
    try:
        yield
    finally:
        for one, function in zip(wrapped, functions, strict=True):
            one._fn = function


def _checked(name: str, function: Callable[..., Any], rows: int) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        values = function(*args, **options)
        if len(values.shape) == 0 or int(values.shape[0]) != rows:
            raise ArgumentError(
                f"the metric {name} returns values of shape {tuple(values.shape)} for {rows} examples, so pieces would "
                "count as batches; return one value per example from it, or keep it for evaluate()"
            )
        return values

    return call


def _half_right(y: Any, outputs: Any) -> Any:
    """Return outputs that are right in every second row and wrong in the others; None where nobody knows what is."""
    targets, places = leaves(y), leaves(outputs)
    if len(targets) != len(places):
        return None
    made = [_half_right_leaf(as_array(one), as_array(other)) for one, other in zip(targets, places, strict=True)]
    if any(leaf is None for leaf in made):
        return None
    found = [ops.convert_to_tensor(leaf, dtype=other.dtype) for leaf, other in zip(made, places, strict=True)]
    return keras.tree.pack_sequence_as(outputs, found)


def _half_right_leaf(y: Any, output: Any) -> Any:
    if y.shape == output.shape or (y.shape == output.shape[:-1] and output.shape[-1] == 1):
        right = y.reshape(output.shape)
        wrong = 1 - right if right.min(initial=0) >= 0 and right.max(initial=0) <= 1 else right + 1
    elif y.size == output[..., 0].size:  # the number of a class
        right = np.eye(output.shape[-1])[y.astype(np.int64).reshape(output.shape[:-1]) % output.shape[-1]]
        wrong = np.roll(right, 1, axis=-1)
    else:
        return None
    is_odd = (np.arange(len(y)) % 2 == 1).reshape(-1, *(1,) * (output.ndim - 1))
    return np.where(is_odd, right, wrong)
