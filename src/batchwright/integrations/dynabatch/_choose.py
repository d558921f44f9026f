"""How many examples each batch takes, from falling lengths: pure functions, one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from ..._types import FloatArray, IntArray
from ...plan.grouping.base import SizeRounding, distinct
from ._prior import Task, relative_memory
from ._smooth import Sizes, growth_step


@final
@dataclass(frozen=True)
class SizeRule:
    """What the size of a batch obeys.

    A batch of ``n`` items fits where its predicted memory is at most ``threshold`` times that of the first batch. Up to
    ``batch_size`` items it also fits where it is at most the first one: that one is known to run.
    """

    batch_size: int
    max_batch_size: int
    threshold: float
    max_diff: float | None  # share of batch_size that a batch may grow by, None grows at once
    task: Task
    new_tokens: int | None = None  # generated for each item, None assumes half the longest input

    def predict(self, num_items: npt.ArrayLike, widths: npt.ArrayLike, reference: int) -> FloatArray:
        """Return the memory of batches of these padded widths, relative to a first one padded to ``reference``."""
        return relative_memory(
            num_items, widths, self.batch_size, reference, task=self.task, new_tokens=self.new_tokens
        )

    def fits(self, num_items: IntArray, widths: IntArray, reference: int) -> npt.NDArray[np.bool_]:
        """Return whether batches of these padded widths fit, beside a first one padded to ``reference``."""
        predicted = self.predict(num_items, widths, reference)
        known = np.where(num_items <= self.batch_size, max(self.threshold, 1.0), self.threshold)
        return np.less_equal(predicted, known)


def choose_sizes(lengths: npt.NDArray[np.int32], rule: SizeRule, rounding: SizeRounding) -> IntArray:
    """Return the sizes of the batches of examples sorted longest first.

    The first batch takes exactly ``batch_size``. Every later one takes the most that fit, grown from the one before by
    at most a step, and rounded down. The last takes what is left.

    Args:
        lengths: ``(N, axes)``, their sum falling.
        rule: what fits.
        rounding: even or friendly sizes.

    >>> rule = SizeRule(4, 8, threshold=0.9, max_diff=None, task="train")
    >>> choose_sizes(np.repeat(np.int32([100, 50, 10]), [4, 6, 10])[:, None], rule, SizeRounding()).tolist()
    [4, 7, 8, 1]
    """
    first = min(rule.batch_size, len(lengths))
    most_at = _MostAt(lengths, rule)
    step = None if rule.max_diff is None else growth_step(rule.batch_size, rule.max_diff, rounding)
    sizes, next_size = [first], Sizes(rule.batch_size, step, rounding)
    place = first
    while place < len(lengths):
        size = min(next_size.next(most_at(place)), len(lengths) - place)
        sizes.append(size)
        place += size
    return np.array(sizes, dtype=np.int64)


@final
class _MostAt:
    """How many of the examples from a place on fit into one batch."""

    def __init__(self, lengths: npt.NDArray[np.int32], rule: SizeRule) -> None:
        self._lengths, self._rule = lengths, rule
        self._reference = int(lengths[: rule.batch_size].max(axis=0).sum())
        self._widths: memoryview[int] | None = None
        if lengths.shape[1] == 1:
            widths = np.ascontiguousarray(lengths[:, 0])
            self._widths = memoryview(widths)  # type: ignore[arg-type]  # far faster to index than the array
            self._table = self._most_by_width(distinct(widths)[0])

    def __call__(self, place: int) -> int:
        """Return the number, at least one."""
        if self._widths is not None:
            return self._table[self._widths[place]]
        # With several axes the widest example of each is not the first one.
        window = self._lengths[place : place + self._rule.max_batch_size]
        widths = np.maximum.accumulate(window, axis=0).sum(axis=1, dtype=np.int64)
        counts = np.arange(1, len(widths) + 1)
        return max(1, int(np.count_nonzero(self._rule.fits(counts, widths, self._reference))))

    def _most_by_width(self, widths: IntArray) -> dict[int, int]:
        """Bisect between one item and the most allowed, for all widths at once."""
        low = np.ones(len(widths), dtype=np.int64)
        high = np.full(len(widths), self._rule.max_batch_size + 1, dtype=np.int64)
        while (high - low > 1).any():
            middle = (low + high) // 2
            good = self._rule.fits(middle, widths, self._reference)
            low, high = np.where(good, middle, low), np.where(good, high, middle)
        return dict(zip(widths.tolist(), low.tolist(), strict=True))
