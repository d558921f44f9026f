"""Best-fit decreasing: put each example, longest first, into the row with the least room that still holds it.

Equal lengths are placed together: the row that took one keeps the least room for the next, so it is filled with as many
as it holds. The same steps run compiled where numba is installed and in plain Python otherwise, with the same rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from .._optional import is_installed

Int32Array = npt.NDArray[np.int32]


def pack_rows(lengths: Int32Array, capacity: int, *, compiled: bool | None = None) -> Int32Array:
    """Return the row of each example; windows of falling lengths share the rows that still have room.

    Args:
        lengths: at most ``capacity`` each; falling within a window, windows one behind the other.
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


def _pack_plain(lengths: Int32Array, capacity: int) -> Int32Array:
    row_of: list[int] = []
    with_room: dict[int, list[int]] = {}  # room -> rows that have it, the newest last
    rooms: list[int] = []  # the keys of with_room, ascending
    num_rows = 0
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
    num_words = (capacity >> 6) + 1
    has_rows = np.zeros(num_words, dtype=np.uint64)
    summary = np.zeros((num_words >> 6) + 1, dtype=np.uint64)  # which words are not empty
    newest = np.full(capacity + 1, -1, dtype=np.int32)
    older = np.empty(most_rows, dtype=np.int32)
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
