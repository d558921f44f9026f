"""Ceiling: a limit that learns what fits. It falls at once, rises slowly, and remembers what failed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final


@final
@dataclass(frozen=True)
class Ceiling:
    """The largest cost that is believed to fit; a value, replaced and never changed.

    A failure lowers the limit at once. Successes raise it slowly, but not back to the cost that failed. After enough
    successes the failure is forgotten: what filled the memory may be gone. How far the limit falls, how fast it rises
    and which successes count is up to the caller.

    Attributes:
        limit: costs up to this one are believed to fit.
        failed_at: the cost that failed; infinity if none did or it is forgotten.
        num_clean: the successes that were counted since the failure.

    >>> ceiling = Ceiling().fall(32, failed_at=64)
    >>> ceiling.rise(40).limit, ceiling.rise(80, share=0.95).limit
    (40, 60.8)
    >>> ceiling.count(forget_after=2).count(forget_after=2).rise(80).limit
    80
    """

    limit: float = math.inf
    failed_at: float = math.inf
    num_clean: int = 0

    def fall(self, to: float, *, failed_at: float) -> Ceiling:
        """Return the ceiling after a cost failed: lowered to ``to``, unless it is lower already."""
        return Ceiling(min(self.limit, to), failed_at)

    def count(self, *, forget_after: int, clean: bool = True) -> Ceiling:
        """Return the ceiling after one more success.

        Args:
            forget_after: the success with which the failure is forgotten.
            clean: False says that the failed cost would fail again, and starts the count anew.
        """
        num_clean = self.num_clean + 1 if clean else 0
        return Ceiling(self.limit) if num_clean >= forget_after else replace(self, num_clean=num_clean)

    def blocks(self, cost: float) -> bool:
        """Say whether a cost above the limit reaches the one that failed."""
        return self.limit < self.failed_at <= cost

    def rise(self, to: float, *, share: float = 1.0, recount: bool = False) -> Ceiling:
        """Return the ceiling raised to ``to``, but at most to a share of the cost that failed; it never falls.

        Args:
            to: the new limit.
            share: of the failed cost; ``math.inf`` lets the limit pass it.
            recount: whether a ceiling that has risen counts its successes anew.
        """
        # At the smallest size the limit cannot fall below the failure, and must not be held there by it.
        most = self.failed_at * share if self.failed_at > self.limit else math.inf
        # Rounded so that a saved state says 35.2, not 35.2000000003.
        limit = round(min(to, most), 6)
        return Ceiling(limit, self.failed_at, 0 if recount else self.num_clean) if limit > self.limit else self
