"""Choose a learning rate: which rates to try next, and which of those tried is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, final

# The mean final validation loss of a rate; None where a run failed or diverged.
Losses: TypeAlias = Mapping[float, float | None]

# How far a round goes beyond an end of the rates tried, at most.
_LARGEST_STEP = 10.0
_DEFAULT_STEP = math.sqrt(10)
# A loss this many times that of the best rate is that of a run that goes wrong.
_WALL = 2.0


@final
@dataclass(frozen=True, kw_only=True)
class Choice:
    """The learning rate of an arm, and the runs that chose it.

    Args:
        lr: the rate that is used; None if every rate that was tried failed or diverged.
        losses: the mean final validation loss of each rate that was tried.
        num_diverged: how many runs had a loss that was no number.
        num_failed: how many runs ended with an error.
        seeds: the seeds of the runs; empty if the rate was given.
    """

    lr: float | None
    losses: Losses
    num_diverged: int = 0
    num_failed: int = 0
    seeds: tuple[int, ...] = ()

    @classmethod
    def of(cls, losses: Losses, **found: Any) -> Choice:
        """Return the choice that some losses lead to."""
        return cls(lr=lowest_point(losses), losses=losses, **found)

    @property
    def best_tried(self) -> float | None:
        """Return the rate with the lowest loss of those that were tried; None if the rate was given."""
        return best_rate(self.losses)

    @property
    def is_at_edge(self) -> bool:
        """Say whether the smallest or the largest rate tried was the best: a better one may lie beyond."""
        return len(self.losses) > 1 and self.best_tried in (min(self.losses), max(self.losses))

    @property
    def is_at_wall(self) -> bool:
        """Say whether a rate beside the best one diverged or more than doubled the loss: the best may lie between.

        >>> Choice.of({0.01: 0.5, 0.1: 0.4, 1.0: None}).is_at_wall, Choice.of({0.01: 0.5, 0.1: 0.4}).is_at_wall
        (True, False)
        """
        rates, best = sorted(self.losses), self.best_tried
        if best is None:
            return False
        place, most = rates.index(best), _WALL * (self.losses[best] or 0.0)
        beside = [self.losses[rate] for rate in rates[max(0, place - 1) : place + 2] if rate != best]
        return any(loss is None or not loss <= most for loss in beside)

    @property
    def spacing(self) -> float | None:
        """Return the factor from the best rate tried to the farther of its neighbours: how coarse the search ended."""
        rates, best = sorted(self.losses), self.best_tried
        if best is None or len(rates) < 2:
            return None
        place = rates.index(best)
        near = rates[max(0, place - 1) : place + 2]
        return max(high / low for low, high in pairwise(near))

    @property
    def num_runs(self) -> int:
        """Return how many runs chose the rate, 0 if it was given."""
        return len(self.losses) * len(self.seeds)

    @property
    def problem(self) -> str | None:
        """Say why the arm has no learning rate; None if it has one."""
        if self.lr is not None:
            return None
        if not self.losses:
            return "it repeats another strategy, which has no learning rate that worked"
        tried = f"none of the learning rates from {min(self.losses):g} to {max(self.losses):g} worked"
        return (
            f"{tried}: of {self.num_runs} runs {self.num_diverged} diverged and {self.num_failed} failed; look into "
            "tuning.jsonl, or give the plan other grids"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what records say about it, as JSON values."""
        given = [] if self.lr is None else [self.lr]
        return {
            "grid": sorted(self.losses) or given,
            "losses": {str(rate): self.losses[rate] for rate in sorted(self.losses)},
            "chosen": self.lr,
            "best_tried": self.best_tried,
            "is_at_edge": self.is_at_edge,
            "is_at_wall": self.is_at_wall,
            "spacing": self.spacing,
            "num_runs": self.num_runs,
            "num_diverged": self.num_diverged,
            "num_failed": self.num_failed,
            "seeds": list(self.seeds),
        }


def best_rate(losses: Losses) -> float | None:
    """Return the rate with the lowest loss, the smaller of two equal ones; None if none has a loss.

    >>> best_rate({0.001: 0.9, 0.01: 0.4, 0.1: 0.4, 1.0: None})
    0.01
    """
    found = [(loss, rate) for rate, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(found)[1] if found else None


def lowest_point(losses: Losses) -> float | None:
    """Return the rate at which the loss is lowest, read between those that were tried.

    It is the lowest point of the parabola through the best rate and its two neighbours, loss and rate on the scale of
    logarithms. So it matters little where the rates happen to lie: for a strategy that needs another rate, the same
    grid lies elsewhere. At an end, or beside a rate that diverged or more than doubles the loss, it is the best rate
    itself: there the loss is a wall and no parabola.

    >>> lowest_point({0.01: 0.4, 0.1: 0.2, 1.0: 0.4}), lowest_point({0.01: 0.3, 0.1: 0.2, 1.0: 0.4})
    (0.1, 0.074)
    """
    best, rates = best_rate(losses), sorted(losses)
    place = 0 if best is None else rates.index(best)
    around = [(rate, losses[rate]) for rate in rates[max(0, place - 1) : place + 2]]
    most = _WALL * (losses[best] or 0.0) if best is not None else 0.0
    known = [(math.log(rate), math.log(loss)) for rate, loss in around if loss is not None and 0 < loss <= most]
    if not 0 < place < len(rates) - 1 or len(known) < 3:
        return best
    (left, high_left), (middle, low), (right, high_right) = known
    # Slopes on both sides; the parabola is level where the line between them crosses 0.
    falling, rising = (low - high_left) / (middle - left), (high_right - low) / (right - middle)
    if rising <= falling:
        return best
    level = (left + middle) / 2 - falling * (right - left) / 2 / (rising - falling)
    return float(f"{math.exp(level):.3g}")


def next_rates(losses: Losses) -> tuple[float, float]:
    """Return the two rates to try next: on both sides of the best one, or beyond it if it lies at an end.

    Inside, each lies in the middle between the best rate and its neighbour, on the scale of logarithms. Where every
    rate diverged, both are smaller than all of them.

    >>> next_rates({0.001: 0.9, 0.01: 0.4, 0.1: 0.5})
    (0.00316, 0.0316)
    >>> next_rates({0.001: 0.9, 0.01: 0.5, 0.1: 0.4})
    (0.0316, 1.0)
    """
    rates = sorted(losses)
    best = best_rate(losses)
    if best is None:
        lower = _new(rates[0] / _LARGEST_STEP, rates)
        return _new(lower / _LARGEST_STEP, [*rates, lower]), lower
    place = rates.index(best)
    below = rates[place - 1] if place else None
    above = rates[place + 1] if place + 1 < len(rates) else None
    step = _step(best, below if below is not None else above)
    low = best / step if below is None else math.sqrt(below * best)
    high = best * step if above is None else math.sqrt(best * above)
    low = _new(low, rates)
    return low, _new(high, [*rates, low])


def _step(best: float, neighbour: float | None) -> float:
    """Return the factor to go beyond an end by: as far as the neighbour on the other side."""
    if neighbour is None:
        return _DEFAULT_STEP
    return min(_LARGEST_STEP, max(best / neighbour, neighbour / best))


def _new(rate: float, tried: Sequence[float]) -> float:
    """Return a rate with as few digits as tell it from all that were tried, at least three."""
    for digits in range(3, 18):
        rounded = float(f"{rate:.{digits}g}")
        if rounded > 0 and rounded not in tried:
            return rounded
    return _new(1.001 * rate, tried)  # no number lies between two neighbours
