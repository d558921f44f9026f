"""The order of batches: near-equal cost in a step, random otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .._random import below, order_of, permutation, words
from .._types import FloatArray, IntArray


def step_cost(num_items: IntArray, padded: IntArray) -> FloatArray:
    """Return the work of a batch where nothing was measured: ``tokens × (1 + L / 1024)``, L the sum of the axes.

    The second factor stands for attention, whose work grows with the square of the length.

    >>> step_cost(np.array([2, 1]), np.array([[512], [1024]])).tolist()
    [1536.0, 2048.0]
    """
    total = np.asarray(padded).sum(axis=1, dtype=np.float64)
    return np.asarray(num_items) * total * (1 + total / 1024)


def order_batches(
    cost: FloatArray,
    demand: FloatArray,
    stream: np.random.PCG64,
    *,
    run_length: int,
    keep_first: int,
) -> IntArray:
    """Return a random order in which aligned blocks of batches cost nearly the same, for every block size at once.

    Batches sorted by cost form runs of ``run_length``; inside a run halves are swapped at random at every level, and
    the runs are shuffled. So the W batches of a step are neighbours in cost for every W that divides the run, and
    the order is the same for all of them. Runs as long as a step leave the order of the steps completely random.

    Args:
        cost: expected work of each batch; ranks wait for the largest of a step.
        demand: how likely each batch is to run out of memory.
        stream: random bits.
        run_length: batches of a run; 1 gives a completely random order.
        keep_first: this many batches of the largest demand come first.
    """
    run_length = min(run_length, len(cost) + 1)  # longer ones are as good as one more than there are
    by_cost = _by_falling_cost(cost, words(len(cost), stream))
    first = most_demanding(demand, keep_first)
    if keep_first:
        left = np.ones(len(cost), dtype=bool)
        left[first] = False
        by_cost = by_cost[left[by_cost]]
    fill, by_cost = _take_slice(by_cost, -len(first) % run_length, stream)
    last, by_cost = _take_slice(by_cost, len(by_cost) % run_length, stream)
    runs = _swap_halves(by_cost.reshape(-1, run_length), stream)
    runs = runs[permutation(len(runs), stream)]
    return np.concatenate([first, fill, runs.ravel(), last])


def most_demanding(demand: FloatArray, num: int) -> IntArray:
    """Return the batches of the largest demand; of equal ones the first.

    >>> most_demanding(np.array([2.0, 9.0, 9.0]), 2).tolist()
    [1, 2]
    """
    return np.lexsort((np.arange(len(demand)), -demand))[:num] if num else np.empty(0, dtype=np.int64)


def _by_falling_cost(cost: FloatArray, chance: npt.NDArray[np.uint64]) -> IntArray:
    """Return the order of falling cost; chance decides between batches that cost the same."""
    costs = np.unique(cost)
    if not 0 < len(costs) <= _MOST_RANKS:
        return np.lexsort((chance, -cost))
    return order_of(chance, np.uint64(len(costs) - 1) - np.searchsorted(costs, cost).astype(np.uint64))


_MOST_RANKS = 1 << 16  # above this, finding the rank of a cost takes longer than sorting by it


def fitting_run(num_batches: int, run_length: int) -> int:
    """Halve the run until an epoch holds at least 16 of them, or 4 of at most 8 batches: the first rules of a plan.

    They had runs of 64 for every number of ranks, which an epoch of few batches had to shorten to stay random.

    >>> fitting_run(10_000, 64), fitting_run(300, 64), fitting_run(56, 64), fitting_run(5, 64)
    (64, 16, 8, 1)
    """
    longest = max(num_batches // 16, min(8, num_batches // 4), 1)
    while run_length > longest:
        run_length = run_length // 2 if run_length % 2 == 0 else 1
    return run_length


def _take_slice(by_cost: IntArray, num: int, stream: np.random.PCG64) -> tuple[IntArray, IntArray]:
    """Take ``num`` neighbours in cost from a random place, in random order; return them and the others."""
    num = min(num, len(by_cost))
    start = below(len(by_cost) - num + 1, stream)
    taken = by_cost[start : start + num]
    return taken[permutation(num, stream)], np.concatenate([by_cost[:start], by_cost[start + num :]])


def _swap_halves(runs: IntArray, stream: np.random.PCG64) -> IntArray:
    """Swap the halves of every block at random: whole runs first, then halves, …; an odd block is shuffled."""
    shape = runs.shape
    block = shape[1]
    while block > 1:
        if block % 2:
            blocks = runs.reshape(-1, block)
            chance = words(blocks.size, stream).reshape(blocks.shape)
            return np.take_along_axis(blocks, np.argsort(chance, axis=1), axis=1).reshape(shape)
        halves = runs.reshape(-1, 2, block // 2)
        swap = (words(len(halves), stream) & np.uint64(1)).astype(bool)
        runs = np.where(swap[:, None, None], halves[:, ::-1], halves).reshape(shape)
        block //= 2
    return runs


def gather(
    indices: npt.NDArray[np.int32], starts: IntArray, sizes: IntArray
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Copy slices one after the other.

    Returns:
        The copied indices, and the offset of each slice with the total at the end.
    """
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    copied = np.empty(offsets[-1], dtype=np.int32)
    for begin, end in _pieces(offsets):
        copied[offsets[begin] : offsets[end]] = indices[_positions(starts, sizes, offsets, begin, end)]
    return copied, offsets


def sum_work(indices: npt.NDArray[np.int32], starts: IntArray, sizes: IntArray, lengths: IntArray) -> FloatArray:
    """Return the summed ``step_cost`` of the examples in each slice, as if every example ran by itself."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    sums = np.empty(len(sizes))
    for begin, end in _pieces(offsets):
        examples = indices[_positions(starts, sizes, offsets, begin, end)]
        work = step_cost(np.array(1), lengths[examples])
        sums[begin:end] = np.add.reduceat(work, offsets[begin:end] - offsets[begin])
    return sums


def _pieces(offsets: IntArray) -> Iterator[tuple[int, int]]:
    """Walk over slices in pieces of about 65,536 positions, which stay in the cache and bound the memory."""
    begin = 0
    while begin < len(offsets) - 1:
        end = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + (1 << 16), side="right")) - 1)
        yield begin, end
        begin = end


def _positions(starts: IntArray, sizes: IntArray, offsets: IntArray, begin: int, end: int) -> IntArray:
    positions = np.repeat(starts[begin:end] - offsets[begin:end], sizes[begin:end])
    positions += np.arange(offsets[begin], offsets[end])
    return positions


def longest_of(lengths: npt.NDArray[np.int32], indices: npt.NDArray[np.int32], starts: IntArray) -> IntArray:
    """Return the longest length per axis of batches that follow each other in ``indices``, ``(batches, axes)``."""
    # Axis by axis: over short rows a reduction is slow.
    return np.stack([np.maximum.reduceat(column.take(indices), starts) for column in lengths.T], axis=1)
