"""Divide a plan over ranks: equal steps for every rank, the last step cut into one piece per rank."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from .._types import IntArray
from ._batches import PlanArrays
from ._order import gather, longest_of
from .collating import pad_batches

AnyPlan = TypeVar("AnyPlan", bound=PlanArrays)


def shard(plan: AnyPlan, world_size: int, *, first_batch: int = 0) -> AnyPlan:
    """Divide a plan over ranks: batches ``i × world_size + rank`` form step ``i``.

    Args:
        plan: an epoch as planned for one rank.
        world_size: ranks.
        first_batch: the batches before this one were consumed already.
    """
    tail = len(plan) - (len(plan) - first_batch) % world_size  # the first batch that fills no step
    if plan.settings.remainder == "drop":
        return _part(plan, first_batch, tail, world_size)
    whole = _part(plan, first_batch, len(plan), world_size)
    return whole if tail == len(plan) else _spread(whole, tail - first_batch)


def _part(plan: AnyPlan, first: int, last: int, world_size: int) -> AnyPlan:
    if first == 0 and last == len(plan):
        return replace(plan, world_size=world_size)
    start, stop = int(plan.offsets[first]), int(plan.offsets[last])
    rows = plan.row_offsets
    if rows is not None:
        low, high = np.searchsorted(rows, [start, stop])  # rows lie within batches, so both are borders of rows
        rows = rows[low : high + 1] - start
    return replace(
        plan,
        indices=plan.indices[start:stop],
        offsets=plan.offsets[first : last + 1] - start,
        shapes=plan.shapes[first:last],
        row_offsets=rows,
        world_size=world_size,
        num_dropped=plan.num_dropped + int(plan.offsets[-1]) - stop,
    )


@final
class _Tail(NamedTuple):
    """The batches of the last step, counted from their first example."""

    unit_offsets: IntArray  # where a piece may begin
    group_bounds: IntArray  # a piece lies between two of these
    row_offsets: IntArray | None  # where packed rows begin


def _tail_of(plan: PlanArrays, tail: int) -> _Tail:
    start = int(plan.offsets[tail])
    bounds = plan.offsets[tail:] - start
    places = _places_between_groups(plan, start)
    if plan.row_offsets is None:
        return _Tail(places, bounds, None)
    rows = plan.row_offsets[np.searchsorted(plan.row_offsets, start) :] - start
    whole_rows = rows[np.isin(rows, places)]
    if len(whole_rows) > plan.world_size:
        return _Tail(whole_rows, bounds, rows)
    return _Tail(places, whole_rows, rows)  # fewer rows than ranks: rows are cut too


def _places_between_groups(plan: PlanArrays, start: int) -> IntArray:
    """Return the places from ``start`` on, counted from there, before and after which no group has members."""
    groups, num = plan.settings.groups, len(plan.indices) - start
    if groups is None:
        return np.arange(num + 1)
    _, ids = np.unique(groups.ids[plan.indices[start:]], return_inverse=True)
    first, last = np.full(num, num), np.zeros(num, dtype=np.int64)
    np.minimum.at(first, ids, np.arange(num))
    np.maximum.at(last, ids, np.arange(num))
    # One more group is open from the place after its first member on, one fewer after its last.
    num_open = np.bincount(first[ids] + 1, minlength=num + 1) - np.bincount(last[ids] + 1, minlength=num + 1)
    return np.flatnonzero(np.cumsum(num_open) == 0)


def _spread(plan: AnyPlan, tail: int) -> AnyPlan:
    """Replace the batches from ``tail`` on by one piece per rank."""
    start = int(plan.offsets[tail])
    parts = _tail_of(plan, tail)
    # A unit is what a piece must keep whole: an example, a packed row, or a group of examples.
    # Units per batch of the tail, cut into pieces; ``cuts`` are the borders of the pieces, counted in examples.
    units = parts.unit_offsets
    counts = np.diff(np.searchsorted(units, parts.group_bounds)).tolist()
    pieces, missing = spread_tail(counts, plan.world_size)
    cuts = units[np.concatenate([[0], np.cumsum(pieces)])]
    # Ranks without a piece get one repeated unit each, appended to the indices.
    repeated = np.resize(np.arange(len(units) - 1), missing)
    again, ends = gather(plan.indices[start:], units[repeated], np.diff(units)[repeated])
    rows = None if parts.row_offsets is None else _cut_rows(parts.row_offsets, cuts, units, repeated)
    indices = np.concatenate([plan.indices, again]) if missing else plan.indices
    cuts = np.concatenate([cuts, cuts[-1] + ends[1:]]).astype(np.int64)
    num_items = np.diff(cuts if rows is None else np.searchsorted(rows, cuts))
    row_offsets = plan.row_offsets
    if row_offsets is not None and rows is not None:
        row_offsets = np.concatenate([row_offsets[: np.searchsorted(row_offsets, start)], start + rows])
    cuts += start
    longest = _longest(plan, indices, row_offsets, cuts)
    padded = pad_batches(plan.pad_to, num_items, longest)
    return replace(
        plan,
        indices=indices,
        offsets=np.concatenate([plan.offsets[:tail], cuts]),
        shapes=np.concatenate([plan.shapes[:tail], np.column_stack([num_items, padded]).astype(np.int32)]),
        row_offsets=row_offsets,
        num_repeated=len(again),
    )


def _cut_rows(rows: IntArray, cuts: IntArray, units: IntArray, repeated: IntArray) -> IntArray:
    """Return where the rows of the pieces begin, those of the repeated units at the end."""
    parts, end = [np.union1d(rows, cuts)], int(cuts[-1])
    for unit in repeated.tolist():
        first, last = units[unit], units[unit + 1]
        inside = parts[0][(parts[0] > first) & (parts[0] <= last)]
        parts.append(end + inside - first)
        end += int(last - first)
    return np.concatenate(parts).astype(np.int64)


def _longest(
    plan: PlanArrays, indices: npt.NDArray[np.int32], rows: npt.NDArray[np.int64] | None, cuts: IntArray
) -> IntArray:
    """Return the longest example of each piece on each axis, or its longest packed row."""
    start = int(cuts[0])
    if rows is None:
        return longest_of(plan.lengths, indices[start:], cuts[:-1] - start)
    tail = rows[np.searchsorted(rows, start) :]
    totals = np.add.reduceat(plan.lengths[indices[start:], 0].astype(np.int64), tail[:-1] - start)
    return np.maximum.reduceat(totals, np.searchsorted(tail, cuts[:-1]))[:, None]


def split_evenly(sizes: list[int], parts: int) -> list[list[int]]:
    """Split groups into ``parts`` pieces in all, none empty, the largest pieces as small as can be.

    Args:
        sizes: items of each group; their sum is at least ``parts``, which is at least their number.
        parts: pieces wanted.

    Returns:
        The piece sizes of each group.

    >>> split_evenly([5, 2], 4)
    [[2, 2, 1], [2]]
    """
    pieces = [1] * len(sizes)
    heap = [(-float(size), place) for place, size in enumerate(sizes)]
    heapq.heapify(heap)
    for _ in range(parts - len(sizes)):
        _, place = heapq.heappop(heap)
        pieces[place] += 1
        heapq.heappush(heap, (-sizes[place] / pieces[place], place))
    return [_near_equal(size, num) for size, num in zip(sizes, pieces, strict=True)]


def _near_equal(size: int, num: int) -> list[int]:
    small, extra = divmod(size, num)
    return [small + 1] * extra + [small] * (num - extra)


def spread_tail(unit_counts: list[int], world_size: int) -> tuple[list[int], int]:
    """Cut the batches of the last, incomplete step into one piece per rank.

    Args:
        unit_counts: units (examples, or packed rows) of each of its batches, fewer than ``world_size`` of them.
        world_size: ranks.

    Returns:
        ``(pieces, repeated)``: the units of each piece in order, and how many ranks are left without one because
        there are fewer units than ranks; those repeat units.

    >>> spread_tail([5, 2], 4)
    ([2, 2, 1, 2], 0)
    >>> spread_tail([2], 4)
    ([1, 1], 2)
    """
    parts = min(world_size, sum(unit_counts))
    pieces = [size for group in split_evenly(unit_counts, parts) for size in group]
    return pieces, world_size - parts
