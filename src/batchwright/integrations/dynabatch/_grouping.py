"""LongestFirst: the grouping behind the sampler, which brings epochs, ranks and resuming with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np
import numpy.typing as npt

from ..._random import Purpose, words
from ..._types import IntArray
from ...plan import Grouping
from ...plan._order import order_batches, step_cost
from ...plan.grouping.base import Groups, Problem, SizeRounding
from ...plan.grouping.sorting import sort_windows
from ._choose import SizeRule, choose_sizes


@final
@dataclass(frozen=True)
class LongestFirst(Grouping):
    """Sort all examples, longest first, and cut them into batches that grow as the examples get shorter.

    Shuffling draws equal lengths anew, mixes each batch and moves whole batches; sizes stay the same in every epoch.

    Args:
        rule: how batches grow; None keeps ``batch_size`` items.
        batch_size: items of the first batch.
        keep_first: so many of the longest batches come first in every epoch.
        drop_last: leave out a last batch that is smaller than the one before it.
        balance_over: batches of near-equal cost come in runs of this many.
    """

    rule: SizeRule | None
    batch_size: int
    keep_first: int
    drop_last: bool
    # Not shown: a state saved on one number of ranks continues on another.
    balance_over: int = field(repr=False)

    def group(self, problem: Problem) -> Groups:
        """Return the batches in the order of the epoch."""
        indices = _longest_first(problem)
        sizes = self.sizes(problem.lengths[indices], problem.rounding)
        starts = np.cumsum(sizes) - sizes
        padded = np.maximum.reduceat(problem.lengths[indices], starts, axis=0).astype(np.int64)
        order = np.arange(len(sizes))
        if problem.shuffle:
            indices = _mixed(indices, sizes, problem)
            order = self._order(problem, sizes, padded)
        if self.drop_last and self._last_is_short(sizes):
            order = order[order != len(sizes) - 1]
        return Groups(indices, starts[order], sizes[order], padded[order])

    @property
    def keeps_order(self) -> bool:
        """Return True: the order is chosen here, the longest batches first."""
        return True

    def sizes(self, lengths: npt.NDArray[np.int32], rounding: SizeRounding) -> IntArray:
        """Return the size of each batch of examples sorted longest first, ``(N, axes)``."""
        if self.rule is not None:
            return choose_sizes(lengths, self.rule, rounding)
        whole, rest = divmod(len(lengths), self.batch_size)
        return np.array([self.batch_size] * whole + [rest] * (rest > 0), dtype=np.int64)

    def _order(self, problem: Problem, sizes: IntArray, padded: IntArray) -> IntArray:
        stream = problem.stream(Purpose.ORDER)
        assert stream is not None
        longest_first = -np.arange(len(sizes), dtype=np.float64)
        cost = step_cost(sizes, padded)
        return order_batches(cost, longest_first, stream, run_length=self.balance_over, keep_first=self.keep_first)

    def _last_is_short(self, sizes: IntArray) -> bool:
        return bool(sizes[-1] < (self.batch_size if len(sizes) == 1 else sizes[-2]))


def _longest_first(problem: Problem) -> npt.NDArray[np.int32]:
    if problem.num_axes == 1:
        return sort_windows(problem, 1, shuffle=problem.shuffle).indices
    # Ties stay as they are: other neighbours on several axes pad otherwise, and epochs would differ in length.
    return np.argsort(-problem.lengths.sum(axis=1, dtype=np.int64), kind="stable").astype(np.int32)


def _mixed(indices: npt.NDArray[np.int32], sizes: IntArray, problem: Problem) -> npt.NDArray[np.int32]:
    """Shuffle the examples inside each batch."""
    stream = problem.stream(Purpose.ROWS)
    assert stream is not None
    batch = np.repeat(np.arange(len(sizes)), sizes)
    return indices[np.lexsort((words(len(indices), stream), batch))]
