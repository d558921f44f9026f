"""What a plan is worth. Every arm is judged by these functions, from only its batches and the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.signedinteger[Any]]
FloatArray = npt.NDArray[np.float64]

WORLD_SIZE = 8
# The length at which attention costs as much as everything else in the analytic cost below.
COST_LENGTH = 1024


@final
@dataclass(frozen=True)
class Batches:
    """The batches of one epoch: batch ``i`` holds ``indices[offsets[i]:offsets[i + 1]]``.

    Args:
        indices: example numbers, all batches one after the other.
        offsets: where each batch begins, and the end of the last; shape ``(num_batches + 1,)``.
        padded_lengths: what the examples of a batch are padded to, ``(B,)`` or ``(B, axes)``; the longest if None.
        capacity: for packers, the tokens of one row; None for padded batches.
        num_rows: for packers, the rows of each batch; one row a batch if None.
    """

    indices: IntArray
    offsets: IntArray
    padded_lengths: IntArray | None = None
    capacity: int | None = None
    num_rows: IntArray | None = None

    def __post_init__(self) -> None:
        if len(self.offsets) < 2 or self.offsets[0] != 0 or self.offsets[-1] != len(self.indices):
            raise ValueError(f"offsets must run from 0 to {len(self.indices)}, got {self.offsets!r}")
        if (np.diff(self.offsets) < 1).any():
            raise ValueError("a batch is empty; every batch must hold at least one example")

    @staticmethod
    def from_lists(batches: Sequence[Sequence[int]], *, capacity: int | None = None) -> Batches:
        """Make batches of a list of lists of example numbers."""
        sizes = [len(batch) for batch in batches]
        indices = np.fromiter((index for batch in batches for index in batch), np.int64, sum(sizes))
        return Batches(indices, np.concatenate([[0], np.cumsum(sizes)]), capacity=capacity)

    @staticmethod
    def of_size(indices: Sequence[int] | IntArray, size: int) -> Batches:
        """Cut an order of examples into batches of one size; the last may be smaller."""
        order = np.asarray(indices, dtype=np.int64)
        return Batches(order, np.append(np.arange(0, len(order), size), len(order)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> IntArray:
        """Examples in each batch."""
        return np.diff(self.offsets)

    def real_tokens(self, lengths: IntArray) -> IntArray:
        """Tokens in each batch without padding, of all axes together."""
        return np.add.reduceat(totals(lengths)[self.indices], self.offsets[:-1])

    def shapes(self, lengths: IntArray) -> IntArray:
        """Rows and columns of each batch as the device sees it, shape ``(num_batches, 1 + axes)``."""
        if self.capacity is not None:
            rows = np.ones(len(self), dtype=np.int64) if self.num_rows is None else self.num_rows
            return np.stack([rows, np.full(len(self), self.capacity)], axis=1)
        longest = np.maximum.reduceat(_columns(lengths)[self.indices], self.offsets[:-1])
        if self.padded_lengths is None:
            return np.column_stack([self.sizes, longest])
        if (_columns(self.padded_lengths) < longest).any():
            raise ValueError("a batch is padded to less than its longest example")
        return np.column_stack([self.sizes, self.padded_lengths])

    def padded_tokens(self, lengths: IntArray) -> IntArray:
        """Tokens in each batch with padding; a packed row counts in full, an overfull one as it is."""
        shapes = self.shapes(lengths)
        padded: IntArray = shapes[:, 0] * shapes[:, 1:].sum(axis=1)
        return padded if self.capacity is None else np.maximum(padded, self.real_tokens(lengths))

    def costs(self, lengths: IntArray) -> FloatArray:
        """``tokens × (1 + L / 1024)`` of each batch: an analytic cost, not a measured time.

        A padded batch computes every padded token at the padded length. A packed row attends inside each
        example only, so its cost is the sum over its examples.
        """
        if self.capacity is None:
            shapes = self.shapes(lengths)
            rows, columns = shapes[:, 0], shapes[:, 1:].sum(axis=1)
            return np.asarray(rows * columns * (1 + columns / COST_LENGTH))
        own = lengths[self.indices].astype(np.float64)
        return np.add.reduceat(own * (1 + own / COST_LENGTH), self.offsets[:-1])


def totals(lengths: IntArray) -> IntArray:
    """The length of each example, of all axes together."""
    return lengths if lengths.ndim == 1 else lengths.sum(axis=1)


def _columns(lengths: IntArray) -> IntArray:
    return lengths[:, None] if lengths.ndim == 1 else lengths


def floor_batches(lengths: IntArray, budget: int) -> int:
    """The fewest batches any plan could have: ``ceil(total tokens / budget)``."""
    return -(-int(lengths.sum()) // budget)


def straggler_waste(costs: FloatArray, *, world_size: int = WORLD_SIZE) -> float | None:
    """Share of device time spent waiting when consecutive batches form a step: ``1 - sum(mean) / sum(max)``.

    A last step that does not fill every rank is left out; None when no step is full.
    """
    steps = costs[: len(costs) // world_size * world_size].reshape(-1, world_size)
    return float(1 - steps.mean(axis=1).sum() / steps.max(axis=1).sum()) if len(steps) else None


def order_correlation(batches: Batches, lengths: IntArray, *, world_size: int) -> float | None:
    """Lag-1 correlation of the mean length of consecutive steps; None where it is not defined.

    Sorted steps give a value near 1, steps in random order a value near 0.
    """
    num_steps = len(batches) // world_size
    edges = batches.offsets[: num_steps * world_size + 1 : world_size]
    if num_steps < 3:
        return None
    ordered = totals(lengths)[batches.indices[: edges[-1]]]
    means = np.add.reduceat(ordered, edges[:-1]) / np.diff(edges)
    before, after = means[:-1] - means[:-1].mean(), means[1:] - means[1:].mean()
    scale = np.sqrt((before @ before) * (after @ after))
    # Equal means leave rounding errors only, whose correlation says nothing.
    return float(before @ after / scale) if scale > 1e-9 * means.mean() ** 2 else None


def recurrence(first: Batches, second: Batches, *, num_examples: int) -> float | None:
    """Probability that two examples sharing a batch in one epoch share one again in the next.

    Exact: pairs are counted in the cells (batch in the first epoch, batch in the second). None when no batch
    of the first epoch holds a pair.
    """
    here, there = _batch_of(first, num_examples), _batch_of(second, num_examples)
    both = (here >= 0) & (there >= 0)
    cells = np.unique(here[both] * len(second) + there[both], return_counts=True)[1]
    pairs = _num_pairs(np.bincount(here[here >= 0]))
    return _num_pairs(cells) / pairs if pairs else None


def coverage(batches: Batches, *, num_examples: int) -> tuple[int, int]:
    """How many examples no batch holds, and how many places are repeats."""
    times = np.bincount(batches.indices, minlength=num_examples)
    return int((times == 0).sum()), int(np.maximum(times - 1, 0).sum())


def summarize(batches: Batches, next_epoch: Batches, lengths: IntArray, budget: int) -> dict[str, Any]:
    """All figures of one plan, ready for JSON.

    Args:
        batches: the first epoch.
        next_epoch: the second, as the same arm reshuffles it.
        lengths: one length an example.
        budget: the largest number of padded tokens per batch.

    Returns:
        A dict of plain numbers; None where a figure is not defined.
    """
    real, padded = batches.real_tokens(lengths), batches.padded_tokens(lengths)
    missing, repeated = coverage(batches, num_examples=len(lengths))
    return {
        "batches": len(batches),
        "floor": floor_batches(lengths, budget),
        "padding": float((padded.sum() - real.sum()) / padded.sum()),
        "budget_used": float(real.mean() / budget),
        "largest": float(padded.max() / budget),
        "shapes": len(np.unique(batches.shapes(lengths), axis=0)),
        "straggler_waste": straggler_waste(batches.costs(lengths)),
        "recurrence": recurrence(batches, next_epoch, num_examples=len(lengths)),
        "order_correlation": order_correlation(batches, lengths, world_size=WORLD_SIZE),
        "order_correlation_batches": order_correlation(batches, lengths, world_size=1),
        "missing": missing,
        "repeated": repeated,
    }


def _batch_of(batches: Batches, num_examples: int) -> IntArray:
    """The batch each example is in, -1 for none; a repeated example counts where it comes last."""
    batch_of = np.full(num_examples, -1, dtype=np.int64)
    batch_of[batches.indices] = np.repeat(np.arange(len(batches)), batches.sizes)
    return batch_of


def _num_pairs(counts: IntArray) -> int:
    return int((counts * (counts - 1) // 2).sum())
