"""BatchSizeCallback: follows planned data through fit, and lets a controller decide the next batch size."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

import keras

from ..._checks import as_state, load_parts
from ...errors import ArgumentError
from .._observing import History, LiveHistory, observe
from ._feed import feed_of
from ._pieces import as_array
from .data import PlannedDataset

_HINTS = {
    "memory_fraction": "pass memory= to BatchSizeCallback, such as TensorFlowMemory()",
    "noise": "the gradient noise is measured by batchwright.step, on torch",
    "entropy": "Keras does not tell the entropy; use a policy of the loss or a schedule",
}
# What Keras says when an epoch has fewer batches than it was told: planned epochs may, and nothing is interrupted.
_RAN_OUT = "Your input ran out of data"


@final
class BatchSizeCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Counts what ``fit`` trains, so that it resumes within an epoch, and runs a controller of the batch size.

    After every batch a controller observes its size, its loss, the learning rate, the seconds and, with ``memory=``,
    the share of memory at the peak; after every epoch, that it is over. A ``ResizableBatchSampler`` asks the controller
    for the size of the next batch. The controller decides how many examples an update has; ``adaptive`` decides in
    which pieces they run.

    Args:
        data: a ``PlannedDataset``, or the sampler of ``to_tf_data``.
        controller: observes; None takes the sampler's own, if it has one.
        memory: a memory source, whose peak is read per batch; None takes what ``adaptive(memory=…)`` measured.
        history: True prints a line per change of the size, a function gets it.
        clock: seconds, for tests.

    Example::

        controller = bw.BatchSizeController(size.linear(32, 8), min_size=32, max_size=256)
        sampler = bw.ResizableBatchSampler(len(examples), controller)
        data = to_tf_data(sampler, examples)
        model.fit(data, epochs=10, steps_per_epoch=100, callbacks=[BatchSizeCallback(sampler)], shuffle=False)
    """

    def __init__(
        self,
        data: Any,
        *,
        controller: Any = None,
        memory: Any = None,
        history: History = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._data: Any = data if isinstance(data, PlannedDataset) else feed_of(data)
        own = getattr(self._data.sampler, "controller", None)
        own = getattr(own, "controller", own)  # behind its log
        if controller is not None and own is not None and controller is not own:
            raise ArgumentError("the sampler asks another controller for its sizes; leave controller out")
        self.controller = own if controller is None else controller
        self._memory, self._clock, self._history = memory, clock, LiveHistory(history)
        self._data.follow()
        self._filter: warnings.catch_warnings[Any] | None = None
        self._began = 0.0
        self._seen = (0.0, 0.0)  # the total and the count of the loss
        self._epoch = self._data.sampler.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a number of steps that cuts planned epochs."""
        told = (self.params or {}).get("steps")
        if isinstance(self._data, PlannedDataset) and told is not None and told != self._data.num_batches:
            raise ArgumentError(
                f"steps_per_epoch={told} would cut planned epochs of {self._data.num_batches} batches; leave it out, "
                "or use to_tf_data(sampler, examples, endless=True)"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Go to the epoch, in the plan too."""
        self._seen = (0.0, 0.0)
        if isinstance(self._data, PlannedDataset):
            self._epoch = epoch
            told = self._data.num_batches
            num = self._data.begin_epoch(epoch)
            if not num:
                raise ArgumentError(f"epoch {epoch} is over; begin with initial_epoch={epoch + 1}")
            if num < told:
                self._quiet()

    def _quiet(self) -> None:
        """Take the warning of a short epoch as what it is until the epoch ends."""
        self._filter = warnings.catch_warnings()
        self._filter.__enter__()
        warnings.filterwarnings("ignore", message=_RAN_OUT)

    def _end_quiet(self) -> None:
        if self._filter is not None:
            self._filter.__exit__(None, None, None)
            self._filter = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin to measure; end an epoch that has fewer batches than Keras was told."""
        if self._is_over():
            # Keras on TensorFlow counts an update in the same graph that finds out that the data are over.
            raise StopIteration
        self._began = self._clock()
        if self._memory is not None:
            self._memory.reset_peak()

    def _is_over(self) -> bool:
        is_planned = isinstance(self._data, PlannedDataset)
        return keras.config.backend() == "tensorflow" and is_planned and self._data.is_trained

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch and let the controller observe it."""
        self._data.count_batch()
        if self.controller is not None and hasattr(self.controller, "observe"):
            seconds = self._clock() - self._began
            fraction = self._memory_fraction()
            self._observe(epoch=self._epoch, **self._figures(), seconds=seconds, memory_fraction=fraction)
            self._observe_data_epoch()

    def _figures(self) -> dict[str, Any]:
        """Return the size and the loss of the batch from what Keras has added up, and the learning rate."""
        tracker = self.model._loss_tracker
        total, count = float(as_array(tracker.total.value)), float(as_array(tracker.count.value))
        before, self._seen = self._seen, (total, count)
        size = round(count - before[1])
        rate = float(as_array(keras.ops.convert_to_tensor(self.model.optimizer.learning_rate)))
        return {"batch_size": size, "loss": (total - before[0]) / size if size else None, "lr": rate}

    def _memory_fraction(self) -> float | None:
        if self._memory is not None:
            return float(self._memory.peak_bytes / self._memory.total_bytes)
        report = getattr(getattr(self.model, "batchwright", None), "report", None)
        return None if report is None else report.memory_fraction

    def _observe(self, **figures: Any) -> None:
        change = observe(self.controller, hints=_HINTS, **figures)
        if change is not None:
            self._history.show(change, print)

    def _observe_data_epoch(self) -> None:
        """Tell the end of an epoch of endless data: Keras counts its own, which are numbers of steps."""
        if not isinstance(self._data, PlannedDataset):
            epoch = int(self._data.state_dict()["sampler"]["epoch"])
            if epoch != self._epoch:
                self._epoch = epoch
                self._observe(epoch=epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End the epoch in the plan, and tell the controller."""
        self._end_quiet()
        if isinstance(self._data, PlannedDataset):
            self._data.end_epoch()
            if self.controller is not None and self._data.sampler.epoch > epoch:
                self._observe(epoch=epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        """Leave no filter of warnings behind."""
        self._end_quiet()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and the controller, as JSON values."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; ``initial_epoch`` of ``fit`` is ``callback.epoch``."""
        parts = self._parts()
        load_parts(parts, as_state(state, of="BatchSizeCallback", needs=tuple(parts)))
        self._epoch = self._data.sampler.epoch

    @property
    def epoch(self) -> int:
        """Return the epoch to go on with, for ``fit(initial_epoch=…)``."""
        state = self._data.state_dict()
        return int(state.get("sampler", state)["epoch"])

    def _parts(self) -> dict[str, Any]:
        can_save = self.controller is not None and hasattr(self.controller, "state_dict")
        return {"data": self._data, **({"controller": self.controller} if can_save else {})}
