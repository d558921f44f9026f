"""FitToMemory: the size of micro-batches follows the memory in use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from ..._checks import as_whole
from ...errors import ArgumentError

# A size that was too large is tried again after this many observations: what filled the device may be gone.
FORGET_AFTER = 512


@final
@dataclass(frozen=True)
class MemoryRule:
    """The next size of a micro-batch from the share of memory that the last one used.

    Above ``high`` the size is divided by ``factor``, below ``low`` multiplied, and kept from ``min_size`` to
    ``max_size``. It grows only if the larger one is predicted at or under ``high``: what is above the baseline is taken
    as proportional to the items, ``baseline + (fraction − baseline) × new / num_items``. With a baseline of 0 that is
    never too low for memory linear in the items.

    Args:
        max_size: the largest size.
        min_size: the smallest size.
        high: shrink above this share of memory.
        low: grow below this share.
        factor: by how much to shrink or grow, above 1.

    >>> rule = MemoryRule(max_size=64)
    >>> rule.next_size(16, 0.9), rule.next_size(16, 0.6), rule.next_size(16, 0.3)
    (8, 16, 32)
    >>> rule.next_size(16, 0.45), rule.next_size(16, 0.45, baseline=0.3)  # 32 predicted at 0.9 and at 0.6
    (16, 32)
    """

    max_size: int
    min_size: int = 1
    high: float = 0.8
    low: float = 0.48
    factor: float = 2.0

    def __post_init__(self) -> None:
        least = as_whole("min_size", self.min_size, least=1)
        as_whole("max_size", self.max_size, least=least)
        if not 0 < self.low <= self.high <= 1:
            raise ArgumentError(f"0 < low <= high <= 1 must hold, got low={self.low!r}, high={self.high!r}")
        if not 1 < self.factor < math.inf:
            raise ArgumentError(f"factor must be above 1, got {self.factor!r}")

    def next_size(self, size: int, fraction: float, *, num_items: int | None = None, baseline: float = 0.0) -> int:
        """Return the size to use next.

        Args:
            size: the size in use.
            fraction: the share of memory at the peak.
            num_items: the items of the largest micro-batch that ran, if fewer than ``size``.
            baseline: the share that does not grow with the items: parameters, optimizer state.
        """
        ran = min(size, size if num_items is None else num_items)
        if fraction > self.high:
            return self.clamp(min(ran - 1, math.floor(ran / self.factor)))
        larger = self.clamp(max(size + 1, math.floor(size * self.factor)))
        predicted = baseline + max(0.0, fraction - baseline) * larger / ran
        return larger if fraction < self.low and predicted <= self.high else size

    def clamp(self, size: int) -> int:
        """Return the size within ``min_size`` and ``max_size``."""
        return max(self.min_size, min(size, self.max_size))


@final
class FitToMemory:
    """A micro-batch size that follows the memory in use; the logical batch is kept, so the update stays the same.

    Give it to ``Stepper(micro_batch=...)`` and tell it the peak after each step. A size that passed ``high`` is not
    tried again for ``FORGET_AFTER`` observations, so sizes do not swing.

    Args:
        max_size: the largest micro-batch.
        min_size: the smallest.
        initial: the first; None is ``min_size``.
        high: shrink above this share of memory.
        low: grow below this share.
        factor: by how much to shrink or grow.

    >>> fit = FitToMemory(64, initial=16)
    >>> fit.observe(0.2), fit.observe(0.85), fit.observe(0.4)  # 32 was too large
    (32, 16, 16)
    >>> fit.num_micro_batches(100)  # accumulation steps of a logical batch
    7
    """

    def __init__(
        self,
        max_size: int,
        *,
        min_size: int = 1,
        initial: int | None = None,
        high: float = 0.8,
        low: float = 0.48,
        factor: float = 2.0,
    ) -> None:
        self._rule = MemoryRule(max_size, min_size=min_size, high=high, low=low, factor=factor)
        size = min_size if initial is None else as_whole("initial", initial, least=min_size)
        if size > max_size:
            raise ArgumentError(f"initial must be from {min_size} to {max_size}, got {initial!r}")
        self._size = size
        self._too_large: int | None = None
        self._num_clean = 0

    @property
    def size(self) -> int:
        """Return the items of the next micro-batches."""
        return self._size

    def observe(self, fraction: float, *, num_items: int | None = None, baseline: float = 0.0) -> int:
        """Take the share of memory at the peak of a step, and return the size for the next.

        Args:
            fraction: e.g. ``monitor.peak_fraction``, after a ``monitor.reset_peak()`` before the step.
            num_items: the items of the largest micro-batch that ran, if fewer than ``size``.
            baseline: the share that was in use before the step, e.g. ``monitor.fraction``; it does not grow.
        """
        if not (0 <= fraction < math.inf and 0 <= baseline < math.inf):
            raise ArgumentError(f"fraction and baseline must be 0 or more, got {fraction!r} and {baseline!r}")
        ran = self._size if num_items is None else as_whole("num_items", num_items, least=1)
        new = self._rule.next_size(self._size, fraction, num_items=ran, baseline=baseline)
        if fraction > self._rule.high:
            self._too_large, self._num_clean = min(ran, self._size), 0
        else:
            new = self._below_too_large(new)
        self._size = new
        return new

    def num_micro_batches(self, batch_size: int) -> int:
        """Return ``ceil(batch_size / size)``, the accumulation steps that keep a logical batch."""
        return -(-as_whole("batch_size", batch_size, least=1) // self._size)

    def state_dict(self) -> dict[str, Any]:
        """Return the size and what was learned, as JSON values."""
        return {"version": 1, "size": self._size, "too_large": self._too_large, "num_clean": self._num_clean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what another run learned, within this one's limits."""
        if state.get("version") != 1:
            raise ArgumentError(f"the state of FitToMemory has version 1, got {state.get('version')!r}")
        self._size = self._rule.clamp(state["size"])
        self._too_large, self._num_clean = state["too_large"], state["num_clean"]

    def _below_too_large(self, new: int) -> int:
        self._num_clean += 1
        if self._num_clean >= FORGET_AFTER:
            self._too_large = None
        return self._size if self._too_large is not None and new >= self._too_large > self._size else new

    def __repr__(self) -> str:
        return f"FitToMemory(size={self._size}, {self._rule})"
