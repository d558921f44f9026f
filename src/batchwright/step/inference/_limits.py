"""How large the batches of inference are: by a budget, by what ran out of memory, and by the peaks of those before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from ..._ceiling import Ceiling
from ...errors import ArgumentError
from ...plan import Budget, MaxItems, MaxTokens, Plan, Sorted, plan_batches
from ...plan.budget import check_budget
from ..memory.monitor import MemoryMonitor
from ._decoding import Counts

# Without a budget the first batch has this many of the longest examples, the next as many as the peak says will fit.
_FIRST_ITEMS = 8
# A small batch says little about a far larger one, and the allocator cannot fill a device to the last byte.
_MOST_GROWTH, _USABLE = 32, 0.8
# Where no peak is measured.
_BLIND_GROWTH = 2
# Less than this much larger is not worth a new plan.
_WORTHWHILE = 1.25
# Larger batches gain little. Fewer where no peak is measured, and fewest on a CPU, where running out ends the process.
_MOST_ITEMS, _MOST_ITEMS_BLIND, _MOST_ITEMS_ON_CPU = 1024, 256, 32
# Where the memory of a batch is known before it runs.
MOST_ITEMS_KNOWN = 2048


@final
@dataclass(frozen=True)
class Limit:
    """What a batch may cost, and what running batches has taught."""

    budget: Budget
    learned: Ceiling = field(default_factory=Ceiling)  # the most padded tokens per batch
    grows: bool = False

    def plan(self, lengths: npt.NDArray[np.int32], pad_multiple_of: int) -> Plan:
        """Sort examples into batches; one that is over the budget on its own runs alone."""
        tokens = self.learned.limit
        budget = self.budget if math.isinf(tokens) else self.budget & MaxTokens(int(tokens))
        return plan_batches(
            lengths, budget, grouping=Sorted(), shuffle=False, pad_multiple_of=pad_multiple_of, oversize="alone"
        )

    def after(self, shape: list[int], num_fitting: int, meter: Meter) -> Limit:
        """Return the limit after a batch of this shape, of which ``num_fitting`` examples fitted at once."""
        num_items, width = shape[0], sum(shape[1:])
        tokens = num_items * width
        if num_fitting < num_items:
            return replace(self, learned=self.learned.fall(num_fitting * width, failed_at=tokens), grows=False)
        if not self.grows or 2 * tokens <= self.learned.limit:
            return self  # fewer examples were left than the limit allows, so their peak says little
        room = meter.room()
        new = _BLIND_GROWTH * self.learned.limit if room is None else int(min(room, _MOST_GROWTH) * tokens)
        return replace(self, learned=self.learned.rise(new)) if new > _WORTHWHILE * self.learned.limit else self


@final
class Meter:
    """Measures how many times the last batch would fit into the memory."""

    def __init__(self, memory: MemoryMonitor | None) -> None:
        self._memory, self._before = memory, 0

    @staticmethod
    def of(budget: Budget | None, memory: MemoryMonitor | None, device: torch.device) -> Meter:
        """Return a meter of the given memory or of a CUDA device; with a budget it measures nothing."""
        if budget is not None:
            return Meter(None)
        return Meter(MemoryMonitor(device) if memory is None and device.type == "cuda" else memory)

    @property
    def measures(self) -> bool:
        """Return whether peaks are measured."""
        return self._memory is not None

    def begin(self, held_bytes: int = 0) -> None:
        """Begin a batch.

        Args:
            held_bytes: memory that is in use for the batch before, and that this one takes over or gives back.
        """
        if self._memory is not None:
            self._memory.reset_peak()
            self._before = self._memory.used_bytes - held_bytes

    def room(self) -> float | None:
        """Return ``(usable − before) / (peak − before)``, None if no peak is measured."""
        if self._memory is None or self._memory.peak_bytes <= self._before:
            return None
        usable = _USABLE * self._memory.total_bytes
        return max(0.0, usable - self._before) / (self._memory.peak_bytes - self._before)


def first_limit(
    budget: Budget | None, longest: int, device: torch.device, meter: Meter, known: Budget | None = None
) -> Limit:
    """Return the limit of the first batch: the budget, or 8 of the longest examples.

    Args:
        budget: what a batch may cost; None lets batches grow.
        longest: tokens of the longest example, input and output.
        device: of the model.
        meter: whether peaks are measured.
        known: what is known to fit into memory, which then holds from the first batch on; None if nothing is.
    """
    if budget is not None:
        return Limit(check_budget(budget) if known is None else check_budget(budget) & known)
    if known is not None:
        return Limit(MaxItems(MOST_ITEMS_KNOWN) & known)
    most = _MOST_ITEMS_ON_CPU if device.type == "cpu" else _MOST_ITEMS_BLIND
    items = MaxItems(_MOST_ITEMS if meter.measures else most)
    return Limit(items, Ceiling(_FIRST_ITEMS * longest), grows=True)


def as_limits(value: Any, num: int) -> Counts | None:
    """Return ``max_new_tokens`` of each example, None if there is one number for all.

    Args:
        value: what was given.
        num: the number of examples.
    """
    if value is None:
        return None
    limits = np.asarray(value)
    if limits.ndim == 0 and np.issubdtype(limits.dtype, np.integer) and limits >= 1:
        return None
    if limits.shape != (num,) or not np.issubdtype(limits.dtype, np.integer) or limits.min() < 1:
        raise ArgumentError(
            f"max_new_tokens must be one whole number from 1, or one per example, {num}; got an array of shape "
            f"{limits.shape} and type {limits.dtype}{_least_of(limits)}"
        )
    return limits.astype(np.int64)


def _least_of(limits: npt.NDArray[Any]) -> str:
    is_number = limits.size and np.issubdtype(limits.dtype, np.number)
    return f", the least of which is {limits.min()}" if is_number else ""
