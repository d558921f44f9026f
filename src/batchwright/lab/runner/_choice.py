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


@final
@dataclass(frozen=True, kw_only=True)
class Choice:
    """The learning rate of an arm, and the runs that chose it.

    Args:
        lr: the rate; None if every rate that was tried failed or diverged.
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

    @property
    def is_at_edge(self) -> bool:
        """Say whether the rate is the smallest or the largest that was tried: a better one may lie beyond."""
        return len(self.losses) > 1 and self.lr in (min(self.losses), max(self.losses))

    @property
    def spacing(self) -> float | None:
        """Return the factor to the farther of its two neighbours: a search that had to go far is coarser at its end."""
        rates = sorted(self.losses)
        if self.lr is None or len(rates) < 2:
            return None
        place = rates.index(self.lr)
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
            "is_at_edge": self.is_at_edge,
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
