"""The grouping of ``DynaBatchSampler``: examples sorted longest first, in batches that grow as examples get shorter.

The size of a batch follows from its memory relative to the first batch. Nothing is measured on this machine;
``MemoryModel.pretrained``, fitted to many models, predicts it from token counts. Words and characters are not part of
it, as a device sees only token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import final

import numpy as np
import numpy.typing as npt

from ..._random import Purpose, words
from ..._types import MAX_INT32, FloatArray, IntArray
from ...plan import Grouping, MemoryModel
from ...plan.grouping.base import Groups, Problem, SizeRounding, distinct
from ...plan.grouping.sorting import sort_windows
from ...plan.models.prior import MemoryPrior, Task

# New tokens per item, as a share of the longest input of its batch, if the caller does not say how many are generated.
ASSUMED_OUTPUT = 0.5


@final
@dataclass(frozen=True)
class LongestFirst(Grouping):
    """Sort all examples, longest first, and cut them into batches that grow as the examples get shorter.

    Shuffling redraws the order of equal lengths, mixes the examples inside each batch and moves whole batches; the
    sizes stay the same in every epoch.

    Args:
        rule: how batches grow; None keeps ``batch_size`` items.
        batch_size: items of the first batch.
        keep_first: this many of the longest batches come first in every epoch.
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
        without_last = self.drop_last and self._last_is_short(sizes)
        return arrange(problem, indices, sizes, self.keep_first, self.balance_over, without_last=without_last)

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

    def _last_is_short(self, sizes: IntArray) -> bool:
        return bool(sizes[-1] < (self.batch_size if len(sizes) == 1 else sizes[-2]))


def _longest_first(problem: Problem) -> npt.NDArray[np.int32]:
    if problem.num_axes == 1:
        return sort_windows(problem, 1, shuffle=problem.shuffle).indices
    # Ties keep their order: on several axes, other neighbours pad differently, and epochs would differ in length.
    return np.argsort(-problem.lengths.sum(axis=1, dtype=np.int64), kind="stable").astype(np.int32)


def arrange(
    problem: Problem,
    indices: npt.NDArray[np.int32],
    sizes: IntArray,
    keep_first: int,
    run_length: int,
    *,
    without_last: bool = False,
) -> Groups:
    """Return batches in the order of the epoch: as they are, or shuffled after the first of them.

    Args:
        problem: the lengths, and how to shuffle.
        indices: the examples of all batches, one batch after another.
        sizes: how many examples each batch has.
        keep_first: this many batches come first.
        run_length: batches of near-equal cost come in runs of this many.
        without_last: leave out the last of the batches.
    """
    starts = np.cumsum(sizes) - sizes
    padded = np.maximum.reduceat(problem.lengths[indices], starts, axis=0).astype(np.int64)
    order = np.arange(len(sizes))
    if problem.shuffle:
        indices = _mixed(indices, sizes, problem)
        in_order = -order.astype(np.float64)
        order = problem.order(sizes, padded, in_order, run_length=run_length, keep_first=keep_first)
    if without_last:
        order = order[order != len(sizes) - 1]
    return Groups(indices, starts[order], sizes[order], padded[order])


def _mixed(indices: npt.NDArray[np.int32], sizes: IntArray, problem: Problem) -> npt.NDArray[np.int32]:
    """Shuffle the examples inside each batch."""
    stream = problem.stream(Purpose.ROWS)
    assert stream is not None
    batch = np.repeat(np.arange(len(sizes)), sizes)
    return indices[np.lexsort((words(len(indices), stream), batch))]


@final
@dataclass(frozen=True)
class SizeRule:
    """The rule for the size of a batch.

    A batch of ``n`` items fits if its predicted memory is at most ``threshold`` times that of the first batch. Up to
    ``batch_size`` items it also fits if it needs no more than the first one, which is known to run.
    """

    batch_size: int
    max_batch_size: int
    threshold: float
    max_diff: float | None  # by which share of batch_size a batch may grow, None does not limit it
    task: Task
    new_tokens: int | None = None  # generated per item, None assumes half the longest input of the batch

    def predict(self, num_items: npt.ArrayLike, widths: npt.ArrayLike, reference: int) -> FloatArray:
        """Return the memory of batches of these padded widths, relative to a first one padded to ``reference``."""
        return relative_memory(
            num_items, widths, self.batch_size, reference, task=self.task, new_tokens=self.new_tokens
        )

    def fits(self, num_items: IntArray, widths: IntArray, reference: int) -> npt.NDArray[np.bool_]:
        """Return whether batches of these padded widths fit, after a first one padded to ``reference``."""
        predicted = self.predict(num_items, widths, reference)
        known = np.where(num_items <= self.batch_size, max(self.threshold, 1.0), self.threshold)
        return np.less_equal(predicted, known)


