"""The cheapest way to cut length-sorted requests into batches."""

from __future__ import annotations

from collections.abc import Sequence

# Places that a cut may fall on. With more requests than that it falls between every second one, or third, and so on:
# neighbours differ little in length then, and the time to decide stays bounded.
MAX_CUTS = 24


def split(constant: float, per_item: Sequence[float], limits: Sequence[int]) -> list[tuple[int, int]]:
    """Return the cut of least total time, as ``(start, stop)`` from the shortest to the longest.

    A batch ``[start, stop)`` takes ``constant + (stop - start) × per_item[stop - 1]``: everything is padded to its
    longest. Dynamic programming over the prefixes. With rising ``per_item`` and falling ``limits`` the best start never
    moves back as the prefix grows, so each prefix looks only at starts from the previous one's on.

    Args:
        constant: seconds of any call.
        per_item: seconds of an item at each request's length, rising.
        limits: the most items of a batch that ends with each request, 1 or more, falling.

    >>> split(4.0, [1.0, 1.0, 1.0, 9.0], [64] * 4)
    [(0, 3), (3, 4)]
    >>> split(4.0, [1.0, 1.0, 1.0, 1.5], [64] * 4)
    [(0, 4)]
    """
    places = _places(limits)
    totals, starts, start = [0.0], [0], 0
    for index in range(1, len(places)):
        stop = places[index]
        slope, earliest = per_item[stop - 1], stop - limits[stop - 1]
        while places[start] < earliest:
            start += 1
        candidates = [totals[j] - places[j] * slope for j in range(start, index)]
        least = min(candidates)
        start += candidates.index(least)  # of equals the earliest: the larger batch
        totals.append(least + stop * slope + constant)
        starts.append(start)
    return _walk_back(places, starts)


def _places(limits: Sequence[int]) -> list[int]:
    """Return where cuts may fall, 0 and the end included; no two are further apart than a batch may be large."""
    step = -(-len(limits) // MAX_CUTS)
    places = [len(limits)]
    while places[-1] > 0:
        places.append(max(0, places[-1] - min(step, limits[places[-1] - 1])))
    return places[::-1]


def _walk_back(places: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int]]:
    batches, index = [], len(places) - 1
    while index > 0:
        batches.append((places[starts[index]], places[index]))
        index = starts[index]
    return batches[::-1]
