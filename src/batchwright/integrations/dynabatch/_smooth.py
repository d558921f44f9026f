"""Batches grow by small steps: a batch is at most so many items larger than the one before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import final

from ...plan.grouping.base import SizeRounding


def growth_step(batch_size: int, max_diff: float, rounding: SizeRounding) -> int:
    """Return the most items a batch may have more than the last: ``int(batch_size × max_diff)``, never too few to grow.

    >>> growth_step(32, 0.2, SizeRounding()), growth_step(4, 0.2, SizeRounding()), growth_step(4, 0.2, SizeRounding(2))
    (6, 1, 2)
    """
    # The ladder has steps of any width; there the sum of many small steps counts, so one item is enough.
    least = 1 if rounding.ladder is not None else rounding.multiple_of
    return max(int(batch_size * max_diff), least)


@final
class Sizes:
    """The size of one batch after another: what fits, the step of growth, and rounding, in this order.

    Nothing here raises a size, so a batch that fits is left fitting.

    Args:
        first: the size of the first batch.
        step: the most items to grow by; None grows at once.
        rounding: rounds down to even or friendly sizes.

    >>> sizes = Sizes(32, 6, SizeRounding(2))
    >>> [sizes.next(most) for most in (64, 64, 45)]
    [38, 44, 44]
    """

    def __init__(self, first: int, step: int | None, rounding: SizeRounding) -> None:
        self._reached = first
        self._step = step
        self._round: Callable[[int], int] = cache(rounding.round_one)
        self._has_ladder = rounding.ladder is not None

    def next(self, most: int) -> int:
        """Return the size of the next batch, of which ``most`` items fit."""
        limit = most if self._step is None else min(most, self._reached + self._step)
        size = self._round(limit)
        # On a ladder the unrounded size climbs on, or the next rung would never be reached.
        self._reached = limit if self._has_ladder else size
        return size
