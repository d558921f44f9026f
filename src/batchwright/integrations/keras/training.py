"""adaptive(model): one exact update per batch in Keras, run in pieces that fit, and again in smaller ones if not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal, TypeVar, final

import keras
import numpy as np

from ..._checks import as_state, check_choice, check_same, read_number
from ...errors import ArgumentError, DoesNotFitError, UpdateMemoryError
from ._checking import check_compiled, check_layers, check_model, check_state, check_weights
from ._parts import AddedKind
from ._pieces import LengthsOf, MicroBatch, PieceSizes, bounds, leaves, num_rows, padded_lengths, take_rows
from ._trial import Trial

Model = TypeVar("Model")

# Rows that a trial runs together, and fewer where these run out of memory.
_NUM_TRIED = (4, 2)
_ENGINES = {"tensorflow": ("._tensorflow", "TensorFlowEngine"), "torch": ("._torch", "TorchEngine")}


@final
@dataclass(frozen=True)
class UpdateReport:
    """What the last update was.

    Attributes:
        batch_size: examples of the update.
        sizes: examples of each piece, in order.
        ooms: how often a piece ran out of memory before all of them ran.
        memory_fraction: the share of memory at the peak; None without ``memory=``.
    """

    batch_size: int
    sizes: tuple[int, ...]
    ooms: int = 0
    memory_fraction: float | None = None

    @property
    def num_micro_batches(self) -> int:
        """Return the number of pieces."""
        return len(self.sizes)


def adaptive(
    model: Model,
    *,
    micro_batch: MicroBatch = "auto",
    lengths: LengthsOf | None = None,
    memory: Any = None,
    on_oom: Literal["split", "raise"] = "split",
    added_losses: AddedKind | None = None,
    batch_statistics: Literal["refuse", "per_piece"] = "refuse",
) -> Model:
    """Let ``fit`` and ``train_on_batch`` of a model run every batch in pieces that fit, with one exact update.

    The gradient is that of the whole batch, whatever the pieces: every example, every sample weight and every token
    that is not masked counts once, for every reduction of a loss. ``Σ S / Σ D`` is what an update descends, with ``S``
    the weighted sum of the losses of a piece and ``D`` what its reduction divides by. Losses of weights and what
    layers add count once too. Everything else in ``fit`` stays as it is: callbacks, validation, metrics, the optimizer
    with its clipping, averaging, loss scaling and accumulation. ``evaluate`` and ``predict`` are left alone.

    A piece that runs out of memory is halved, and the batch runs again from its beginning: metrics, random seeds and
    statistics are put back first, so the update is the one that smaller pieces would have given from the start.

    ``model.batchwright`` is the ``AdaptiveUpdates`` behind it. A saved model is an ordinary one; after loading, call
    ``adaptive`` again.

    Args:
        model: a ``keras.Model`` on TensorFlow or torch, compiled now or later; changed in place.
        micro_batch: the most examples of a piece; a budget, such as ``MaxTokens(8192)``, counted on padded lengths;
            a controller or anything with ``.size``; ``"auto"`` for whole batches until one runs out of memory.
        lengths: ``lengths(x)`` gives the padded length of the inputs, or one per axis; by default axis 1 of the first.
        memory: a memory source, such as ``TensorFlowMemory``; a controller of pieces observes the share at the peak.
        on_oom: ``"raise"`` hands an out-of-memory error on.
        added_losses: whether losses from ``add_loss`` are means or sums over examples; None lets a trial tell.
        batch_statistics: ``"per_piece"`` lets BatchNormalization use the statistics of pieces, which is another update.

    Returns:
        The model.

    Raises:
        ArgumentError: the backend, the model or an argument does not allow exact updates in pieces; said here, when
            training begins, or before the first batch that is cut.

    Example::

        model.compile("adam", "mse")
        adaptive(model, micro_batch=bw.MaxTokens(8192)).fit(x, y, batch_size=512)
    """
    backend = keras.config.backend()
    if backend not in _ENGINES:
        raise ArgumentError(
            f"adaptive runs on the TensorFlow and torch backends of Keras, not on {backend}: its training step is one "
            "compiled function that cannot be run again in smaller pieces; planned batches work, PlannedDataset"
        )
    check_choice("on_oom", on_oom, ("split", "raise"))
    check_choice("added_losses", added_losses, (None, "mean", "sum"))
    check_choice("batch_statistics", batch_statistics, ("refuse", "per_piece"))
    previous = getattr(model, "batchwright", None)
    if previous is not None:
        previous.detach()
    check_model(model)
    settings = _Settings(lengths, memory, on_oom, added_losses, batch_statistics == "per_piece")
    AdaptiveUpdates(model, PieceSizes(micro_batch), settings).attach()
    return model


@final
@dataclass(frozen=True)
class _Settings:
    lengths: LengthsOf | None
    memory: Any
    on_oom: str
    added: AddedKind | None
    per_piece: bool


@final
class AdaptiveUpdates:
    """The updates of a model that ``adaptive`` changed; ``model.batchwright``.

    Attributes:
        report: of the last update, None before the first.
    """

    def __init__(self, model: Any, sizes: PieceSizes, settings: _Settings) -> None:
        self._model = model
        self._sizes = sizes
        self._settings = settings
        self._module: Any = import_module(_ENGINES[keras.config.backend()][0], __package__)
        self._engine: Any = None
        self._is_tried = False
        self._trained: tuple[int, ...] = ()  # which weights the engine trains
        self._num_before = (0, 0)  # traces and shapes of engines that are gone
        self._shapes: set[Any] = set()
        self.report: UpdateReport | None = None

    @property
    def num_traces(self) -> int:
        """Return how often TensorFlow traced a piece; 0 on torch and where the model runs eagerly."""
        return self._num_before[0] + (0 if self._engine is None else int(self._engine.num_traces))

    @property
    def num_shapes(self) -> int:
        """Return how many different shapes and types pieces had; there are never more traces than shapes.

        What is compiled again is traced again, so its shapes count again.
        """
        return self._num_before[1] + len(self._shapes)

    def attach(self) -> None:
        """Take over the training function of the model."""
        self._model.batchwright = self
        self._model.make_train_function = self._make_train_function
        self._model.train_function = None

    def detach(self) -> None:
        """Give the model its own training function back."""
        for name in ("make_train_function", "batchwright"):
            delattr(self._model, name)
        self._model.train_function = None

    def state_dict(self) -> dict[str, Any]:
        """Return what memory has taught, as JSON values: the limit of a piece in padded tokens, None for none."""
        learned = self._sizes.learned
        finite = {"limit": learned.limit, "failed_at": learned.failed_at}
        return {
            "version": 1,
            **{name: value if np.isfinite(value) else None for name, value in finite.items()},
            "num_clean": learned.num_clean,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what another run learned."""
        state = as_state(state, of="AdaptiveUpdates", needs=("version", "limit", "failed_at", "num_clean"))
        check_same("version", state["version"], 1)
        limit, failed_at = (
            float("inf") if state[name] is None else read_number(state, name, above=0)
            for name in ("limit", "failed_at")
        )
        num_clean = int(read_number(state, "num_clean", least=0))
        self._sizes.learned = replace(self._sizes.learned, limit=limit, failed_at=failed_at, num_clean=num_clean)

    def _make_train_function(self, force: bool = False) -> Any:
        """Stand in for the method of the model that ``fit`` calls before it trains."""
        if self._model.train_function is not None and not force:
            return self._model.train_function
        check_compiled(self._model, self._module.refusals(self._model))
        self._begin(None)
        self._model.train_function = self._train
        return self._model.train_function

    def _begin(self, kinds: tuple[AddedKind, ...] | None) -> None:
        self._num_before, self._shapes = (self.num_traces, self.num_shapes), set()
        self._is_tried = False
        self._trained = _ids(self._model.trainable_weights)
        self._engine = getattr(self._module, _ENGINES[keras.config.backend()][1])(self._model, kinds)

    def _train(self, source: Any) -> Any:
        """Run one update on the next batch; what ``fit`` calls per step."""
        data = self._engine.next_batch(source)
        num, settings = num_rows(data), self._settings
        self._build(data)
        lengths = padded_lengths(_unpacked(data)[0], settings.lengths)
        if settings.memory is not None:
            settings.memory.reset_peak()
        total, sizes, ooms = self._run_until_it_fits(data, num, lengths)
        logs = self._finish(total, num)
        fraction = None if settings.memory is None else settings.memory.peak_bytes / settings.memory.total_bytes
        self.report = UpdateReport(num, sizes, ooms, fraction)
        self._learn(self.report)
        return logs

    def _build(self, data: Any) -> None:
        """Build the model, its losses, metrics and optimizer, where Keras leaves that to the first step."""
        parts = (self._model, self._model._compile_loss, self._model._compile_metrics, self._model.optimizer)
        if not all(part is None or part.built for part in parts):
            self._model._symbolic_build(data_batch=keras.utils.pack_x_y_sample_weight(*_unpacked(data)))
        if _ids(self._model.trainable_weights) != self._trained:  # built just now, frozen, or no longer frozen
            self._begin(None)
        check_weights(self._model)

    def _run_until_it_fits(self, data: Any, num: int, lengths: tuple[int, ...]) -> tuple[Any, tuple[int, ...], int]:
        state, ooms = self._engine.state(), 0
        while True:
            most = self._sizes.most(num, lengths)
            if most < num and not self._is_tried:
                self._try(data, num, state)
            try:
                return *self._run(data, num, most, state), ooms
            except Exception as error:
                self._engine.restore(state)
                if self._settings.on_oom == "raise" or not self._module.ran_out(error):
                    raise
                if most == 1:
                    raise DoesNotFitError(
                        f"one example of padded length {lengths} runs out of memory by itself; use shorter examples or "
                        "a smaller model"
                    ) from error
                self._fall(most, lengths)
                ooms += 1

    def _run(self, data: Any, num: int, most: int, state: Any) -> tuple[Any, tuple[int, ...]]:
        total, sizes = None, []
        for start, stop in bounds(num, most):
            piece = data if most >= num else take_rows(data, start, stop)
            self._shapes.add(tuple((str(leaf.dtype), *leaf.shape) for leaf in leaves(piece)))
            part = self._engine.run(piece, num)
            if most < num and start == 0 and not self._is_tried:
                self._check_state(state)
            total = self._engine.add(total, part)
            sizes.append(stop - start)
        return total, tuple(sizes)

    def _try(self, data: Any, num: int, state: Any) -> None:
        """Check once, before a batch is cut for the first time, that pieces of this model and these data add up."""
        check_layers(self._model, per_piece=self._settings.per_piece)
        kinds = self._tried(data, num, state)
        if "sum" in kinds:  # until now every batch ran whole, where a sum and a mean are alike
            self._begin(kinds)

    def _tried(self, data: Any, num: int, state: Any) -> tuple[AddedKind, ...]:
        settings = self._settings
        for rows in _NUM_TRIED:
            try:
                with self._engine.without_gradients():
                    trial = Trial(self._model, data, min(num, rows), per_piece=settings.per_piece)
                    return trial.check(settings.added)
            except Exception as error:
                if not self._module.ran_out(error):
                    raise
                cause = error
            finally:
                self._engine.restore(state)
        raise DoesNotFitError(
            "two examples run out of memory together even without gradients, so a trial cannot tell whether pieces "
            "add up; use shorter examples or a smaller model"
        ) from cause

    def _check_state(self, state: Any) -> None:
        if not self._settings.per_piece:
            before, after = self._engine.values(state), self._engine.values(self._engine.state())
            check_state(self._model, before, after)
        self._is_tried = True

    def _fall(self, most: int, lengths: tuple[int, ...]) -> None:
        self._sizes.after_failure(most, lengths)
        if self._settings.memory is not None:
            self._observe(1.0, most)  # a piece that ran out of memory counts as one that filled it

    def _finish(self, total: Any, num: int) -> Any:
        try:
            return self._engine.finish(total, num)
        except Exception as error:
            if not self._module.ran_out(error):
                raise
            raise UpdateMemoryError(
                "the optimizer ran out of memory in its step, so its update may be half done; load a checkpoint, and "
                "leave more memory free for the optimizer"
            ) from error

    def _learn(self, report: UpdateReport) -> None:
        self._sizes.after_success()
        if report.memory_fraction is not None:
            self._observe(report.memory_fraction, max(report.sizes))

    def _observe(self, fraction: float, num_items: int) -> None:
        """Let a controller of pieces see the share of memory; ``FitToMemory`` has its own name for it."""
        controller: Any = self._sizes.micro_batch
        if hasattr(controller, "num_micro_batches"):
            controller.observe(fraction, num_items=num_items)
        elif hasattr(controller, "observe"):
            controller.observe(memory_fraction=fraction, batch_size=num_items)


def _ids(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(id, values))


def _unpacked(data: Any) -> tuple[Any, Any, Any]:
    found: tuple[Any, Any, Any] = keras.utils.unpack_x_y_sample_weight(data)
    return found
