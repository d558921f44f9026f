"""What ran out of memory bounds what is planned: no batch of as many items that are as long on every axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..._types import MAX_INT32, IntArray
from .result import Shape

# Once this share of the items that failed has run, batches stop there: nobody knows what lies between.
CLOSE = 0.8


def dominates(shape: Shape, other: Shape) -> bool:
    """Say whether a batch has as many items as another, or more, and is as long on every axis, or longer.

    >>> dominates((8, 64), (8, 32)), dominates((9, 31), (8, 32))
    (True, False)
    """
    return all(one >= two for one, two in zip(shape, other, strict=True))


def smallest(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Return the shapes that dominate no other one, in order: the rest follows from them.

    >>> smallest([(9, 4), (8, 4), (2, 16), (8, 5)])
    ((2, 16), (8, 4))
    """
    distinct = sorted(set(shapes))
    return tuple(
        shape for shape in distinct if not any(dominates(shape, other) for other in distinct if other != shape)
    )


def bounded_items(lengths: IntArray, bounds: Sequence[Shape]) -> IntArray:
    """Return the most items of each row of padded lengths ``(M, axes)`` that dominate no bound.

    ``n = min(bound's items - 1)`` over the bounds that are no longer than the row on any axis; the others say nothing
    about it.

    >>> bounded_items(np.array([[3], [5], [40]]), [(300, 5), (20, 32)]).tolist()
    [2147483647, 299, 19]
    """
    most = np.full(len(lengths), MAX_INT32, dtype=np.int64)
    for num, *sides in bounds:
        is_as_long = (lengths >= np.array(sides)).all(axis=1)
        most = np.where(is_as_long, np.minimum(most, num - 1), most)
    return most


def most_ran(lengths: Sequence[int], ran: Iterable[Shape]) -> int:
    """Return the most items that ran of rows at least as long as these; 0 if none did.

    >>> most_ran((8,), [(16, 4), (4, 8), (6, 9)])
    6
    """
    return max((num for num, *sides in ran if dominates(tuple(sides), tuple(lengths))), default=0)


def bounds_from(failed: Iterable[Shape], ran: Sequence[Shape]) -> tuple[Shape, ...]:
    """Return what must not be planned: what failed, or one item more than ran if that is close to it.

    >>> bounds_from([(2000, 5), (356, 5), (20, 32)], [(4, 5), (290, 5), (10, 32)])
    ((20, 32), (291, 5))
    """
    found = []
    for num, *sides in smallest(failed):
        close = most_ran(sides, ran)
        found.append((close + 1 if CLOSE * num <= close < num else num, *sides))
    return smallest(found)


def between(num_ran: int, num_failed: int, others: Iterable[Shape] = ()) -> int:
    """Return the number of items to try after some ran and more failed: near what ran while they are far apart.

    Args:
        num_ran: the most items that ran of such a row.
        num_failed: the fewest that failed.
        others: that failed; if one of them, of any length, had hardly more items than ran, that is tried.

    >>> between(4, 2281), between(200, 300), between(95, 2281, [(107, 64)])
    (95, 250, 118)
    """
    if any(CLOSE * other[0] <= num_ran < other[0] for other in others):
        return max(num_ran + 1, min(num_failed - 1, int(num_ran / CLOSE)))
    if num_failed > 4 * num_ran:
        return max(num_ran + 1, int((num_ran * num_failed) ** 0.5))
    return (num_ran + num_failed) // 2
