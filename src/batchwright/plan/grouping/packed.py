"""Packed: several examples per row, by best-fit decreasing."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole
from ..._optional import is_installed
from ..._random import Purpose, permutation
from ..._types import MAX_INT32
from ...errors import ArgumentError, BudgetError
from ._cutting import cut_rest
from .base import Grouping, Groups, Problem
from .sorting import sort_windows

Int32Array = npt.NDArray[np.int32]

_LOW_HALF = 0 if sys.byteorder == "little" else 1
_WINDOW_ROWS = 128  # rows a window is worth: at this many the rows of all three benchmark corpora are full
# Two examples of a row meet again where both fall into one window again. Rows with room are carried on from window to
# window, so an epoch of few rows can have as many windows too. Where a row holds few examples they seldom meet again,
# and more windows would only leave more room: two windows per example of a row are enough.
_MIN_WINDOWS = 12
_WINDOWS_PER_EXAMPLE = 2


def group_rows(problem: Problem, capacity: int) -> Groups:
    """Pack the examples into rows of ``capacity`` and return the rows in random order."""
    rows_per_batch = rows_that_fit(problem, capacity)
    keys = sort_windows(problem, _num_windows(problem, capacity), shuffle=problem.shuffle)
    row_of = pack_rows(keys.values, capacity)
    indices = _by_row(row_of, keys.indices)
    sizes = np.bincount(row_of)
    starts = np.cumsum(sizes) - sizes
    stream = problem.stream(Purpose.ROWS)
    order = np.arange(len(sizes)) if stream is None else permutation(len(sizes), stream)
    full, rest = divmod(len(sizes), rows_per_batch)
    short = cut_rest(rest, rows_per_batch, problem.rounding)
    return Groups(
        indices=indices,
        starts=starts[order],
        sizes=sizes[order],
        padded=np.full((full + len(short), 1), capacity, dtype=np.int64),
        num_short=len(short),
        rows=np.array([rows_per_batch] * full + short, dtype=np.int64),
    )


def narrow_rows(
    problem: Problem, lengths: Int32Array, capacity: int, rooms: Sequence[int]
) -> tuple[Int32Array, Int32Array]:
    """Pack some lengths into the room that rows have, and into new rows.

    Returns:
        The lengths in the order they are packed in, by number, and the row of each; new rows follow the given ones.
    """
    if len(lengths) == 0:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
    items = replace(problem, lengths=lengths[:, None])
    keys = sort_windows(items, _num_windows(items, capacity), shuffle=problem.shuffle)
    return keys.indices, _pack_plain(keys.values, capacity, rooms)


def _num_windows(problem: Problem, capacity: int) -> int:
    """Return into how many windows the examples are divided by chance; none is worth less than a row."""
    num_rows = int(problem.lengths.sum(dtype=np.int64)) / capacity
    windows = num_rows / _WINDOW_ROWS
    if problem.shuffle and problem.rules > 1:  # without shuffling, neighbours are to stay
        enough = min(_MIN_WINDOWS, _WINDOWS_PER_EXAMPLE * problem.num_examples / num_rows)
        windows = max(windows, min(enough, num_rows))
    return max(1, min(round(windows), problem.num_examples))


def _by_row(row_of: npt.NDArray[np.int32], indices: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the examples row by row: one sort of keys that hold row and index."""
    keys = row_of.astype(np.uint64)
    keys <<= np.uint64(32)
    np.bitwise_or(keys, indices, out=keys, casting="unsafe", dtype=np.uint64)
    keys.sort()
    # The index is the low half of each key, read in place.
    return keys.view(np.uint32)[_LOW_HALF::2].astype(np.int32)


def rows_that_fit(problem: Problem, capacity: int) -> int:
    """Return the rows of a batch, or say that not even one fits."""
    if problem.budget.max_items(np.array([[capacity]]))[0] < 1:
        raise BudgetError(
            f"a row of Packed(capacity={capacity}) does not fit {problem.budget}; lower the capacity or raise the "
            "budget"
        )
    return int(problem.sizes(np.array([[capacity]]))[0])


