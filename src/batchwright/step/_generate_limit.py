"""How large the batches of `generate` may be: by a budget, or by what earlier batches took."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from ..plan import Budget, MaxItems, MaxTokens, Plan, Sorted, plan_batches
from ..plan.budget import check_budget
from .memory import MemoryMonitor

# Without a budget: so many of the longest examples first, then as many as the peak says will fit.
_FIRST_ITEMS = 8
# A small batch says little about a far larger one, and the allocator cannot fill a device to the last byte.
_MOST_GROWTH, _USABLE = 32, 0.8
# Where no peak is measured.
_BLIND_GROWTH = 2
# Less than this much larger is not worth a new plan.
_WORTHWHILE = 1.25
# Wider batches gain little; fewer where no peak is measured. A CPU out of memory ends the process: still fewer there.
_MOST_ITEMS, _MOST_ITEMS_BLIND, _MOST_ITEMS_ON_CPU = 1024, 256, 32


@final
@dataclass(frozen=True)
class Limit:
    """What a batch may cost, and what running taught."""

    budget: Budget
    tokens: int | None = None  # most padded tokens a batch; None leaves it to the budget
    grows: bool = False

    def plan(self, lengths: npt.NDArray[np.int32], pad_multiple_of: int) -> Plan:
        """Sort examples into batches; one that is over the budget alone runs alone."""
        budget = self.budget if self.tokens is None else self.budget & MaxTokens(self.tokens)
        return plan_batches(
            lengths, budget, grouping=Sorted(), shuffle=False, pad_multiple_of=pad_multiple_of, oversize="alone"
        )

    def after(self, shape: list[int], num_fitting: int, meter: Meter) -> Limit:
        """Return the limit after a batch of this shape, of which so many examples fitted at once."""
        num_items, width = shape[0], sum(shape[1:])
        if num_fitting < num_items:
            return replace(self, tokens=num_fitting * width, grows=False)
        if not self.grows or self.tokens is None or 2 * num_items * width <= self.tokens:
            return self  # fewer examples were left than the limit allows: their peak says little
        room = meter.room()
        tokens = _BLIND_GROWTH * self.tokens if room is None else int(min(room, _MOST_GROWTH) * num_items * width)
        return replace(self, tokens=tokens) if tokens > _WORTHWHILE * self.tokens else self


@final
class Meter:
    """How many times the last batch would fit into the memory."""

    def __init__(self, memory: MemoryMonitor | None) -> None:
        self._memory, self._before = memory, 0

    @staticmethod
    def of(budget: Budget | None, memory: MemoryMonitor | None, device: torch.device) -> Meter:
        """Return a meter of a memory, or of a CUDA device; a budget needs none, and peaks are left alone."""
        if budget is not None:
            return Meter(None)
        return Meter(MemoryMonitor(device) if memory is None and device.type == "cuda" else memory)

    @property
    def measures(self) -> bool:
        """Return whether peaks are measured."""
        return self._memory is not None

    def begin(self) -> None:
        """Begin a batch."""
        if self._memory is not None:
            self._memory.reset_peak()
            self._before = self._memory.used_bytes

    def room(self) -> float | None:
        """Return ``(usable − before) / (peak − before)``, None where no peak is measured."""
        if self._memory is None or self._memory.peak_bytes <= self._before:
            return None
        usable = _USABLE * self._memory.total_bytes
        return max(0.0, usable - self._before) / (self._memory.peak_bytes - self._before)


def first_limit(budget: Budget | None, longest: int, device: torch.device, meter: Meter) -> Limit:
    """Return the limit of the first batch: the budget, or 8 of the longest examples.

    Args:
        budget: what a batch may cost; None lets batches grow.
        longest: tokens of the longest example, input and output.
        device: of the model.
        meter: whether peaks are measured.
    """
    if budget is not None:
        return Limit(check_budget(budget))
    most = _MOST_ITEMS_ON_CPU if device.type == "cpu" else _MOST_ITEMS_BLIND
    return Limit(MaxItems(_MOST_ITEMS if meter.measures else most), tokens=_FIRST_ITEMS * longest, grows=True)
