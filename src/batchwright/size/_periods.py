"""The mean of a signal over an epoch, over a number of updates or over a number of examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from ._counting import Unit, check_counting
from .observation import Observation
from .policy import State


@final
@dataclass(frozen=True)
class Period:
    """Gathers a signal and gives its mean, weighted by ``batch_size``, once a period.

    An epoch ends with the observation in which the count of completed epochs has risen. What that observation holds
    belongs to the epoch that it ends. So one observation an epoch is a period each, and observations of every update
    are gathered.
    A period of examples holds at least ``every``: what the last batch has over is not carried to the next.

    >>> period = Period("step", 2)
    >>> mean, state = period.gather(period.init(), Observation(batch_size=3), 1.0, by="an example")
    >>> mean is None
    True
    >>> period.gather(state, Observation(batch_size=1), 5.0, by="an example")[0]
    2.0
    """

    per: Unit
    every: int

    def span(self, num_periods: int = 1) -> str:
        """Return a number of periods in words."""
        number, unit = self.every * num_periods, self.per.removesuffix("s")
        return f"the {unit}" if number == 1 else f"{number} {unit}s"

    def init(self) -> State:
        """Return the state before anything was gathered."""
        return {"mean": 0.0, "weight": 0, "count": 0}

    def read(self, state: State, observation: Observation, name: str, *, by: str) -> float:
        """Return a figure, or NaN where an observation without it ends an epoch that was gathered."""
        ends = self.per == "epoch" and bool(state["weight"]) and (observation.epoch or 0) > state["count"]
        if ends and getattr(observation, name) is None:
            return math.nan
        return float(observation.need(name, by=by))

    def gather(self, state: State, observation: Observation, value: float, *, by: str) -> tuple[float | None, State]:
        """Return the mean of the period that has just ended, None within one, and the next state.

        A value that is not finite is left out; a period of none but such has no mean.
        """
        mean, weight = _add(state["mean"], state["weight"], value, observation.batch_size)
        ends, count = self._count(state["count"], observation, by)
        if not ends:
            return None, {"mean": mean, "weight": weight, "count": count}
        return (mean if weight else None), {**self.init(), "count": count}

    def _count(self, count: int, observation: Observation, by: str) -> tuple[bool, int]:
        if self.per == "epoch":
            epoch = int(observation.need("epoch", by=by))
            ends = epoch >= count + self.every
            # A count that falls belongs to a new run or cycle, which is followed from there.
            return ends, epoch if ends or epoch < count else count
        count += 1 if self.per == "step" else int(observation.need("batch_size", by=by))
        return count >= self.every, 0 if count >= self.every else count


def make_period(per: Unit, every: int | None, *, by: str) -> Period:
    """Check the settings of a period and return it; one epoch or step where ``every`` is None."""
    return Period(per, check_counting(per, every, by=by, needs_every=True))


def _add(mean: float, weight: int, value: float, batch_size: int | None) -> tuple[float, int]:
    share = 1 if batch_size is None else int(batch_size)
    if not math.isfinite(value) or share <= 0:
        return mean, weight
    total = weight + share
    # The first form leaves the mean of equal values exactly there; the second cannot overflow.
    exact = mean + (value - mean) * (share / total)
    return (exact if math.isfinite(exact) else mean * (weight / total) + value * (share / total)), total
