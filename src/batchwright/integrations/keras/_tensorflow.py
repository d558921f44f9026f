"""The TensorFlow engine: a piece and an update are one traced function each, and pieces add up in variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import keras
import tensorflow as tf

from ..._oom import is_out_of_memory
from ._losses import weight_losses
from ._parts import AddedKind, Figures, Layout, forward, log_losses, share_dtype, state_variables
from ._pieces import as_array


@final
class TensorFlowEngine:
    """Runs pieces and updates of a compiled model on TensorFlow.

    A piece is traced once per shape; TensorFlow relaxes shapes that vary, so there may be fewer traces. Adding and
    updating are traced once, or twice where gradients are sparse. Of embeddings the rows of all pieces are kept.

    Attributes:
        num_traces: how often a piece was traced, over all kinds of pieces; 0 where the model runs eagerly.
    """

    def __init__(self, model: Any, kinds: Sequence[AddedKind] | None = None) -> None:
        self._model = model
        self._kinds = kinds
        self._layout: Layout | None = None
        self._rows: list[Any] = []  # the gradients of the first piece, and the sparse ones of the others
        self._sums: Any = None  # variables, one per gradient, from the first batch that is cut
        self.num_traces = 0
        jit = model.jit_compile is True
        self._run = self._traced(self._run_piece, jit=jit)
        self._store = self._traced(self._store_sums)
        self._add = self._traced(self._add_sums)
        self._finish = self._traced(self._finish_update, jit=jit)

    def _traced(self, function: Callable[..., Any], *, jit: bool = False) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        traced: Callable[..., Any] = tf.function(function, autograph=False, reduce_retracing=True, jit_compile=jit)
        return traced

    def next_batch(self, iterator: Any) -> Any:
        """Return the next batch of an epoch's iterator, with absent parts as None."""
        data = next(iter(iterator))
        return keras.tree.map_structure(_read_leaf, data)

    def state(self) -> list[Any]:
        """Return what a piece changes besides gradients: metrics, seeds, statistics; nothing is copied."""
        return [variable.value.read_value() for variable in state_variables(self._model)]

    def restore(self, state: Sequence[Any]) -> None:
        """Put back what ``state`` returned."""
        for variable, value in zip(state_variables(self._model), state, strict=True):
            variable.assign(value)

    def values(self, state: Sequence[Any]) -> list[Any]:
        """Return a state as arrays, one per variable that a forward pass may change."""
        return [as_array(value) for value in state]

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is kept for gradients; TensorFlow keeps nothing outside of a tape."""
        return nullcontext()

    def run(self, piece: Any, num_examples: int) -> tuple[Any, Figures]:
        """Return the gradients of a piece and its figures."""
        gradients, figures = self._run(piece, tf.constant(num_examples, share_dtype()))
        return gradients, Figures(*figures)

    def _run_piece(self, piece: Any, num_examples: Any) -> Any:
        if not tf.executing_eagerly():
            self.num_traces += 1
        with tf.GradientTape(persistent=True) as tape:
            found = forward(self._model, piece, num_examples, self._kinds)
            objectives = [self._model.optimizer.scale_loss(value) for value in found.objectives]
        self._layout = found.layout
        weights = self._model.trainable_weights
        return [tape.gradient(value, weights) for value in objectives], found.figures

    def add(self, before: tuple[Any, Figures] | None, part: tuple[Any, Figures]) -> tuple[Any, Figures]:
        """Return the sum of the pieces so far; the first stays as it is, so that one piece costs nothing more."""
        if before is None:
            self._rows = [part[0]]
            return part
        (gradients, figures), (more, new) = before, part
        if gradients is not self._sums:
            self._keep(_dense_only(gradients))
        self._add(_dense_only(more))
        self._rows.append([[grad if _is_sparse(grad) else None for grad in grads] for grads in more])
        added = None if new.added is None else figures.added + new.added
        shown, weights = (
            [a + b for a, b in zip(*both, strict=True)] for both in zip(figures[:2], new[:2], strict=True)
        )
        return self._sums, Figures(shown, weights, added)

    def _keep(self, gradients: Any) -> None:
        if self._sums is None:
            with tf.init_scope():
                self._sums = [
                    [None if grad is None else tf.Variable(_wide(grad)) for grad in part] for part in gradients
                ]
        else:
            self._store(gradients)

    def _store_sums(self, gradients: Any) -> None:
        for variables, grads in zip(self._sums, gradients, strict=True):
            for variable, grad in zip(variables, grads, strict=True):
                if variable is not None:
                    variable.assign(tf.cast(grad, variable.dtype))

    def _add_sums(self, gradients: Any) -> None:
        for variables, grads in zip(self._sums, gradients, strict=True):
            for variable, grad in zip(variables, grads, strict=True):
                if variable is not None:
                    variable.assign_add(tf.cast(grad, variable.dtype))

    def _summed(self) -> list[list[Any]]:
        """Return the sums of all pieces: of dense gradients from their variables, of sparse ones all of their rows."""
        found = [[None if sum_ is None else sum_.read_value() for sum_ in sums] for sums in self._sums]
        for objective, grads in enumerate(self._rows[0]):
            for place, grad in enumerate(grads):
                if _is_sparse(grad):
                    found[objective][place] = _joined([part[objective][place] for part in self._rows])
        return found

    def finish(self, total: tuple[Any, Figures], num_examples: int) -> Any:
        """Apply one update from the sum of all pieces, and return the logs."""
        gradients, figures = total
        if gradients is self._sums:
            gradients = self._summed()
        self._rows = []
        return self._finish(gradients, tuple(figures), tf.constant(num_examples, share_dtype()))

    def _finish_update(self, gradients: Any, figures: Any, num_examples: Any) -> Any:
        model, layout, figures = self._model, self._layout, Figures(*figures)
        assert layout is not None
        weights = model.trainable_weights
        with tf.GradientTape() as tape:
            found = weight_losses(model)
            of_weights = tf.add_n(found) if found else None
            scaled = None if of_weights is None else model.optimizer.scale_loss(of_weights)
        more = [None] * len(weights) if scaled is None else tape.gradient(scaled, weights)
        divisors = layout.divisors(figures.weights)
        parts = [[_divided(grad, divisor) for grad in part] for part, divisor in zip(gradients, divisors, strict=True)]
        grads = [_added(list(found)) for found in zip(*parts, more, strict=True)]
        typed = [
            None if grad is None else tf.cast(grad, weight.dtype) for grad, weight in zip(grads, weights, strict=True)
        ]
        model.optimizer.apply_gradients(zip(typed, weights, strict=True))
        return log_losses(model, layout, figures, of_weights, num_examples)


def _is_sparse(grad: Any) -> bool:
    """Say whether a gradient is that of an embedding: values of some rows, of which one may come several times."""
    return isinstance(grad, tf.IndexedSlices)


def _dense_only(gradients: Any) -> list[list[Any]]:
    return [[None if _is_sparse(grad) else grad for grad in grads] for grads in gradients]


def _joined(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Return the rows of all pieces, not added up: so do optimizers of Keras see those of a whole batch."""
    values, indices = tf.concat([part.values for part in parts], 0), tf.concat([part.indices for part in parts], 0)
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def _divided(grad: Any, divisor: Any) -> Any:
    if grad is None or divisor is None:
        return grad
    if _is_sparse(grad):
        return tf.IndexedSlices(_divided(grad.values, divisor), grad.indices, grad.dense_shape)
    return tf.math.divide_no_nan(grad, tf.cast(divisor, grad.dtype))


