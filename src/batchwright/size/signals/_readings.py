"""Readings of a noisy clock: the median of a period, and how far it may be off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, SupportsIndex, final

from .._states import check_numbers, check_record, check_size, check_whole, optional
from ..observation import Observation, Unit
from ..policy import State
from ._base import Period, make_period

# Readings that a period keeps, the newest ones: more would make states long and the median hardly better.
_MOST = 101
# A batch that differs from the size in force by more was formed before the size changed, or is the last of an epoch.
_SAME_SIZE = math.log(4 / 3)
# A change counts if it is this many of its own standard errors; fewer is the noise of the clock.
SURE = 3.0


class Reading(NamedTuple):
    """The median of a period, and its standard error as a share of it."""

    value: float
    error: float


@final
@dataclass(frozen=True)
class Readings:
    """Gathers readings at one size and gives their median once per period.

    Left out are readings that are not above 0, readings of batches of another size, and the first one after a change
    of the size, which pays for new shapes. A change of the size drops the readings before it. Periods count all
    updates: two policies that count alike decide together.

    Attributes:
        period: after which a median is given.
        num_usual: steps of a period that is not asked for.

    >>> readings = Readings(Period("step", 4), 16)
    >>> state = readings.init()
    >>> for seconds in (9.0, 1.0, 1.2, 8.0):  # the first is left out
    ...     found, state, words = readings.gather(state, Observation(batch_size=8), seconds, by="an example")
    >>> found.value
    1.2
    """

    period: Period
    num_usual: int

    def init(self) -> State:
        """Return a state without readings."""
        return {"size": None, "num_seen": 0, "count": 0, "values": []}

    def check_state(self, state: State, name: str) -> None:
        """Refuse a state that ``gather`` cannot have returned."""
        checks = {
            "size": optional(check_size),
            "num_seen": check_whole,
            "count": check_whole,
            "values": lambda at, saved: check_numbers(at, saved, most=_MOST, above=0),
        }
        check_record(name, state, checks)

    def gather(
        self, state: State, observation: Observation, value: float | None, *, by: str, rolls: bool = False
    ) -> tuple[Reading | None, State, str]:
        """Return the median of the period that has just ended, None within one, the next state and what was done.

        Args:
            state: what was gathered.
            observation: of which the value is a reading.
            value: None if the observation has no reading.
            by: who asks, for the message.
            rolls: whether readings of earlier periods at the same size count too.
        """
        size, is_new = observation.current, state["size"] != observation.current
        values, refusal = ([] if is_new else list(state["values"])), _refuse(observation, value, is_new=is_new)
        ends, count = False, state["count"]
        if value is not None or self.period.per == "epoch":
            ends, count = self.period.count(count, observation, by=by)
        if refusal is None and value is not None:
            values = [*values, value][-_MOST:]
        found = summarize(values) if ends and values else None
        # A size is known as soon as a batch of it ran, not when it was decided: the first reading is still to come.
        seen = size if not is_new or ran_in_force(observation) else state["size"]
        num_seen = 0 if ends else state["num_seen"] + (value is not None)
        after = {"size": seen, "num_seen": num_seen, "count": count, "values": [] if ends and not rolls else values}
        return found, after, refusal or f"gathering the seconds of {self.period.span()}"

    def written(self, usual: Unit) -> list[str]:
        """Return the arguments of a call whose usual period is per ``usual``."""
        return self.period.written_as(usual, self.num_usual if self.period.per == "step" else 1)


def make_readings(per: Unit, every: SupportsIndex | None, *, by: str, num_usual: int) -> Readings:
    """Check the settings of a period and return its readings; ``num_usual`` steps if ``every`` is None."""
    return Readings(make_period(per, num_usual if every is None and per == "step" else every, by=by), num_usual)


def ran_in_force(observation: Observation) -> bool:
    """Return whether a batch of about the size in force ran."""
    ran = observation.batch_size
    return ran is not None and abs(math.log(ran / observation.current)) <= _SAME_SIZE


def _refuse(observation: Observation, value: float | None, *, is_new: bool) -> str | None:
    """Say why a reading is left out."""
    if value is None:
        return "no batch ran"
    if not (math.isfinite(value) and value > 0):
        return f"{value} is no duration and left out"
    if not ran_in_force(observation):
        return f"a batch of {observation.batch_size} says little about the size in force"
    return "the first batch of a size is left out" if is_new else None


def summarize(values: list[float]) -> Reading:
    """Return the median of readings and its standard error as a share of it."""
    middle = median(values)
    spread = 1.4826 * median(abs(value - middle) for value in values)
    # The standard error of a median is 1.25 times that of a mean; both factors are those of a normal distribution. A
    # spread of few readings comes out too small as often as not.
    error = 1.2533 * spread / math.sqrt(len(values)) * (1 + 4 / len(values))
    return Reading(middle, error / middle)


def seconds_of(observation: Observation, readings: Readings, gathered: State, *, by: str) -> float | None:
    """Return the seconds of an update, None for an observation that only ends an epoch."""
    is_bare = observation.batch_size is None and observation.seconds is None
    if observation.ends_epoch or (is_bare and gathered["num_seen"] > 0):
        return None
    observation.need("batch_size", by=by)
    return float(observation.need("seconds", by=by))
