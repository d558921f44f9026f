"""Bounds of one axis by dynamic programming, and boxes of several, merged from cells and then moved: of least cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..._types import FloatArray, IntArray
from .base import Problem, distinct

_MAX_GRID = 4096  # places of the grid of candidate lengths, over all axes
_MAX_CELLS = 600  # cells that are merged pair by pair
_MAX_MOVED = 256  # more boxes than this are not moved: they lie close anyway
_SWEEPS = 6
_EXCHANGES = 6
_WORTH = 5e-4  # the share of the cost that another round must save
_REACH = 10  # how many candidates up or down a bound moves at once


@final
class Cells(NamedTuple):
    """The occupied cells of a grid of candidate lengths: where each lies, and how many examples it holds."""

    bounds: list[IntArray]  # per axis, in units of padding, ascending
    places: IntArray  # (cells, axes), into the bounds
    counts: FloatArray  # (cells,)
    costs: FloatArray  # of an example at every place of the grid, infinite where not one item fits
    scale: float  # what whole costs are multiples of

    def lengths(self, places: IntArray) -> IntArray:
        """Return the lengths of places, in units."""
        return np.stack([bounds[places[:, axis]] for axis, bounds in enumerate(self.bounds)], axis=1)

    def costs_at(self, places: IntArray) -> FloatArray:
        """Return the cost of an example at each place ``(..., axes)``."""
        steps = np.array(self.costs.strides) // self.costs.itemsize
        found: FloatArray = self.costs.ravel().take(places @ steps)
        return found

    def below(self, units: IntArray) -> IntArray:
        """Return the highest place that each box of units ``(M, axes)`` holds, -1 where it holds none."""
        columns = [np.searchsorted(bounds, units[:, axis], side="right") for axis, bounds in enumerate(self.bounds)]
        return np.stack(columns, axis=1) - 1


def make_cells(problem: Problem, units: IntArray) -> Cells:
    """Thin the lengths of each axis to candidates and count the examples in every cell between them.

    Cells at whose upper bounds not one item fits are left out: finer lengths decide there.
    """
    most = max(2, int(_MAX_GRID ** (1 / problem.num_axes)))
    bounds, columns = [], []
    for axis in range(problem.num_axes):
        candidates, _ = thinned(*distinct(units[:, axis]), most)
        bounds.append(candidates)
        columns.append(np.searchsorted(candidates, units[:, axis]))
    shape = tuple(map(len, bounds))
    grid = np.stack(np.meshgrid(*bounds, indexing="ij"), axis=-1).reshape(-1, problem.num_axes)
    lengths = grid * problem.pad_multiple_of
    prices = problem.cost_per_item(lengths)
    scale = _scale(prices, len(units), is_whole=problem.cost is None)
    costs = np.where(problem.fits(lengths), np.rint(prices / scale), np.inf)
    counts = np.bincount(np.ravel_multi_index(tuple(columns), shape), minlength=len(grid))
    occupied = np.flatnonzero((counts > 0) & np.isfinite(costs))
    places = np.stack(np.unravel_index(occupied, shape), axis=1).astype(np.int64)
    return Cells(bounds, places, counts[occupied].astype(np.float64), costs.reshape(shape), scale)


def _scale(prices: FloatArray, num_examples: int, *, is_whole: bool) -> float:
    """Return a power of two in which costs are counted: sums over all examples are then exact, on every machine."""
    finite = prices[np.isfinite(prices)]  # the others do not fit with one item
    finest = np.frexp(finite.max() if len(finite) else 1.0)[1] + np.frexp(num_examples)[1] - 53
    return float(2.0 ** (max(finest, 0) if is_whole else max(finest, -1022)))


def _coarse(cells: Cells) -> tuple[IntArray, FloatArray]:
    """Join neighbouring cells until few enough are left to compare every pair; return their places and counts."""
    top = np.array(cells.costs.shape) - 1
    step = 1
    while True:
        places = np.minimum(cells.places // step * step + step - 1, top)
        places = np.where(np.isfinite(cells.costs_at(places))[:, None], places, cells.places)
        keys, inverse = np.unique(np.ravel_multi_index(tuple(places.T), cells.costs.shape), return_inverse=True)
        if len(keys) <= _MAX_CELLS or step > top.max():
            break
        step *= 2
    found = np.stack(np.unravel_index(keys, cells.costs.shape), axis=1).astype(np.int64)
    counts: FloatArray = np.bincount(inverse, weights=cells.counts, minlength=len(keys)).astype(np.float64)
    return found, counts


@final
class Merging:
    """Boxes that are merged two by two, always those whose common box costs the least more.

    A pair whose common box does not fit the budget costs infinitely more, so it is never merged.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._places, self._counts = _coarse(cells)
        self.cells_merged = self._places.copy()
        self._costs = cells.costs_at(self._places)
        self._alive = np.ones(len(self._places), dtype=bool)
        common = cells.costs_at(np.maximum(self._places[:, None], self._places[None]))
        spent = self._counts * self._costs
        self._more = (self._counts[:, None] + self._counts) * common - spent[:, None] - spent
        np.fill_diagonal(self._more, np.inf)
        self._partner = self._more.argmin(axis=1)
        self._least = np.take_along_axis(self._more, self._partner[:, None], axis=1)[:, 0]

    def down_to(self, num: int) -> IntArray:
        """Return the places of at most ``num`` boxes, more only where no other two fit together."""
        left = int(self._alive.sum())
        while left > max(num, 1):
            first = int(self._least.argmin())
            if not np.isfinite(self._least[first]):
                break
            self._merge(first, int(self._partner[first]))
            left -= 1
        return self._places[self._alive]

    def _merge(self, first: int, second: int) -> None:
        """Let the first of two boxes hold both, and repair who is whose cheapest partner."""
        self._places[first] = np.maximum(self._places[first], self._places[second])
        self._counts[first] += self._counts[second]
        self._costs[first] = self._cells.costs_at(self._places[first])
        self._alive[second] = False
        self._more[second] = self._more[:, second] = np.inf
        self._least[second] = np.inf
        row = self._row(first)
        self._more[first] = self._more[:, first] = row
        # Only boxes whose partner was one of the two look for another: searching all would be quadratic.
        stale = np.flatnonzero(((self._partner == first) | (self._partner == second)) & self._alive)
        self._partner[stale] = self._more[stale].argmin(axis=1)
        self._least[stale] = self._more[stale, self._partner[stale]]
        self._partner[first] = int(row.argmin())
        self._least[first] = row[self._partner[first]]
        # To the others the grown box may have become the cheapest partner.
        closer = (row < self._least) & self._alive
        self._partner[closer], self._least[closer] = first, row[closer]

    def _row(self, first: int) -> FloatArray:
        common = self._cells.costs_at(np.maximum(self._places[first], self._places))
        spent = self._counts * self._costs
        row: FloatArray = (self._counts[first] + self._counts) * common - spent[first] - spent
        row[~self._alive] = np.inf
        row[first] = np.inf
        return row


