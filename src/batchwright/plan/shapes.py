"""Static shapes: numbers of items that hardware likes, and bucket bounds of least padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, final, get_args

import numpy as np

from ..errors import ArgumentError
from ._arrays import IntArray, as_whole

SizeLadder = Literal["pow2", "pow2x3"]

# Four candidates a bound, and at least 256, bring the padded tokens within two thousandths of what every length would
# give; the table of the dynamic programme has the square of this many entries.
_MIN_CANDIDATES = 256
_MAX_CANDIDATES = 512


@final
@dataclass(frozen=True)
class SizeRounding:
    """Round a number of items down to one the hardware likes, never to zero.

    ``multiple_of=8`` allows 8, 16, 24, …; ``ladder="pow2"`` allows 1, 2, 4, 8, …; ``"pow2x3"`` adds 3, 6, 12, ….
    With both, a size is on the ladder and a multiple. Where fewer than ``multiple_of`` items fit, the multiple cannot
    hold and the ladder alone counts.

    >>> SizeRounding(multiple_of=8).round(np.array([5, 8, 30])).tolist()
    [5, 8, 24]
    >>> SizeRounding(ladder="pow2x3").round(np.array([5, 8, 30])).tolist()
    [4, 8, 24]
    """

    multiple_of: int = 1
    ladder: SizeLadder | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "multiple_of", as_whole("size_multiple_of", self.multiple_of, least=1))
        if self.ladder is not None and self.ladder not in get_args(SizeLadder):
            allowed = ", ".join(map(repr, get_args(SizeLadder)))
            raise ArgumentError(f"size_ladder must be one of None, {allowed}, got {self.ladder!r}")
        if self.ladder is not None and len(self._multiples) == 0:
            raise ArgumentError(
                f"no size on the ladder {self.ladder!r} is a multiple of {self.multiple_of}; "
                "choose size_multiple_of on the ladder, or one of the two options"
            )

    def round(self, num_items: IntArray) -> IntArray:
        """Return the largest allowed size up to each number; zeros stay zero."""
        num_items = np.asarray(num_items, dtype=np.int64)
        if self.ladder is not None:
            return self._on_ladder(num_items)
        floor = num_items // self.multiple_of * self.multiple_of
        return np.where(floor > 0, floor, num_items)

    def round_one(self, num_items: int) -> int:
        """Round a single number."""
        if self.ladder is None:
            return num_items // self.multiple_of * self.multiple_of or num_items
        return int(self._on_ladder(np.array([num_items]))[0])

    def _on_ladder(self, num_items: IntArray) -> IntArray:
        place = np.searchsorted(self._multiples, num_items, side="right") - 1
        any_rung = np.searchsorted(self._rungs, num_items, side="right") - 1
        size = np.where(place >= 0, self._multiples[place], self._rungs[any_rung])
        return np.where(num_items > 0, size, 0)

    @cached_property
    def _rungs(self) -> IntArray:
        powers = 2 ** np.arange(32, dtype=np.int64)
        return np.unique(np.concatenate([powers, 3 * powers])) if self.ladder == "pow2x3" else powers

    @cached_property
    def _multiples(self) -> IntArray:
        return self._rungs[self._rungs % self.multiple_of == 0]


def least_padding_bounds(values: IntArray, counts: IntArray, num_bounds: int) -> IntArray:
    """Return the bucket bounds that leave the fewest padded tokens, by dynamic programming.

    With bounds ``b_1 < … < b_K`` every length is padded to the next bound; the padded tokens are
    ``sum_k b_k × #(lengths in (b_{k-1}, b_k])``. The best last bound of ``k`` buckets up to length ``i`` is
    ``min_j cost_{k-1}(j) + b_i × (C_i − C_j)``, with ``C`` the number of examples up to a length.

    Args:
        values: distinct lengths, ascending.
        counts: examples of each length.
        num_bounds: how many bounds at the most.

    Returns:
        At most ``num_bounds`` bounds, ascending; the last is the longest length.

    >>> least_padding_bounds(np.array([1, 2, 10]), np.array([5, 5, 1]), 2).tolist()
    [2, 10]
    """
    if len(values) <= num_bounds:
        return values
    bounds, totals = _candidates(values, counts, min(_MAX_CANDIDATES, max(_MIN_CANDIDATES, 4 * num_bounds)))
    cost = bounds * totals  # one bucket
    choices = []
    earlier = np.tril(np.ones((len(bounds), len(bounds)), dtype=bool), -1)
    penalty = np.where(earlier, 0.0, np.inf) - np.outer(bounds, totals)
    for _ in range(min(num_bounds, len(bounds)) - 1):
        table = cost + penalty
        choice = np.argmin(table, axis=1)
        best = table[np.arange(len(bounds)), choice] + bounds * totals
        choices.append(np.where(best < cost, choice, -1))
        cost = np.minimum(best, cost)
    return _walk_back(bounds, choices)


def _candidates(values: IntArray, counts: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Thin the lengths to those it would cost most to do without, the longest among them; count examples up to each.

    Lengths left out are padded to the next candidate. With candidates a distance h apart among f examples a length
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