def pack_rows(lengths: Int32Array, capacity: int, *, compiled: bool | None = None) -> Int32Array:
    """Return the row of each example; windows of falling lengths share the rows that still have room.

    Args:
        lengths: at most ``capacity`` each; falling within a window, window after window.
        capacity: tokens a row holds.
        compiled: use numba; None uses it when it is installed and the data are worth its start-up.

    >>> pack_rows(np.array([6, 4, 3, 3, 2, 1], dtype=np.int32), 8, compiled=False).tolist()
    [0, 1, 1, 2, 0, 1]
    """
    if compiled is None:
        worth_it = len(lengths) >= _WORTH_COMPILING and capacity <= _MOST_ROOM
        compiled = worth_it and is_installed("numba")
    if compiled:
        row_of = np.empty(len(lengths), dtype=np.int32)
        # Two rows never fit into one, so all but one are more than half full.
        most_rows = int(2 * lengths.sum(dtype=np.int64) // capacity) + 2
        _compiled()(lengths, capacity, most_rows, row_of)
        return row_of
    return _pack_plain(lengths, capacity)


# Loading numba's cached code takes about as long as packing this many examples in plain Python.
_WORTH_COMPILING = 100_000
# The compiled loop keeps a bit for every room up to the capacity; above this, walking over them takes longer.
_MOST_ROOM = 1 << 24


def _pack_plain(lengths: Int32Array, capacity: int, given: Sequence[int] = ()) -> Int32Array:
    row_of: list[int] = []
    with_room: dict[int, list[int]] = {}  # room -> rows that have it, the newest last
    for row, room in enumerate(given):
        with_room.setdefault(room, []).append(row)
    with_room.pop(0, None)
    rooms = sorted(with_room)  # its keys
    num_rows = len(given)
    for length, group in groupby(lengths.tolist()):
        count = sum(1 for _ in group)
        while count:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                row = with_room[room].pop()
                if not with_room[room]:
                    del with_room[room], rooms[place]
            else:
                room, row = capacity, num_rows
                num_rows += 1
            taken = min(count, room // length)
            row_of += [row] * taken
            count -= taken
            left = room - taken * length
            if left:
                if left not in with_room:
                    insort(rooms, left)
                    with_room[left] = []
                with_room[left].append(row)
    return np.array(row_of, dtype=np.int32)


@cache
def _compiled() -> Callable[..., Any]:
    """Compile the packing loop: rooms are bits of 64-bit words, rows of equal room form a linked list."""
    import numba

    return numba.njit(cache=True)(_pack_loop)


def _pack_loop(lengths: Any, capacity: int, most_rows: int, row_of: Any) -> None:
    """Do what ``_pack_plain`` does, in one function of plain loops, as numba compiles it.

    Which rooms have rows is a set of bits in two levels, so the least room that is large enough is found in a few steps
    whatever the capacity: ``has_rows`` has a bit per room, ``summary`` one per word of ``has_rows``.
    """
    num_words = (capacity >> 6) + 1
    has_rows = np.zeros(num_words, dtype=np.uint64)
    summary = np.zeros((num_words >> 6) + 1, dtype=np.uint64)  # which words are not empty
    newest = np.full(capacity + 1, -1, dtype=np.int32)  # per room, the row that got it last; -1: none
    older = np.empty(most_rows, dtype=np.int32)  # per row, the one that had the same room before it
    num_rows = 0
    place = 0
    one = np.uint64(1)
    zero = np.uint64(0)
    while place < len(lengths):
        length = lengths[place]
        end = place + 1
        while end < len(lengths) and lengths[end] == length:
            end += 1
        while place < end:
            # The least room >= length: the rest of its word, else the first later word that is not empty.
            word = length >> 6
            # Shifting right and left again clears the bits of the rooms that are too small.
            bits = has_rows[word] >> np.uint64(length & 63) << np.uint64(length & 63)
            if bits == zero:
                word += 1
                block = word >> 6
                upper = zero
                if block < len(summary):
                    upper = summary[block] >> np.uint64(word & 63) << np.uint64(word & 63)
                while upper == zero and block + 1 < len(summary):
                    block += 1
                    upper = summary[block]
                if upper != zero:
                    word = block << 6
                    while upper & one == zero:
                        upper >>= one
                        word += 1
                    bits = has_rows[word]
            if bits != zero:
                room = word << 6
                while bits & one == zero:
                    bits >>= one
                    room += 1
                row = newest[room]
                newest[room] = older[row]
                if newest[room] < 0:
                    has_rows[word] &= ~(one << np.uint64(room & 63))
                    if has_rows[word] == zero:
                        summary[word >> 6] &= ~(one << np.uint64(word & 63))
            else:
                room = capacity
                row = num_rows
                num_rows += 1
            taken = min(end - place, room // length)
            for item in range(place, place + taken):
                row_of[item] = row
            place += taken
            left = room - taken * length
            if left > 0:
                word = left >> 6
                older[row] = newest[left]
                newest[left] = row
                has_rows[word] |= one << np.uint64(left & 63)
                summary[word >> 6] |= one << np.uint64(word & 63)


@final
@dataclass(frozen=True)
class Packed(Grouping):
    """Several examples per row of ``capacity`` tokens, by windowed best-fit decreasing: new neighbours every epoch.

    The budget counts rows as items of length ``capacity``; a batch is a list of rows. Epochs of few rows are
    packed in 12 windows, drawn anew: two examples of a row share one again with a probability of 1 in 8 or less, in
    long epochs far less; more where an epoch has fewer than 12 rows, which have a window each.
    """

    capacity: int

    def __post_init__(self) -> None:
        capacity = as_whole("Packed: capacity", self.capacity, least=1)
        if capacity > MAX_INT32:
            raise ArgumentError(f"Packed: capacity must be at most {MAX_INT32}, got {capacity}")
        object.__setattr__(self, "capacity", capacity)

    def group(self, problem: Problem) -> Groups:
        """Pack the examples into rows."""
        return group_rows(problem, self.capacity)

    def check_axes(self, num_axes: int) -> None:
        """Refuse more than one axis."""
        if num_axes > 1:
            raise ArgumentError(f"Packed rows have one length, got lengths with {num_axes} axes; pack their sum")

    @property
    def is_static(self) -> bool:
        """Return True: rows are as long as the capacity."""
        return True

    @property
    def row_capacity(self) -> int:
        """Return the tokens of a row."""
        return self.capacity
