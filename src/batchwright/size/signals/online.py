"""goodput where something is learned on line: the time of an update, the length of an example, or the base size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, final

import numpy as np

from ..._types import FloatArray
from ...errors import ArgumentError
from .._states import check_number, check_record, check_size, check_whole, optional
from ..noise import MIN_UPDATES, NoiseAverage
from ..observation import Observation
from ..policy import Answer, ReasoningPolicy, State, ask, hold, options, show
from ._prediction import StepTime
from ._timings import ENOUGH, Timing, add_reading, check_positive, check_timings, num_readings, predict_seconds, timed
from .noise_scale import add_noise, check_average, lacks_noise

SizeUnit: TypeAlias = Literal["examples", "tokens"]

# The sizes that are timed first, in parts of the base: those below it if larger ones are no faster, or out of bounds.
_EXPLORED = (1.0, 2.0, 4.0, 0.5, 0.25)
_NUM_EXPLORED = 3
_FASTER = 1.25
# Updates to wait for the readings of a size; loaders form batches ahead, and some sizes never come.
_PATIENCE = 24
# Looks come after 8, 16, 32 and 64 updates of a size, then every 64: a fit takes about as long as a small update.
_FIRST_LOOK, _LOOK_EVERY = 8, 64
# How far beyond the sizes that were timed a first step goes.
_REACH = 2.0
# Measured updates over which averages of the noise forget, if no horizon in examples is given.
_NUM_NOISE = 64.0
# A noise that is not known stays below this many standard errors of the squared gradient.
_SURE = 2.0


class Comparison(NamedTuple):
    """The best size, and what it promises against the size in force."""

    size: float
    speed: float
    worth: float

    @property
    def gain(self) -> float:
        """Return how many times the progress per second it promises."""
        return self.speed * self.worth


@final
@dataclass(frozen=True, repr=False)
class OnlineGoodput(ReasoningPolicy):
    """Asks for the size that makes the most progress per second, as far as training has shown it."""

    name: ClassVar[str] = "goodput"
    time: StepTime | None
    base_size: int | None
    smallest: int | None = None
    largest: int | None = None
    num_candidates: int = 50
    horizon: float | None = None
    gain: float = 1.05
    unit: SizeUnit = "examples"

    def init(self) -> State:
        """Return a state that has seen nothing."""
        first = self.horizon or _NUM_NOISE
        return {
            "base": self.base_size,
            "average": NoiseAverage(first).to_state(),
            "has_noise": False,
            "scale": None,
            "length": None,
            "timings": [],
            "explored": 0 if self.time is None else None,
            "size": None,
            "waited": 0,
        }

    def start(self) -> float | None:
        """Return ``base_size``; None leaves the first size to the controller."""
        return None if self.base_size is None else float(self.base_size)

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the averages, the timings and how far the search is."""
        checks = {
            "base": optional(check_size),
            "average": partial(_check_average, horizon=self.horizon),
            "has_noise": _check_flag,
            "scale": optional(check_positive),
            "length": optional(check_positive),
            "timings": check_timings,
            "explored": optional(check_whole),
            "size": optional(check_size),
            "waited": check_whole,
        }
        check_record(name, state, checks)

    def decide(self, state: State, observation: Observation) -> Answer:
        """Take in the update; then time a size, or compare sizes every few updates."""
        if observation.ends_epoch or (observation.batch_size is None and state["size"] is not None):
            return hold(observation, state, "no batch ran")
        state = self._take_in(state, observation)
        if state["explored"] is not None:
            return self._explore(state, observation)
        left = _until_look(state["waited"])
        if left:
            return hold(observation, state, f"the next look comes after {left} updates")
        return self._look(state, observation)

    def _take_in(self, state: State, observation: Observation) -> State:
        """Return the state with the noise, the seconds and the tokens of an update."""
        num_examples = int(observation.need("batch_size", by=self.name))
        num_tokens = self._tokens(observation)
        now = observation.current
        waited = state["waited"] + 1 if state["size"] == now else 1
        after = {**state, "base": state["base"] or now, "size": now, "waited": waited}
        if num_tokens:
            after["length"] = _mean(state["length"], num_tokens / num_examples)
        if self.time is None:
            seconds = float(observation.need("seconds", by=self.name))
            amount = num_examples if self.unit == "examples" else num_tokens
            if amount:
                after["timings"] = add_reading(state["timings"], amount, seconds)
        return self._take_noise(after, observation)

    def _tokens(self, observation: Observation) -> int | None:
        """Return the tokens of an update, or refuse if they are needed and never come."""
        needs = self.unit == "tokens" or (self.time is not None and not self.time.lengths)
        if needs and observation.tokens is None:
            observation.need("batch_tokens", by=self.name)
        return observation.batch_tokens

    def _take_noise(self, state: State, observation: Observation) -> State:
        if lacks_noise(observation) or (observation.noise_s is None and state["has_noise"]):
            return state
        average = NoiseAverage(**state["average"])
        if self.horizon is None:
            # The average forgets after so many updates of the size that runs, and an update counts by its examples.
            horizon = _NUM_NOISE * int(observation.need("batch_size", by=self.name))
            part = min(average.horizon / horizon, 1 / max(average.weight, 1e-300))
            weights = {"weight": average.weight * part, "weight_square": average.weight_square * part**2}
            average = replace(average, horizon=horizon, **weights)
        average = add_noise(average.to_state(), observation, by=self.name)
        return {**state, "average": average.to_state(), "has_noise": True}

    def _explore(self, state: State, observation: Observation) -> Answer:
        """Time a few sizes, each for a few updates; they are ordinary updates of training."""
        targets = [state["base"] * part for part in _EXPLORED]
        at, timings = state["explored"], state["timings"]
        while at < len(targets) and len(timed(timings)) < _NUM_EXPLORED:
            if targets[at] > 2 * state["base"] and not _is_faster(timings, state["base"]):
                at += 1  # the other end of the curve says more, and costs less
                continue
            target, num = self._within(state, targets[at]), num_readings(timings, targets[at])
            is_there = observation.rounded(target) == observation.current
            # Where not even the base is timed, nothing would be: another size is no use.
            is_open = at == 0 or at > state["explored"] or (is_there and state["waited"] < _PATIENCE)
            if num < ENOUGH and is_open:
                words = f"timing {show(target)}, {num} of {ENOUGH} updates"
                return ask(observation, {**state, "explored": at}, target, words)
            at += 1
        if len(timed(timings)) < 2:  # bounds or pauses kept the size; it may be free later
            again = {**state, "explored": 0 if state["waited"] > 4 * _PATIENCE else at}
            return ask(observation, again, state["base"], "no second size was timed, back to the base")
        return self._look({**state, "explored": None}, observation, is_first=True)

    def _look(self, state: State, observation: Observation, *, is_first: bool = False) -> Answer:
        """Compare sizes at the noise scale as far as it is known."""
        average = NoiseAverage(**state["average"])
        updates = f"{average.num_updates:.0f} updates"
        scale, is_sure = self._scale(state, average)
        if scale is None:
            words = f"noise scale not reliable after {updates}"
            if is_first:
                return ask(observation, state, state["base"], f"{words}, back to the base")
            return hold(observation, state, words)
        state = {**state, "scale": scale if is_sure else None}
        if self.unit == "tokens":
            scale *= state["length"] or math.nan
        best = self._best(state, observation, scale)
        name = f"noise scale {'' if is_sure else 'at least '}{show(scale)} over {updates}"
        if best.gain <= self.gain or not (is_sure or is_first or best.size > observation.current):
            words = f"{name}, {show(best.size)} promises {best.gain:.3f} of the progress per second"
            return hold(observation, state, f"{words}, not above {show(self.gain)}")
        words = f"{name}: {best.speed:.2f} times the {self.unit} per second of {observation.current}"
        return ask(observation, state, best.size, f"{words}, each worth {best.worth:.2f}")

    def _scale(self, state: State, average: NoiseAverage) -> tuple[float | None, bool]:
        """Return the noise scale, and whether it was reliable; else what it is at least, None if nobody can tell.

        A squared gradient that is lost in its own error is at most two standard errors above its average, so that the
        noise scale is at least ``S / (G2 + 2 errors)``. A batch far below the noise scale never measures it; the bound
        lets it grow until it does. A scale that was reliable once stands until the next one, or until the bound is
        above it.
        """
        if average.is_reliable:
            return average.scale, True
        most = average.g2 + _SURE * average.g2_error
        is_bound = average.num_updates >= MIN_UPDATES and average.s > 0 and most > 0
        least, before = (average.s / most if is_bound else None), state["scale"]
        if before is None or (least is not None and least > before):
            return least, False
        return before, True

    def _best(self, state: State, observation: Observation, scale: float) -> Comparison:
        sizes = np.array([float(observation.current), *self._candidates(state)])
        speed = sizes / self._seconds(state, sizes)
        worth = (scale + state["base"]) / (scale + sizes)
        best = int(np.argmax(speed * worth))
        return Comparison(float(sizes[best]), float(speed[best] / speed[0]), float(worth[best] / worth[0]))

    def _candidates(self, state: State) -> FloatArray:
        low, high = self._limits(state)
        candidates = np.unique(np.rint(np.geomspace(low, high, self.num_candidates)))
        if self.time is not None:
            return candidates
        known = timed(state["timings"])
        near = (candidates >= known[0]["work"] / _REACH) & (candidates <= known[-1]["work"] * _REACH)
        return candidates[near]

    def _limits(self, state: State) -> tuple[int, int]:
        base = state["base"]
        low = max(1, round(base / 8)) if self.smallest is None else self.smallest
        return low, max(low, round(64 * base) if self.largest is None else self.largest)

    def _within(self, state: State, size: float) -> float:
        low, high = self._limits(state)
        return min(max(size, low), high)

    def _seconds(self, state: State, sizes: FloatArray) -> FloatArray:
        if self.time is None:
            return predict_seconds(state["timings"], sizes)
        each = state["length"] if self.unit == "tokens" else 1.0
        items = np.maximum(1, np.rint(sizes / each)).astype(np.int64)
        time = self.time if self.time.lengths else replace(self.time, lengths=(max(1, round(state["length"])),))
        return time.seconds(items)

    def arguments(self) -> list[str]:
        """Return the arguments of the call."""
        return [
            *([] if self.time is None else self.time.arguments()),
            *options(
                base_size=(self.base_size, None),
                unit=(self.unit, "examples"),
                smallest=(self.smallest, None),
                largest=(self.largest, None),
                num_candidates=(self.num_candidates, 50),
                horizon=(self.horizon, None),
                gain=(self.gain, 1.05),
            ),
        ]


def _is_faster(timings: list[Timing], base: float) -> bool:
    """Return whether twice the base ran clearly more per second than the base; True if nobody can tell."""
    paces = [timing["work"] / median(timing["seconds"]) for timing in timed(timings) if timing["work"] > base / 1.2]
    return len(paces) < 2 or paces[1] > _FASTER * paces[0]


def _until_look(waited: int) -> int:
    """Return the updates until the next look; 0 is now."""
    if waited >= _LOOK_EVERY:
        return -waited % _LOOK_EVERY
    look = _FIRST_LOOK
    while look < waited:
        look *= 2
    return look - waited


def _mean(before: float | None, value: float) -> float:
    """Return a moving mean over about 32 updates."""
    return value if before is None else before + (value - before) / 32


def _check_average(name: str, saved: Any, *, horizon: float | None) -> None:
    given = saved.get("horizon") if isinstance(saved, dict) else None
    check_number(f"{name}['horizon']", given, above=0)
    check_average(name, saved, horizon=given if horizon is None else horizon)


def _check_flag(name: str, saved: Any) -> None:
    if not isinstance(saved, bool):
        raise ArgumentError(f"{name} must be True or False, got {saved!r}")