def relative_memory(
    num_items: npt.ArrayLike,
    max_length: npt.ArrayLike,
    reference_items: int,
    reference_max_length: int,
    *,
    task: Task,
    new_tokens: int | None = None,
) -> FloatArray:
    """Return the memory of batches relative to a reference batch.

    It grows with the number of items and with the length, and is exactly 1 for the reference itself. For generation,
    an item takes memory that does not depend on its length, so batches grow less than in training.

    Args:
        num_items: items of each batch.
        max_length: padded length of each batch; the sum if several axes are padded.
        reference_items: items of the reference.
        reference_max_length: its padded length.
        task: ``"train"`` or ``"generate"``.
        new_tokens: tokens generated per item, the same in every batch. None assumes half the longest input of the
            batch, so a batch of short inputs also has short outputs.

    >>> relative_memory([8, 16, 16], [512, 512, 64], 8, 512, task="train").round(3).tolist()
    [1.0, 2.0, 0.25]
    """
    items, lengths = np.broadcast_arrays(num_items, max_length)
    shapes = np.stack([items.ravel(), lengths.ravel()], axis=1)
    reference = (reference_items, reference_max_length)
    prior = MemoryModel.pretrained(task)
    if task == "generate" and new_tokens is None:
        relative = _with_output(prior).relative(shapes, reference=reference)
    else:
        relative = prior.relative(shapes, reference=reference, new_tokens=new_tokens if task == "generate" else None)
    return relative.reshape(items.shape)


def _with_output(prior: MemoryPrior) -> MemoryPrior:
    """Return a prior whose unit is a token of input together with its share of the output.

    ``fixed + b × (per_item + (1 + share)·L + square·L²)``, divided by ``1 + share``, has the form of the prior without
    an output, and quotients stay the same.
    """
    unit = 1 + ASSUMED_OUTPUT
    scaled = {name: getattr(prior, name) / unit for name in ("fixed", "per_item", "square", "longer_square")}
    return replace(prior, task="train", **scaled)


def choose_sizes(lengths: npt.NDArray[np.int32], rule: SizeRule, rounding: SizeRounding) -> IntArray:
    """Return the sizes of the batches of examples sorted longest first.

    The first batch takes exactly ``batch_size``. Every later one takes the most that fit, grown from the previous one
    by at most a step, and rounded down, but not below ``batch_size``. The last takes the rest.

    Args:
        lengths: ``(N, axes)``, sorted by falling sum.
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
        sizes.append(next_size.next(most_at(place), len(lengths) - place))
        place += sizes[-1]
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
            # On one axis the first example is the widest, so the number depends only on its width.
            return self._table[self._widths[place]]
        # On several axes a later example may be the widest of its axis: add them one by one.
        window = self._lengths[place : place + self._rule.max_batch_size]
        widths = np.maximum.accumulate(window, axis=0).sum(axis=1, dtype=np.int64)
        counts = np.arange(1, len(widths) + 1)
        return max(1, int(np.count_nonzero(self._rule.fits(counts, widths, self._reference))))

    def _most_by_width(self, widths: IntArray) -> dict[int, int]:
        """Bisect between one item and the most allowed, for all widths at once."""
        # Invariant: low fits (one item always counts as fitting), high does not.
        low = np.ones(len(widths), dtype=np.int64)
        high = np.full(len(widths), self._rule.max_batch_size + 1, dtype=np.int64)
        while (high - low > 1).any():
            middle = (low + high) // 2
            good = self._rule.fits(middle, widths, self._reference)
            low, high = np.where(good, middle, low), np.where(good, high, middle)
        return dict(zip(widths.tolist(), low.tolist(), strict=True))


def growth_step(batch_size: int, max_diff: float, rounding: SizeRounding) -> int:
    """Return by how many items a batch may exceed the last: ``int(batch_size × max_diff)``, or more if it needs more.

    >>> growth_step(32, 0.2, SizeRounding()), growth_step(4, 0.2, SizeRounding()), growth_step(4, 0.2, SizeRounding(2))
    (6, 1, 2)
    """
    # The rungs of a ladder lie any distance apart; small steps add up to the next one, so one item is enough.
    least = 1 if rounding.ladder is not None else rounding.multiple_of
    return max(int(min(batch_size * max_diff, MAX_INT32)), least)


@final
class Sizes:
    """The size of one batch after another: limited by what fits, then by the step of growth, then rounded.

    Nothing here raises a size above what fits, so a batch that fits still fits afterwards.

    Args:
        batch_size: the size of the first batch, below which no size is rounded.
        step: the most items to grow by; None does not limit growth.
        rounding: rounds down to even or friendly sizes.

    >>> sizes = Sizes(32, 6, SizeRounding(2))
    >>> [sizes.next(most, 1000) for most in (64, 64, 45)]
    [38, 44, 44]
    """

    def __init__(self, batch_size: int, step: int | None, rounding: SizeRounding) -> None:
        self._batch_size = self._reached = batch_size
        self._step = step
        self._round: Callable[[int], int] = cache(rounding.round_one)

    def next(self, most: int, left: int) -> int:
        """Return the size of the next batch, of which ``most`` items fit and ``left`` are left."""
        # The size before rounding grows: rounding must not slow it down, nor keep it from the next rung of a ladder.
        limit = most if self._step is None else min(most, max(self._reached + self._step, self._batch_size))
        self._reached = limit
        if left <= limit:
            return left
        return max(self._round(limit), min(limit, self._batch_size))
