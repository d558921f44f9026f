"""Groups that need several packed rows: which rows hold them, and which rows share a batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..._random import Purpose, permutation
from ..._types import IntArray
from .._order import gather
from ._cutting import cut_rest
from .base import Groups, Problem
from .packed import narrow_rows, rows_that_fit


@final
class Members(NamedTuple):
    """Groups of examples: group ``i`` is ``examples[offsets[i]:offsets[i + 1]]``; the length of each example."""

    examples: npt.NDArray[np.int32]
    offsets: IntArray
    lengths: npt.NDArray[np.int32]  # of ``examples``

    @property
    def sizes(self) -> IntArray:
        """Return the examples of each group."""
        return np.diff(self.offsets)

    @property
    def totals(self) -> IntArray:
        """Return the tokens of each group."""
        return np.add.reduceat(self.lengths.astype(np.int64), self.offsets[:-1])

    def falling(self, group: int) -> list[tuple[int, int]]:
        """Return the length and the example of each member, the longest first."""
        part = slice(*self.offsets[group : group + 2].tolist())
        pairs = zip(self.lengths[part].tolist(), self.examples[part].tolist(), strict=True)
        return sorted(pairs, key=lambda pair: -pair[0])


@final
class _Block:
    """Rows that stay together, because each holds members of groups that others hold too."""

    def __init__(self, capacity: int, most_rows: int) -> None:
        self._capacity = capacity
        self._most_rows = most_rows
        self._rooms: list[tuple[int, int]] = []  # the room of each row and its number, ascending
        self._room = most_rows * capacity
        self.rows: list[list[int]] = []

    def add(self, members: Sequence[tuple[int, int]]) -> bool:
        """Put each member of a group into the row that it fills best, or return False where one has no room."""
        total = sum(length for length, _ in members)
        if total > self._room:
            return False
        rooms, num_rows = self._rooms.copy(), len(self.rows)
        chosen = []
        for length, _ in members:
            place = bisect_left(rooms, (length, -1))
            if place < len(rooms):
                room, row = rooms.pop(place)
            elif num_rows < self._most_rows and length <= self._capacity:
                room, row = self._capacity, num_rows
                num_rows += 1
            else:
                return False
            insort(rooms, (room - length, row))
            chosen.append(row)
        self._rooms = rooms
        self._room -= total
        self.rows += [[] for _ in range(num_rows - len(self.rows))]
        for row, (_, example) in zip(chosen, members, strict=True):
            self.rows[row].append(example)
        return True

    @property
    def rooms(self) -> list[int]:
        """Return the room of each row."""
        return [room for room, _ in sorted(self._rooms, key=lambda pair: pair[1])]


def rows_hold(members: Members, capacity: int, most_rows: int) -> npt.NDArray[np.bool_]:
    """Return whether ``most_rows`` rows hold each group, packed by itself.

    >>> members = Members(np.arange(4), np.array([0, 2, 4]), np.array([3, 3, 5, 4]))
    >>> rows_hold(members, 6, 1).tolist()
    [True, False]
    """
    is_short = np.maximum.reduceat(members.lengths, members.offsets[:-1]) <= capacity
    held = is_short & ((members.totals <= capacity) | (members.sizes <= most_rows))
    for group in np.flatnonzero(is_short & ~held & (members.totals <= most_rows * capacity)).tolist():
        held[group] = _Block(capacity, most_rows).add(members.falling(group))
    return held


# Groups of at most a quarter of a row fill rows well as if each were one example.
_NARROW = 4


def group_blocks(problem: Problem, members: Members, capacity: int) -> Groups:
    """Pack large groups over several rows first, the others into the room they leave and into new rows.

    A block is what the rows of such groups make together, at most a batch; new rows fill it up.
    """
    rows_per_batch = rows_that_fit(problem, capacity)
    totals = members.totals
    is_wide = (totals > capacity // _NARROW) & (members.sizes > 1)
    stream = problem.stream(Purpose.ROWS)
    wide = np.flatnonzero(is_wide)
    wide = wide if stream is None else wide[permutation(len(wide), stream)]
    most_rows = int(problem.budget.max_items(np.array([[capacity]]))[0])
    blocks = _fill_blocks(members, wide, capacity, rows_per_batch, most_rows)
    rooms = [room for block in blocks for room in block.rooms]
    narrow = np.flatnonzero(~is_wide)
    units, row_of = narrow_rows(problem, totals[narrow].astype(np.int32), capacity, rooms)
    indices, starts, sizes = _lay_out(members, blocks, narrow[units], row_of)
    num_new = len(sizes) - len(rooms)
    new = np.arange(num_new) if stream is None else permutation(num_new, stream)
    order, rows, num_short = _deal(
        [len(block.rows) for block in blocks], (len(rooms) + new).tolist(), rows_per_batch, problem
    )
    return Groups(
        indices=indices,
        starts=starts[order],
        sizes=sizes[order],
        padded=np.full((len(rows), 1), capacity, dtype=np.int64),
        num_short=num_short,
        rows=np.array(rows, dtype=np.int64),
    )


_OPEN = 16  # blocks that a group may still go to


def _fill_blocks(members: Members, wide: IntArray, capacity: int, rows_per_batch: int, most_rows: int) -> list[_Block]:
    """Add each group to the first of the newest blocks that has room; one that is larger by itself has its own."""
    blocks: list[_Block] = []
    for group in wide.tolist():
        falling = members.falling(group)
        if any(block.add(falling) for block in blocks[-_OPEN:]):
            continue
        for limit in (rows_per_batch, most_rows):
            block = _Block(capacity, limit)
            if block.add(falling):
                blocks.append(block)
                break
        else:
            raise AssertionError("a group that no batch holds is oversize")
    return blocks


def _lay_out(
    members: Members, blocks: list[_Block], narrow: IntArray, row_of: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], IntArray, IntArray]:
    """Return the examples row by row, and where each row starts and its size."""
    in_blocks = [row for block in blocks for row in block.rows]
    alone = np.array([example for row in in_blocks for example in row], dtype=np.int32)
    # Places of slices: single members in front of the groups, both of a row in this order.
    examples = np.concatenate([alone, members.examples])
    starts = np.concatenate([np.arange(len(alone)), len(alone) + members.offsets[narrow]])
    counts = np.concatenate([np.ones(len(alone), dtype=np.int64), members.sizes[narrow]])
    rows = np.concatenate([np.repeat(np.arange(len(in_blocks)), [len(row) for row in in_blocks]), row_of])
    order = np.argsort(rows, kind="stable")
    indices, _ = gather(examples, starts[order], counts[order])
    sizes = np.bincount(rows, weights=counts).astype(np.int64)
    return indices, np.cumsum(sizes) - sizes, sizes


def _deal(blocks: list[int], new: list[int], rows_per_batch: int, problem: Problem) -> tuple[list[int], list[int], int]:
    """Return the order of the rows, the rows of each batch, and how many batches the end of the data cut short."""
    order: list[int] = []
    rows: list[int] = []
    first = used = 0
    for num in blocks:
        order += range(first, first + num)
        first += num
        more = new[used : used + max(0, rows_per_batch - num)]
        order += more
        used += len(more)
        rows.append(num + len(more))
    left = len(new) - used
    if left == 0:
        return order, rows, int(rows[-1] < rows_per_batch)
    full, rest = divmod(left, rows_per_batch)
    short = cut_rest(rest, rows_per_batch, problem.rounding)
    return order + new[used:], rows + [rows_per_batch] * full + short, len(short)
