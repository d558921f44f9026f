"""Bounds of one axis with the least padding, by dynamic programming over its lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..._types import FloatArray, IntArray

# Four candidates per bound, and at least 256, bring the padded tokens within two thousandths of what every length would
# give; the table of the dynamic programme has the square of this many entries.
_MIN_CANDIDATES = 256
_MAX_CANDIDATES = 512


def least_padding_bounds(
    values: IntArray,
    counts: IntArray,
    num_bounds: int,
    cost_of: Callable[[IntArray], FloatArray] | None = None,
) -> IntArray:
    """Return the bucket bounds that leave the fewest padded tokens, by dynamic programming.

    With bounds ``b_1 < … < b_K`` every length is padded to the next bound; the padded tokens are
    ``sum_k b_k × #(lengths in (b_{k-1}, b_k])``. The best last bound of ``k`` buckets up to length ``i`` is
    ``min_j cost_{k-1}(j) + b_i × (C_i − C_j)``, with ``C`` the number of examples up to a length.

    Args:
        values: distinct lengths, ascending.
        counts: examples of each length.
        num_bounds: how many bounds at the most.
        cost_of: what an example costs at each of some bounds; None takes the bound.

    Returns:
        At most ``num_bounds`` bounds, ascending; the last is the longest length.

    >>> least_padding_bounds(np.array([1, 2, 10]), np.array([5, 5, 1]), 2).tolist()
    [2, 10]
    """
    if len(values) <= num_bounds:
        return values
    bounds, totals = thinned(values, counts, min(_MAX_CANDIDATES, max(_MIN_CANDIDATES, 4 * num_bounds)))
    prices = bounds.astype(np.float64) if cost_of is None else cost_of(bounds)
    choices = _choices(prices, totals, min(num_bounds, len(bounds)), is_length=cost_of is None)
    return _walk_back(bounds, choices)


def _choices(prices: FloatArray, totals: IntArray, num_bounds: int, *, is_length: bool) -> list[IntArray]:
    """Return, for 2, 3, … buckets, the best last bound but one below each bound, -1 where fewer buckets are as good.

    The last bucket becomes no wider with more buckets (the padded tokens satisfy the quadrangle inequality), so each
    round looks only as far back as the widest bucket of the round before.
    """
    num = len(prices)
    places = np.arange(num)
    whole = prices * totals  # one bucket
    # Column c of row i stands for the bound i - num + c; those below the first are infinitely dear.
    ahead = np.zeros(num, dtype=np.int64)
    saved = sliding_window_view(np.concatenate([ahead, totals]), num)[:num] * prices[:, None]
    padded_cost = np.concatenate([np.full(num, np.inf), whole])
    costs, cost = sliding_window_view(padded_cost, num)[:num], padded_cost[num:]
    # Otherwise rounding errors, or a price that falls, could hide the best beyond the widest.
    is_exact = is_length and whole[-1] < 2.0**53
    width, choices = num, []
    for _ in range(num_bounds - 1):
        table = costs[:, num - width :] - saved[:, num - width :]
        column = table.argmin(axis=1)
        best = table.ravel().take(places * width + column) + whole
        is_better = best < cost
        back = width - column  # how far below the bound
        choices.append(np.where(is_better, places - back, -1))
        np.minimum(best, cost, out=cost)
        if is_exact:
            width = max(1, int((back * is_better).max()))
    return choices


def thinned(values: IntArray, counts: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Thin the lengths to those it would cost most to do without, the longest among them; count examples up to each.

    Lengths left out are padded to the next candidate. With candidates a distance h apart among f examples per length
    that adds about f × h² / 2 tokens each, least in all where their density follows sqrt(f); a length before a gap
    weighs as much as the gap is wide.
    """
    totals = np.cumsum(counts)
    if len(values) > most:
        weights = np.sqrt(counts * np.diff(values, append=values[-1] + 1).astype(np.float64))
        for _ in range(8):  # one length is one candidate, however much it weighs
            weights = np.minimum(weights, weights.sum() / most)
        shares = np.cumsum(weights)
        inner = np.searchsorted(shares, np.linspace(0, shares[-1], most + 1)[1:-1])
        chosen = np.unique(np.append(inner, len(values) - 1))
        values, totals = values[chosen], totals[chosen]
    return values.astype(np.int64), totals.astype(np.int64)


def _walk_back(bounds: IntArray, choices: list[IntArray]) -> IntArray:
    place = len(bounds) - 1
    taken = [place]
    for choice in reversed(choices):
        if choice[place] >= 0:
            place = int(choice[place])
            taken.append(place)
    return bounds[taken[::-1]]
