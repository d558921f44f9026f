"""What measured peaks teach: BudgetTracker corrects a budget in bytes, Feedback carries peaks from a Stepper."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from ..._checks import as_number, as_state, as_whole, is_same, read_number, read_whole
from ...errors import ArgumentError
from ...plan import MaxBytes, MemoryModel
from .fit_to_memory import FitToMemory
from .monitor import MemoryMonitor

# A model that was right for this many steps may use most of its margin, which was meant for shapes it had not seen.
RELAX_AFTER = 16
RELAX_SPARE = 1.02

# The share of memory that a failed micro-batch asked for: above any ``high``.
_OVERFULL = 2.0


@final
@dataclass(frozen=True)
class BudgetTracker:
    """How far a memory model is off while training; a value, replaced and never changed.

    ``ratio`` is measured / predicted. A higher ratio is taken at once, lower ones pull it down slowly:
    ``ratio += release × (measured / predicted − ratio)``. The budget for the rest of the epoch is multiplied by
    ``factor = (1 + margin) / (spare × ratio)``. A peak beyond the model's margin tightens the budget at once. It
    relaxes only after ``RELAX_AFTER`` steps, and never beyond ``1 + margin``, where a batch is predicted to fill the
    memory exactly. ``spare`` is 1 for tightening and ``RELAX_SPARE`` for relaxing.

    Args:
        model: the model that the budget was made from.
        release: how fast lower ratios count, above 0 and at most 1.
        ratio: measured / predicted so far.
        num_observed: the steps observed so far.

    >>> from batchwright.plan.models._terms import Terms
    >>> tracker = BudgetTracker(MemoryModel(Terms(1, (100.0, 0.0, 1.0, 0.0)), margin=0.1))
    >>> tracker = tracker.observe((10, 90), 1250)  # 1000 predicted, 1100 allowed for
    >>> tracker.ratio, tracker.factor
    (1.25, 0.8800000000000001)
    """

    model: MemoryModel
    release: float = 0.05
    ratio: float = 1.0
    num_observed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "release", as_number("release", self.release, above=0, most=1))
        object.__setattr__(self, "ratio", as_number("ratio", self.ratio, above=0))
        object.__setattr__(self, "num_observed", as_whole("num_observed", self.num_observed, least=0))

    def observe(self, shapes: npt.ArrayLike, peak_bytes: float) -> BudgetTracker:
        """Return the tracker after one more step.

        Args:
            shapes: the shape that ran, or those of all micro-batches, ``(M, 1 + axes)``; the largest made the peak.
            peak_bytes: the peak measured over the step.
        """
        peak_bytes = as_number("peak_bytes", peak_bytes, above=0)
        seen = peak_bytes / float(self.model.predict(np.atleast_2d(np.asarray(shapes))).max())
        is_higher = self.num_observed == 0 or seen > self.ratio
        ratio = seen if is_higher else self.ratio + self.release * (seen - self.ratio)
        return replace(self, ratio=ratio, num_observed=self.num_observed + 1)

    @property
    def factor(self) -> float:
        """Return the factor of the budget's bytes, above 0 and at most ``1 + margin``."""
        room = (1 + self.model.margin) / self.ratio
        if room <= 1 or self.num_observed < RELAX_AFTER:
            return min(1.0, room)
        return max(1.0, min(room, 1 + self.model.margin) / RELAX_SPARE)

    def budget(self, max_bytes: float) -> MaxBytes:
        """Return the budget for the rest of the epoch: ``model.budget(max_bytes × factor)``."""
        return self.model.budget(max_bytes * self.factor)

    def to_state(self) -> dict[str, Any]:
        """Return what was learned as JSON values; the model has its own ``to_json``."""
        return {"version": 1, "ratio": self.ratio, "num_observed": self.num_observed}

    def with_state(self, state: Mapping[str, Any]) -> BudgetTracker:
        """Return this tracker with what another run learned."""
        state = as_state(state, of="BudgetTracker")
        if not is_same(state.get("version"), 1):
            raise ArgumentError(f"the state of a BudgetTracker has version 1, got {state.get('version')!r}")
        ratio = float(read_number(state, "ratio", above=0))
        return replace(self, ratio=ratio, num_observed=read_whole(state, "num_observed"))


