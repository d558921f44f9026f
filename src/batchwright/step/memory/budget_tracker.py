"""BudgetTracker: a budget in bytes that follows measured peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from ..._checks import as_number, as_whole
from ...errors import ArgumentError
from ...plan import MaxBytes, MemoryModel
from .monitor import MemoryMonitor

# A model that was right for this many steps may use most of its margin, which was meant for shapes it had not seen.
RELAX_AFTER = 16
RELAX_SPARE = 1.02


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
        if state.get("version") != 1:
            raise ArgumentError(f"the state of a BudgetTracker has version 1, got {state.get('version')!r}")
        return replace(self, ratio=float(state["ratio"]), num_observed=int(state["num_observed"]))


@final
class Feedback:
    """Reads the peak of a batch and keeps a ``BudgetTracker`` up to date.

    Args:
        tracker: compares peaks with its model.
        memory: where peaks are read.
    """

    def __init__(self, tracker: BudgetTracker, memory: MemoryMonitor) -> None:
        self.tracker = tracker
        self._memory = memory

    @staticmethod
    def of(micro_batch: Any, memory: MemoryMonitor | None, device: torch.device) -> Feedback | None:
        """Return the feedback for a budget in bytes; None for any other budget, or if no peak can be read."""
        if not isinstance(micro_batch, MaxBytes):
            return None
        if memory is None and device.type != "cuda":
            return None  # the resident memory of a process says little about one batch
        return Feedback(BudgetTracker(micro_batch.model), MemoryMonitor(device) if memory is None else memory)

    @property
    def factor(self) -> float:
        """Return the factor of the budget now."""
        return self.tracker.factor

    def begin(self) -> None:
        """Begin a new peak."""
        self._memory.reset_peak()

    def failed(self, size: int) -> None: ...

    def to_state(self) -> Any:
        return self.tracker.to_state()

    def load_state(self, state: Any) -> None:
        self.tracker = self.tracker.with_state(state)

    def end(self, sizes: Sequence[int], shapes: Any) -> None:
        """Compare the peak with the prediction for these micro-batches."""
        peak = self._memory.peak_bytes
        if peak > 0:
            self.tracker = self.tracker.observe(shapes, peak)
