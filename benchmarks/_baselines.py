"""Rules short enough to write down in numpy: what a careful user without a library would do."""

from __future__ import annotations

from abc import abstractmethod
from typing import final

import numpy as np
from _arm import PLAN_SEED, Planner
from _metrics import Batches, IntArray


@final
class RandomFixedSize(Planner):
    """Shuffle and cut into batches of the safe size."""

    def plan(self, epoch: int) -> IntArray:
        return np.random.default_rng([PLAN_SEED, epoch]).permutation(len(self.lengths))

    def batches(self, plan: IntArray) -> Batches:
        return Batches.of_size(plan, self.safe_size)


class AbstractSortedRule(Planner):
    """Sort all examples by length, cut the order into batches, shuffle the batches.

    Examples are shuffled before the stable sort, so that equal lengths meet new neighbours every epoch.
    """

    def plan(self, epoch: int) -> Batches:
        rng = np.random.default_rng([PLAN_SEED, epoch])
        order = rng.permutation(len(self.lengths))
        order = self.direct(order[np.argsort(self.lengths[order], kind="stable")])
        return _shuffle_batches(order, self.cuts(self.lengths[order]), rng)

    def batches(self, plan: Batches) -> Batches:
        return plan

    @abstractmethod
    def direct(self, rising: IntArray) -> IntArray:
        """Turn an order of rising lengths into the order of the rule."""

    @abstractmethod
    def cuts(self, lengths: IntArray) -> IntArray:
        """Return where batches of ordered lengths begin, and the end of the last."""


@final
class SortGreedy(AbstractSortedRule):
    """Falling lengths: a batch takes ``budget // longest`` examples, and its longest comes first."""

    def direct(self, rising: IntArray) -> IntArray:
        return rising[::-1]

    def cuts(self, lengths: IntArray) -> IntArray:
        sizes = self.budget // lengths
        cuts = [0]
        while cuts[-1] < len(lengths):
            cuts.append(min(cuts[-1] + int(sizes[cuts[-1]]), len(lengths)))
        return np.array(cuts)


@final
class FairseqRule(AbstractSortedRule):
    """Rising lengths: a batch takes examples while it fits padded, cut to a multiple of 8."""

    MULTIPLE = 8

    def direct(self, rising: IntArray) -> IntArray:
        return rising

    def cuts(self, lengths: IntArray) -> IntArray:
        cuts = [0]
        while cuts[-1] < len(lengths):
            size = self._most(lengths, cuts[-1])
            if cuts[-1] + size < len(lengths):  # the last batch ends with the data, not with the budget
                size = max(size // self.MULTIPLE * self.MULTIPLE, size % self.MULTIPLE)
            cuts.append(cuts[-1] + size)
        return np.array(cuts)

    def _most(self, lengths: IntArray, start: int) -> int:
        """The most examples from ``start`` whose number times the last length fits, by bisection."""
        low, high = 1, min(self.budget // int(lengths[start]), len(lengths) - start)
        while low < high:
            middle = (low + high + 1) // 2
            if middle * int(lengths[start + middle - 1]) <= self.budget:
                low = middle
            else:
                high = middle - 1
        return low


def _shuffle_batches(indices: IntArray, cuts: IntArray, rng: np.random.Generator) -> Batches:
    """Put whole batches in random order, without a Python object a batch."""
    order = rng.permutation(len(cuts) - 1)
    sizes = np.diff(cuts)[order]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    shift = np.repeat(cuts[:-1][order] - offsets[:-1], sizes)
    return Batches(indices[np.arange(len(indices)) + shift], offsets)
