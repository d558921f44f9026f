"""Splitting: logical batches cut by number, by budget, or by what has fitted so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .._checks import as_whole
from .._lengths import as_lengths
from ..errors import ArgumentError
from ..plan import Budget, PadTo
from ..plan.budget import check_budget
from ._logical_batches import ExampleBatch, Lengths, LogicalBatch, Part
from .shape_splitting import is_within, split_by_shapes


def split_by_budget(
    lengths: npt.ArrayLike, budget: Budget, *, order: npt.ArrayLike | None = None, least_parts: int = 1
) -> list[list[int]]:
    """Cut the examples of one update into micro-batches that fit a budget, for a training loop of your own.

    ``Stepper(micro_batch=budget)`` cuts its batches like this. An example that is over the budget is cut off alone.

    Args:
        lengths: of the examples, ``(B,)`` or ``(B, axes)``, as they will be padded.
        budget: what one micro-batch may cost.
        order: a permutation of the examples to cut in; None sorts them by length, longest first, for little padding.
        least_parts: make at least this many micro-batches, if there are that many examples.

    Returns:
        The indices of the examples of each micro-batch.

    >>> from batchwright import MaxTokens
    >>> split_by_budget([3, 9, 4, 8], MaxTokens(20))  # 2 × 9 tokens, then 2 × 4
    [[1, 3], [2, 0]]
    """
    rows = as_lengths(lengths)
    if order is None:
        places = _longest_first(rows)
    else:
        places = np.asarray(order)
        if not np.array_equal(np.sort(places), np.arange(len(rows))):
            raise ArgumentError(f"order must be a permutation of the {len(rows)} examples, each index once")
    most = _most_items(len(rows), as_whole("least_parts", least_parts, least=1))
    return _cut(rows, places, check_budget(budget), 1.0, most)


def split(
    batch: LogicalBatch,
    *,
    budget: Budget | None,
    limit: float,
    order: npt.NDArray[np.int64] | None = None,
    least_parts: int = 1,
    pad_to: PadTo | None = None,
) -> Sequence[Part]:
    """Cut a logical batch so that every micro-batch costs at most ``limit``; one example may cost more.

    Args:
        batch: the logical batch.
        budget: counts the cost as a share of the budget; None counts tokens if lengths are known, else items.
        limit: the most that a micro-batch may cost.
        order: the order to cut in; None sorts by length, longest first, where that makes micro-batches narrower.
        least_parts: make at least this many micro-batches, if there are that many examples.
        pad_to: cut examples that will be collated into its static shapes, unless one of them is over the limit or
            ``order`` or ``least_parts`` ask for something else.

    Returns:
        The places of the examples of each micro-batch.

    Raises:
        ArgumentError: the batch only runs whole, and one micro-batch is too large.
    """
    parts = None
    if pad_to is not None and pad_to.shapes and order is None and is_within(pad_to, budget, limit):
        parts = _static_parts(batch, pad_to)
    if parts is None or len(parts) < least_parts:
        parts = _parts_of(batch, budget, limit, order, least_parts)
    if len(parts) > 1 and batch.refusal is not None:
        raise batch.refusal
    return parts


def _static_parts(batch: LogicalBatch, pad_to: PadTo) -> Sequence[Part] | None:
    """Return micro-batches of static shapes; None for a batch of tensors, whose width is settled."""
    if not isinstance(batch, ExampleBatch) or batch.lengths is None:
        return None
    return split_by_shapes(batch.lengths, pad_to)


def _parts_of(
    batch: LogicalBatch, budget: Budget | None, limit: float, order: npt.NDArray[np.int64] | None, least_parts: int
) -> Sequence[Part]:
    if batch.is_flat and order is None and least_parts == 1 and math.isinf(limit):
        return [range(batch.num_examples)]  # without a look at lengths, which may lie on the device
    if order is None and batch.gains_from_sorting:
        assert batch.lengths is not None
        order = _longest_first(batch.lengths)
    most = _most_items(batch.num_examples, least_parts)
    if batch.lengths is None:
        most = min(most, batch.num_examples if math.isinf(limit) else max(1, math.floor(limit)))
        return near_equal(order, batch.num_examples, -(-batch.num_examples // most))
    order = np.arange(batch.num_examples) if order is None else order
    return _cut(batch.lengths, order, budget, limit, most, is_flat=batch.is_flat)


def _cut(
    lengths: Lengths,
    order: npt.NDArray[np.int64],
    budget: Budget | None,
    limit: float,
    most: int,
    is_flat: bool = False,
) -> list[list[int]]:
    """Take as many examples as fit off the front of an order, at most ``most``, until none is left."""
    parts = []
    place = 0
    while place < len(order):
        over = _costs(lengths[order[place : place + most]], budget, is_flat) > limit
        # argmax finds the first example that is too much; it is the first of the next part, or alone in this one.
        size = max(1, int(np.argmax(over))) if over.any() else len(over)
        parts.append(order[place : place + size].tolist())
        place += size
    return parts


def _most_items(num: int, least_parts: int) -> int:
    """Return the most examples of a part, so that there are at least that many parts."""
    most = -(-num // least_parts)
    # 4 examples in 3 parts: parts of 2 would be only 2.
    return most if -(-num // most) >= least_parts else max(1, num // least_parts)


def cost_of(batch: LogicalBatch, part: Part, budget: Budget | None) -> float:
    """Return the cost of a micro-batch in the unit of ``split``."""
    if batch.lengths is None:
        return float(len(part))
    return float(_costs(batch.lengths[part], budget, batch.is_flat)[-1])


def _costs(lengths: Lengths, budget: Budget | None, is_flat: bool) -> npt.NDArray[np.float64]:
    """Return the cost of the first 1, 2, … examples, padded to the longest; flat ones count as if equally long."""
    counts = np.arange(1, len(lengths) + 1)
    tops = np.maximum.accumulate(lengths, axis=0).astype(np.int64)
    if is_flat:
        tops = -(-lengths.cumsum(axis=0, dtype=np.int64) // counts[:, None])
    if budget is None:
        return (counts * tops.sum(axis=1)).astype(np.float64)
    return np.asarray(budget.fraction(counts, tops), dtype=np.float64)


def _longest_first(lengths: Lengths) -> npt.NDArray[np.int64]:
    return np.argsort(-lengths.sum(axis=1), kind="stable")


def near_equal(order: npt.NDArray[np.int64] | None, num: int, num_parts: int) -> list[Part]:
    """Return parts that differ by at most one example, larger ones first, in an order or in that of the batch."""
    places: Part = range(num) if order is None else order.tolist()
    size, rest = divmod(num, num_parts)
    stops = [size * place + min(place, rest) for place in range(num_parts + 1)]
    return [places[start:stop] for start, stop in pairwise(stops)]