class Feedback(ABC):
    """What the batches of a Stepper teach about memory: ``begin``, ``failed`` per failed attempt, ``end``."""

    @staticmethod
    def of(micro_batch: Any, memory: MemoryMonitor | None, device: torch.device) -> Feedback | None:
        """Return the feedback for a budget in bytes or a ``FitToMemory``; None if there is nothing to teach.

        Args:
            micro_batch: as given to the Stepper.
            memory: where peaks are read; None reads them only on CUDA.
            device: of the model.
        """
        if memory is None and device.type == "cuda":
            memory = MemoryMonitor(device)
        if isinstance(micro_batch, FitToMemory):
            return FitFeedback(micro_batch, memory)
        # Without CUDA: the resident memory of a process says little about one batch, unless somebody asks for it.
        return BudgetFeedback(micro_batch.model, memory) if isinstance(micro_batch, MaxBytes) and memory else None

    @property
    @abstractmethod
    def factor(self) -> float:
        """Return by how much to multiply the budget of the next batch."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a batch, and with it a new peak."""

    @abstractmethod
    def failed(self, size: int) -> None:
        """Note that a micro-batch of this many examples ran out of memory; call it when its memory is free again."""

    @abstractmethod
    def end(self, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]] | None) -> None:
        """Read the peak of a batch.

        Args:
            sizes: the numbers of examples of the micro-batches that ran.
            shapes: their shapes, None if lengths are not known.
        """

    @abstractmethod
    def to_state(self) -> dict[str, Any] | None:
        """Return what was learned as JSON values."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue with what another run learned; the state of another kind of feedback is left alone."""


@final
class BudgetFeedback(Feedback):
    """Compares the peak of every batch with a memory model's prediction."""

    def __init__(self, model: MemoryModel, memory: MemoryMonitor) -> None:
        self._tracker = BudgetTracker(model)
        self._memory = memory

    @property
    def factor(self) -> float:
        """Return the factor of the budget now."""
        return self._tracker.factor

    def begin(self) -> None:
        """Begin a new peak."""
        self._memory.reset_peak()

    def failed(self, size: int) -> None:
        """Forget the peak of the failed attempt: the smaller micro-batches that follow did not make it."""
        self._memory.reset_peak()

    def end(self, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]] | None) -> None:
        """Compare the peak with the prediction for these micro-batches."""
        peak = self._memory.peak_bytes
        if shapes and peak > 0:
            self._tracker = self._tracker.observe(shapes, peak)

    def to_state(self) -> dict[str, Any]:
        """Return the state of the tracker."""
        return self._tracker.to_state()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue with the state of another tracker."""
        if state is not None and "ratio" in as_state(state, of="BudgetTracker"):
            self._tracker = self._tracker.with_state(state)


@final
class FitFeedback(Feedback):
    """Lets a ``FitToMemory`` observe every batch; without a place to read peaks it learns only from failures."""

    def __init__(self, fit: FitToMemory, memory: MemoryMonitor | None) -> None:
        self._fit = fit
        self._memory = memory
        self._used_before = 0

    @property
    def size(self) -> int:
        """Return the number of examples of the next micro-batches."""
        return self._fit.size

    @property
    def factor(self) -> float:
        """Return 1: the size itself follows memory."""
        return 1.0

    def begin(self) -> None:
        """Begin a new peak, and note what is in use before the batch."""
        if self._memory is not None:
            self._memory.reset_peak()
            self._used_before = self._memory.used_bytes

    def failed(self, size: int) -> None:
        """Shrink below the size that failed, and forget the peak of that attempt."""
        self._fit._observe_step(_OVERFULL, num_items=size)
        if self._memory is not None:
            self._memory.reset_peak()

    def end(self, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]] | None) -> None:
        """Observe the peak of the batch, of which the bytes in use before it do not grow with the size."""
        if self._memory is None or not sizes:
            return
        peak, fraction = self._memory.peak_bytes, self._memory.peak_fraction
        baseline = fraction * min(1.0, self._used_before / peak) if peak > 0 else 0.0
        self._fit._observe_step(fraction, num_items=max(sizes), baseline=baseline)

    def to_state(self) -> dict[str, Any]:
        """Return the state of the size."""
        return self._fit.state_dict()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue with the state of another size."""
        if state is not None and "size" in as_state(state, of="FitToMemory"):
            self._fit.load_state_dict(state)