@final
class Moving:
    """Boxes beside others that stay: every cell goes to the cheapest box that holds it.

    Args:
        cells: the examples.
        boxes: places of the boxes that may move or go, ``(M, axes)``.
        base: the cost of an example of each cell in the boxes that stay.
    """

    def __init__(self, cells: Cells, boxes: IntArray, base: FloatArray) -> None:
        self._cells = cells
        self._base = base
        self.boxes = boxes.copy()
        self._costs = np.stack([base, *map(self._costs_in, self.boxes)])  # (1 + boxes, cells)

    def _costs_in(self, box: IntArray) -> FloatArray:
        holds = (self._cells.places <= box).all(axis=1)
        return np.where(holds, self._cells.costs_at(box), np.inf)

    def drop_to(self, num: int) -> None:
        """Leave out the boxes that save the least until ``num`` are left."""
        while len(self.boxes) > num:
            ranked = np.partition(self._costs, 1, axis=0)[:2]
            owner = self._costs.argmin(axis=0)
            saved = np.bincount(owner, weights=self._cells.counts * (ranked[1] - ranked[0]), minlength=len(self._costs))
            # Half of what is too many at a time: what one saves depends on the others.
            excess = -(-(len(self.boxes) - num) // 2)
            kept = np.sort(np.argsort(-saved[1:], kind="stable")[: len(self.boxes) - excess])
            self.boxes = self.boxes[kept]
            self._costs = self._costs[np.concatenate([[0], 1 + kept])]

    def improve(self) -> None:
        """Move each bound of each box to where it costs the least, until hardly anything is gained."""
        if not 0 < len(self.boxes) <= _MAX_MOVED:
            return
        total = self._total(self._costs.min(axis=0))
        for _ in range(_SWEEPS):
            before = total
            for box in range(len(self.boxes)):
                total = self._move(box, total)
            if total > before * (1 - _WORTH):
                return

    def exchange(self, candidates: IntArray) -> None:
        """Replace the box that saves the least by the best of some places and improve, as long as that pays."""
        if not 0 < len(self.boxes) <= _MAX_MOVED:
            return
        for _ in range(_EXCHANGES):
            before, costs = self.boxes.copy(), self._costs
            self.drop_to(len(self.boxes) - 1)
            added = candidates[self._gains(candidates).argmax()]
            self.boxes = np.concatenate([self.boxes, added[None]])
            self._costs = np.concatenate([self._costs, self._costs_in(added)[None]])
            self.improve()
            gain = self._total(costs.min(axis=0)) - self._total(self._costs.min(axis=0))
            if gain < _WORTH * self._total(self._costs.min(axis=0)):
                if gain <= 0:
                    self.boxes, self._costs = before, costs
                return

    def _gains(self, candidates: IntArray) -> FloatArray:
        """Return what one more box at each of some places would save."""
        prices = self._cells.costs_at(candidates)[:, None]
        saved = np.maximum(self._costs.min(axis=0) - prices, 0)
        for axis in range(candidates.shape[1]):
            saved *= self._cells.places[:, axis] <= candidates[:, axis, None]
        gains: FloatArray = saved @ self._cells.counts
        return gains

    def _move(self, box: int, total: float) -> float:
        own = self._costs[1 + box].copy()
        self._costs[1 + box] = np.inf
        others = self._costs.min(axis=0)
        for axis in range(self.boxes.shape[1]):
            best, place = self._best_bound(box, axis, others)
            if best < total * (1 - 1e-12):
                total = best
                self.boxes[box, axis] = place
                own = self._costs_in(self.boxes[box])
        self._costs[1 + box] = own
        return total

    def _best_bound(self, box: int, axis: int, others: FloatArray) -> tuple[float, int]:
        """Return the least total cost over the bounds near that of a box on one axis, and the place of that bound."""
        here = int(self.boxes[box, axis])
        tries = np.arange(max(0, here - _REACH), min(self._cells.costs.shape[axis], here + _REACH + 1))
        boxes = np.repeat(self.boxes[box][None], len(tries), axis=0)
        boxes[:, axis] = tries
        prices = self._cells.costs_at(boxes)
        places = self._cells.places
        # Only cells inside the largest of these boxes that the other boxes do not hold as cheaply can gain.
        inside: npt.NDArray[np.bool_] = np.all(places <= boxes[-1], axis=1)
        near = np.flatnonzero(inside & (others > prices.min()))
        held = np.where(places[near, axis] <= tries[:, None], prices[:, None], np.inf)
        gained = (np.maximum(others[near] - held, 0) * self._cells.counts[near]).sum(axis=1)
        best = int(gained.argmax())
        return self._total(others) - float(gained[best]), int(tries[best])

    def _total(self, costs: FloatArray) -> float:
        return float((self._cells.counts * costs).sum())


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
