"""How large a micro-batch may be: a size that follows the memory in use, and a limit learned from what failed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from ..._ceiling import Ceiling
from ..._checks import as_number, as_state, as_whole, is_same, read_number, read_whole
from ...errors import ArgumentError

# A size that was too large is tried again after this many observations: what filled the device may be gone.
FORGET_AFTER = 512
# Until then a size from this share of it on is taken as too large as well: 999 would only fail as 1000 did.
BELOW_FAILURE = 0.95

# After this many clean steps the limit rises by a tenth, at most to just below the last failure.
CLEAN_STEPS = 16
GROWTH = 1.1


@final
class FitToMemory:
    """A micro-batch size that follows the memory in use; the logical batch stays, and so does the update.

    Give it to ``Stepper(micro_batch=...)``, which observes the peak of every batch: on CUDA by itself, elsewhere with
    ``Stepper(memory=MemoryMonitor())``. A micro-batch that runs out of memory counts as one that passed ``high``. In a
    loop of your own, call ``observe`` after each step. A size that passed ``high``, or one nearly as large, is not
    tried again for ``FORGET_AFTER`` observations, so sizes do not swing.

    Args:
        max_size: the largest micro-batch.
        min_size: the smallest micro-batch.
        initial: the first size; None is ``min_size``.
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
        least, most = self._rule.min_size, self._rule.max_size
        size = least if initial is None else as_whole("initial", initial, least=least)
        if size > most:
            raise ArgumentError(f"initial must be from {least} to {most}, got {initial!r}")
        self._learned = Ceiling(size)
        self._is_observed = False  # by a Stepper, and not yet by the user

    @staticmethod
    def accumulating(batch_size: int, *, max_steps: int) -> FitToMemory:
        """Return a size that begins with the whole batch and follows memory by steps of accumulation.

        Above 0.9 of memory the steps double, at most to ``max_steps``; below 0.7 they halve.

        Args:
            batch_size: the largest logical batch.
            max_steps: the most micro-batches to cut it into.

        >>> fit = FitToMemory.accumulating(64, max_steps=4)
        >>> [fit.num_micro_batches(64)] + [64 // fit.observe(share) for share in (0.95, 0.95, 0.95, 0.3)]
        [1, 2, 4, 4, 2]
        """
        most = as_whole("batch_size", batch_size, least=1)
        steps = as_whole("max_steps", max_steps, least=1)
        return FitToMemory(most, min_size=-(-most // steps), initial=most, high=0.9, low=0.7)

    @property
    def size(self) -> int:
        """Return the number of items of the next micro-batches."""
        return int(self._learned.limit)

    def observe(self, fraction: float, *, num_items: int | None = None, baseline: float = 0.0) -> int:
        """Take the share of memory at the peak of a step, and return the size for the next step.

        After a step that a ``Stepper`` has observed, the first call changes nothing: no step counts twice.

        Args:
            fraction: e.g. ``monitor.peak_fraction``, after a ``monitor.reset_peak()`` before the step.
            num_items: the items of the largest micro-batch that ran, if fewer than ``size``.
            baseline: the share that was in use before the step, e.g. ``monitor.fraction``; it does not grow.
        """
        fraction = as_number("fraction", fraction, least=0)
        baseline = as_number("baseline", baseline, least=0)
        ran = self.size if num_items is None else as_whole("num_items", num_items, least=1)
        if not self._is_observed:
            self._follow(fraction, ran, baseline)
        self._is_observed = False
        return self.size

    def _observe_step(self, fraction: float, *, num_items: int, baseline: float = 0.0) -> None:
        """Take what a ``Stepper`` has measured; see ``observe``."""
        self._follow(fraction, num_items, baseline)
        self._is_observed = True

    def _follow(self, fraction: float, ran: int, baseline: float) -> None:
        size = self.size
        new = self._rule.next_size(size, fraction, num_items=ran, baseline=baseline)
        if fraction > self._rule.high:
            self._learned = self._learned.fall(new, failed_at=min(ran, size))
        else:
            counted = self._learned.count(forget_after=FORGET_AFTER)
            self._learned = counted if counted.blocks(new / BELOW_FAILURE) else counted.rise(new)

    def num_micro_batches(self, batch_size: int) -> int:
        """Return ``ceil(batch_size / size)``, the accumulation steps that keep a logical batch."""
        return -(-as_whole("batch_size", batch_size, least=1) // self.size)

    def state_dict(self) -> dict[str, Any]:
        """Return the size and what was learned, as JSON values."""
        failed_at = self._learned.failed_at
        too_large = None if math.isinf(failed_at) else failed_at
        return {"version": 1, "size": self.size, "too_large": too_large, "num_clean": self._learned.num_clean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what another run learned, within the limits of this one.

        Raises:
            ArgumentError: the state has another version.
            StateMismatchError: it is not one that ``state_dict`` returned. The size stays as it was.
        """
        state = as_state(state, of="FitToMemory")
        if not is_same(state.get("version"), 1):
            raise ArgumentError(f"the state of FitToMemory has version 1, got {state.get('version')!r}")
        state = as_state(state, of="FitToMemory", needs=("size", "too_large", "num_clean"))
        size, too_large = int(read_number(state, "size", least=1)), _read_limit(state, "too_large")
        self._learned = Ceiling(self._rule.clamp(size), too_large, read_whole(state, "num_clean"))

    def __repr__(self) -> str:
        return f"FitToMemory(size={self.size}, {self._rule})"


@final
@dataclass(frozen=True)
class MemoryRule:
    """The next size of a micro-batch, from the share of memory that the last one used.

    Above ``high`` the size is divided by ``factor``, below ``low`` it is multiplied, within ``min_size`` and
    ``max_size``. It grows only if the larger size is predicted at or below ``high``: the share above the baseline is
    taken as proportional to the items, ``baseline + (fraction − baseline) × new / num_items``. If memory is linear in
    the items, a baseline of 0 never predicts too little.

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
        low, high = as_number("low", self.low, above=0), as_number("high", self.high, most=1)
        if low > high:
            raise ArgumentError(f"0 < low <= high <= 1 must hold, got low={self.low!r}, high={self.high!r}")
        plain = {
            "min_size": least,
            "max_size": as_whole("max_size", self.max_size, least=least),
            "low": low,
            "high": high,
            "factor": as_number("factor", self.factor, above=1),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def next_size(self, size: int, fraction: float, *, num_items: int | None = None, baseline: float = 0.0) -> int:
        """Return the size to use next.

        Args:
            size: the size in use.
            fraction: the share of memory at the peak.
            num_items: the items of the largest micro-batch that ran, if fewer than ``size``.
            baseline: the share that does not grow with the items: parameters, optimizer state.
        """
        size = as_whole("size", size, least=1)
        ran = size if num_items is None else min(size, as_whole("num_items", num_items, least=1))
        if fraction > self.high:
            return self.clamp(min(ran - 1, math.floor(ran / self.factor)))
        larger = self.clamp(max(size + 1, math.floor(size * self.factor)))
        predicted = baseline + max(0.0, fraction - baseline) * larger / ran
        return larger if fraction < self.low and predicted <= self.high else size

    def clamp(self, size: int) -> int:
        """Return the size within ``min_size`` and ``max_size``."""
        return max(self.min_size, min(size, self.max_size))


@final
@dataclass(frozen=True)
class MicroLimit:
    """The largest cost of a micro-batch that is believed to fit; a value, replaced and never changed.

    The cost is in the unit of the splitter: items, tokens, or a share of a budget. A failure halves the ceiling, every
    ``CLEAN_STEPS`` clean steps raise it by a tenth, up to just below the failure. After ``FORGET_AFTER`` clean steps
    the failure is forgotten and the ceiling rises on: memory may be free again.

    Attributes:
        learned: the ceiling, the least cost that ran out of memory and is not forgotten, and the clean steps since its
            last change.
    """

    learned: Ceiling = field(default_factory=Ceiling)

    @property
    def ceiling(self) -> float:
        """Return the most that a micro-batch may cost."""
        return self.learned.limit

    def after_failure(self, cost: float) -> MicroLimit:
        """Return the limit after a micro-batch of this cost ran out of memory."""
        # With every failure forgotten, a tenth less has run for long: this was one step too far, not another memory.
        is_probe = math.isfinite(self.ceiling) and math.isinf(self.learned.failed_at)
        lower = min(self.ceiling, cost) / (GROWTH**2 if is_probe else 2)
        return MicroLimit(self.learned.fall(lower, failed_at=min(cost, self.learned.failed_at)))

    def after_success(self, largest: float, *, is_cut: bool = False) -> MicroLimit:
        """Return the limit after a step whose largest micro-batch had this cost.

        A step is clean if its largest micro-batch came near the ceiling, or if the ceiling cut the batch: equal pieces
        stay below the ceiling, and only a higher one shows whether fewer of them fit. Other steps teach nothing.

        Args:
            largest: the cost of the largest micro-batch.
            is_cut: whether a higher ceiling would have cut the batch into fewer micro-batches.

        >>> limit = MicroLimit().after_failure(64)
        >>> for _ in range(CLEAN_STEPS):
        ...     limit = limit.after_success(22, is_cut=True)  # 64 examples in pieces of 22, 21 and 21
        >>> limit.ceiling
        35.2
        """
        is_near = largest >= self.ceiling / GROWTH
        if math.isinf(self.ceiling) or not (is_near or is_cut):
            return self
        counted = self.learned.count(forget_after=FORGET_AFTER)
        if counted.num_clean % CLEAN_STEPS == 0:
            counted = counted.rise(self.ceiling * GROWTH, share=BELOW_FAILURE, recount=True)
        return MicroLimit(counted)

    def to_state(self) -> dict[str, Any]:
        """Return the limit as JSON values; infinity is None."""
        values = {"ceiling": self.ceiling, "failed_at": self.learned.failed_at, "num_clean": self.learned.num_clean}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> MicroLimit:
        """Return the limit of a saved state."""
        state = as_state(state, of="the limit of a Stepper", needs=("ceiling", "failed_at", "num_clean"))
        ceiling, failed_at = _read_limit(state, "ceiling"), _read_limit(state, "failed_at")
        return MicroLimit(Ceiling(ceiling, failed_at, read_whole(state, "num_clean")))


def _read_limit(state: Mapping[str, Any], name: str) -> float:
    """Return a number of a saved state, where None is infinity."""
    return math.inf if state[name] is None else read_number(state, name, above=0)
