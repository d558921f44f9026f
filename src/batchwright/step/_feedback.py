"""Feedback: the peak of every batch corrects the budget that its micro-batches are cut by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from ..plan import MaxBytes
from .memory import MemoryMonitor
from .tracker import BudgetTracker


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
        """Return the feedback of a budget of bytes; None for any other, or where no peak can be read."""
        if not isinstance(micro_batch, MaxBytes):
            return None
        if memory is None and device.type != "cuda":
            return None  # resident memory of a process says little about one batch
        return Feedback(BudgetTracker(micro_batch.model), MemoryMonitor(device) if memory is None else memory)

    @property
    def factor(self) -> float:
        """Return what the budget is multiplied by now."""
        return self.tracker.factor

    def begin(self) -> None:
        """Begin a new peak."""
        self._memory.reset_peak()

    def end(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Compare the peak with what was predicted for these micro-batches."""
        peak = self._memory.peak_bytes
        if peak > 0:
            self.tracker = self.tracker.observe(shapes, peak)