def _added(grads: Sequence[Any]) -> Any:
    """Return the sum of the gradients of several objectives; sparse ones of the same lookups stay sparse."""
    found = [grad for grad in grads if grad is not None]
    if len(found) < 2:
        return found[0] if found else None
    if all(map(_is_sparse, found)):
        same = [tf.debugging.assert_equal(grad.indices, found[0].indices) for grad in found[1:]]
        with tf.control_dependencies([check for check in same if check is not None]):
            return tf.IndexedSlices(tf.add_n([grad.values for grad in found]), found[0].indices, found[0].dense_shape)
    total = tf.convert_to_tensor(found[0])
    for grad in found[1:]:
        total = total + tf.cast(tf.convert_to_tensor(grad), total.dtype)
    return total


def _wide(grad: Any) -> Any:
    return tf.cast(grad, tf.float32) if grad.dtype in (tf.float16, tf.bfloat16) else grad


def _read_leaf(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    is_tensor = isinstance(leaf, tf.Tensor | tf.SparseTensor | tf.RaggedTensor)
    return leaf if is_tensor else tf.convert_to_tensor(leaf)


def ran_out(error: BaseException) -> bool:
    """Say whether memory ran out; XLA says so in the text of other errors."""
    return is_out_of_memory(error) or (
        isinstance(error, tf.errors.OpError) and is_out_of_memory(RuntimeError(error.message))
    )


def refusals(model: Any) -> list[str]:
    """Return what TensorFlow's part of a model has that pieces of a batch cannot keep exact."""
    found = []
    if model._distribute_strategy is not None or tf.distribute.has_strategy():
        found.append(
            "a tf.distribute strategy divides each batch over replicas, which would divide their losses by their own "
            "weights; train without one, or plan the batches per worker"
        )
    return found
