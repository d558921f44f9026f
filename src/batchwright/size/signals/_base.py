"""What signals are made of: the mean over a period, and the response that grows or shrinks a size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, SupportsIndex, TypeAlias, final, get_args

from ..._checks import as_number, check_choice
from ...errors import ArgumentError
from .._states import check_number, check_record, check_whole
from ..observation import FINE, Observation, Unit, blocks_of_one, check_counting
from ..policy import TIMES, Part, State, as_size, options, show

Mode: TypeAlias = Literal["exponential", "linear"]

# The usual whole step upwards and downwards: a factor, or a number of examples.
_STEPS: dict[str, tuple[float, float]] = {"exponential": (2.0, 0.5), "linear": (8.0, 8.0)}


def refuse_given(settings: Mapping[str, object], *, belong_to: str) -> None:
    """Refuse settings that were given although the chosen rule does not use them."""
    given = [f"{name}={value!r}" for name, value in settings.items() if value is not None]
    if given:
        raise ArgumentError(f"{', '.join(given)} belongs to {belong_to}; leave it out or choose that")


@final
@dataclass(frozen=True)
class Period(Part):
    """Gathers a signal and gives its mean, weighted by ``batch_size``, once per period.

    An epoch ends with the observation in which the count of completed epochs has risen, and what that observation
    holds belongs to the epoch that it ends. So one observation per epoch is a period by itself, and observations of
    every update are gathered.
    A period of examples or tokens has at least ``every``: the surplus of its last batch is not carried to the next
    period.

    >>> period = Period("step", 2)
    >>> mean, state = period.gather(period.init(), Observation(batch_size=3), 1.0, by="an example")
    >>> mean is None
    True
    >>> period.gather(state, Observation(batch_size=1), 5.0, by="an example")[0]
    2.0
    """

    per: Unit = "epoch"
    every: int = 1

    def arguments(self) -> list[str]:
        """Return the arguments of a call."""
        return [*super().arguments(), *blocks_of_one(self.per, self.every)]

    def written(self) -> list[str]:
        """Return the arguments of a call whose usual period is a step."""
        return self.written_as("step")

    def written_as(self, usual: Unit, usual_every: int = 1) -> list[str]:
        """Return the arguments of a call whose usual period is per ``usual``."""
        if self.per in FINE:
            return [f"per={self.per!r}", f"every={self.every}"]
        return options(per=(self.per, usual), every=(self.every, usual_every))

    def span(self, num_periods: int = 1) -> str:
        """Return a number of periods in words."""
        number, unit = self.every * num_periods, self.per.removesuffix("s")
        return f"the {unit}" if number == 1 else f"{number} {unit}s"

    def ignores(self, observation: Observation) -> bool:
        """Return whether an observation is no update and ends no period: it ends an epoch, and others are counted."""
        return observation.ends_epoch and self.per != "epoch"

    def begins(self, observation: Observation) -> bool:
        """Return whether the first epoch begins after an observation, because a policy takes over with it."""
        return observation.takes_over and self.per == "epoch"

    def init(self) -> State:
        """Return the state before anything is gathered."""
        return {"mean": 0.0, "weight": 0, "count": 0}

    def check_state(self, state: State, name: str) -> None:
        """Refuse a state that ``gather`` cannot have returned."""
        check_record(name, state, {"mean": check_number, "weight": check_whole, "count": check_whole})

    def follow(self, state: State, observation: Observation, name: str, *, by: str) -> tuple[float | None, State, str]:
        """Gather a figure of the observation; return its mean and the state as ``gather`` does, and what was done."""
        ends = self.per == "epoch" and bool(state["weight"]) and (observation.epoch or 0) > state["count"]
        # An observation that only ends an epoch need not have the figure.
        is_needed = not (ends or observation.ends_epoch or self.begins(observation))
        if not is_needed and getattr(observation, name) is None:
            return *self.gather(state, observation, math.nan, by=by), f"no {name} since the last period"
        value = float(observation.need(name, by=by))
        done = f"gathering the {name}" if math.isfinite(value) else f"{name} is {value} and left out"
        return *self.gather(state, observation, value, by=by), f"{done} of {self.span()}"

    def gather(self, state: State, observation: Observation, value: float, *, by: str) -> tuple[float | None, State]:
        """Return the mean of the period that has just ended, None within a period, and the next state.

        A value that is not finite is left out; a period that has only such values has no mean. So is a value with
        which a policy takes over: the epoch that it belongs to ends, or was not seen as a whole.
        """
        if self.begins(observation):
            value = math.nan
        mean, weight = _add(state["mean"], state["weight"], value, observation.batch_size)
        ends, count = self.count(state["count"], observation, by=by)
        if not ends:
            return None, {"mean": mean, "weight": weight, "count": count}
        return (mean if weight else None), {**self.init(), "count": count}

    def count(self, count: int, observation: Observation, *, by: str) -> tuple[bool, int]:
        """Return whether the observation ends a period, and the count after it."""
        if self.ignores(observation):
            return False, count
        if self.per == "epoch":
            epoch = int(observation.need("epoch", by=by))
            if self.begins(observation):
                return False, epoch
            ends = epoch >= count + self.every
            # A count that falls belongs to a new run or cycle, which is followed from there.
            return ends, epoch if ends or epoch < count else count
        amount = {"step": None, "examples": "batch_size", "tokens": "batch_tokens"}[self.per]
        is_unknown = self.per == "tokens" and observation.batch_tokens is None and observation.begins_tokens
        if not is_unknown:  # the first count of tokens has none before it, and the next one tells
            count += 1 if amount is None else int(observation.need(amount, by=by))
        return count >= self.every, 0 if count >= self.every else count


def make_period(per: Unit, every: SupportsIndex | None, *, by: str) -> Period:
    """Check the settings of a period and return it; one epoch or step if ``every`` is None."""
    return Period(per, check_counting(per, every, by=by, needs_every=True))


def _add(mean: float, weight: int, value: float, batch_size: int | None) -> tuple[float, int]:
    share = 1 if batch_size is None else int(batch_size)
    if not math.isfinite(value) or share <= 0:
        return mean, weight
    total = weight + share
    # The first form leaves the mean of equal values exactly there; the second cannot overflow.
    exact = mean + (value - mean) * (share / total)
    return (exact if math.isfinite(exact) else mean * (weight / total) + value * (share / total)), total


@final
@dataclass(frozen=True)
class Response(Part):
    """Grow or shrink a size by a factor or by a number of examples; never below one example.

    ``gain`` makes it proportional to the variation ``v`` of the signal, at most one whole step::

        exponential   size × exp(gain·v), from size × down to size × up
        linear        size + gain·v,      from size − down to size + up

    Attributes:
        mode: ``"exponential"`` multiplies, ``"linear"`` adds and subtracts.
        up: the factor, 1 or more, or the number of examples to add.
        down: the factor, above 0 and at most 1, or the number of examples to take away.
        gain: None answers every variation with the whole step.

    >>> Response("exponential", up=2.0, down=0.5).apply(64, 1)[0]
    128.0
    >>> Response("linear", up=16.0, down=16.0, gain=100.0).apply(64, -0.02)
    (62.0, '64 - 2 = 62')
    """

    mode: Mode
    up: float
    down: float
    gain: float | None = None

    def apply(self, size: float, variation: float) -> tuple[float, str]:
        """Return the size after a variation, above 0 to grow and below 0 to shrink, and the calculation in words."""
        if variation == 0:
            return float(size), f"holds {show(size)}"
        return self._multiply(size, variation) if self.mode == "exponential" else self._add(size, variation)

    def _multiply(self, size: float, variation: float) -> tuple[float, str]:
        factor = self.up if variation > 0 else self.down
        if self.gain is not None:
            factor = math.exp(min(max(self.gain * variation, math.log(self.down)), math.log(self.up)))
        return _at_least_one(size * factor, f"{show(size)} {TIMES} {show(factor)}")

    def _add(self, size: float, variation: float) -> tuple[float, str]:
        step = self.up if variation > 0 else -self.down
        if self.gain is not None:
            step = min(max(self.gain * variation, -self.down), self.up)
        return _at_least_one(size + step, f"{show(size)} {'+' if step >= 0 else '-'} {show(abs(step))}")

    def arguments(self) -> list[str]:
        """Return the arguments of a call; what is usual depends on the mode."""
        up, down = _STEPS[self.mode]
        return options(
            up=(self.up, up), down=(self.down, down), mode=(self.mode, "exponential"), gain=(self.gain, None)
        )


def make_response(
    up: float | None, down: float | None, *, mode: Mode = "exponential", gain: float | None = None
) -> Response:
    """Check the settings of a response and return it; a step that is None is the usual one of the mode."""
    check_choice("mode", mode, get_args(Mode))
    usual_up, usual_down = _STEPS[mode]
    up = usual_up if up is None else as_number("up", up)
    down = usual_down if down is None else as_number("down", down)
    is_factor = mode == "exponential"
    if up < is_factor or (down <= 0 or down > 1 if is_factor else down < 0):
        allowed = "factors, up of 1 or more and down above 0 and at most 1" if is_factor else "numbers of examples"
        raise ArgumentError(f"mode={mode!r} takes {allowed}, got up={up!r}, down={down!r}")
    if up == down == is_factor:
        raise ArgumentError(f"up={up!r} and down={down!r} never change the size; choose one that does")
    return Response(mode, up, down, None if gain is None else as_number("gain", gain, above=0))


def _at_least_one(size: float, words: str) -> tuple[float, str]:
    # A finite size of at least 1 keeps every later transform, logarithms too, in its domain.
    bounded = max(1.0, as_size(size))
    return bounded, f"{words} = {show(size)}" + ("" if bounded == size else f", taken as {show(bounded)}")
