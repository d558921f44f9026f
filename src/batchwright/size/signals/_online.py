"""goodput where something is learned on line: the time of an update, the length of an example, or the base size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, final

import numpy as np

from ..._checks import as_number
from ..._types import FloatArray
from ...errors import ArgumentError, MissingSignalError
from .._states import Check, check_flag, check_number, check_record, check_whole, optional
from ..noise import NoiseAverage, check_recent
from ..observation import SOURCES, Observation
from ..policy import Answer, ReasoningPolicy, State, ask, hold, options, show
from ._prediction import StepTime
from ._timings import (
    ENOUGH,
    FEWEST,
    LARGEST_SIZE,
    Timing,
    add_reading,
    check_positive,
    check_timings,
    num_readings,
    predict_seconds,
    timed,
)
from ._token_times import (
    ENOUGH_OF_TOKENS,
    add_length,
    add_tokens,
    check_lengths,
    check_token_readings,
    mean_seconds,
    spans_enough,
    token_timings,
)
from .noise_scale import (
    EARLY,
    FEWEST_NOISE,
    check_average,
    find_scale,
    lacks_noise,
    lean,
    need_two,
    take_noise,
)

SizeUnit: TypeAlias = Literal["examples", "tokens"]

# The sizes that are timed until two are, in parts of the base: those below it only if larger ones are out of bounds.
_EXPLORED = (1.0, 2.0, 4.0, 0.5, 0.25)
# Updates at the start of a run that are not read; fewer where the first reading of every size is left out too.
_START, _START_IN_TOKENS = 2, 3
# Updates of the base, and of another size, after which lengths do not tell the curve.
_LENGTHS_OF_BASE, _LENGTHS_OF_OTHER = 12, 6
# Updates to wait for the readings of a size; loaders form batches ahead, and some sizes never come.
_PATIENCE = 24
# Updates after which what runs is what the size in force gives; a loader may fill a part of it, and others are none.
_SETTLED = 12
# Updates to wait before sizes are tried again where no second one was timed; four times that for each useless change.
_TRY_AGAIN = 4 * _PATIENCE
_MOST_MOVES = 8
# Looks come after 8, 16, 32 and 64 updates of a size, then every 64: a fit takes about as long as a small update.
_FIRST_LOOK, _LOOK_EVERY = 8, 64
# What a smaller size must promise at first: the noise scale is low while the loss falls fast, and grows.
_GAIN_DOWN = 1.15
# How far beyond the sizes that were timed a first step goes.
_REACH = 2.0
_USUAL = (0.1, 0.9)
# How many times a noise scale that is only a bound must be allowed for before a smaller size is taken.
_MORE = 4.0
# What states of earlier versions do not have, and what it was.
_LATER: dict[str, Any] = {"recent": [], "moves": 0, "grace": 0, "readings": [], "lengths": []}


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
        first = self.horizon or FEWEST_NOISE
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
            "measured": 0,
            **_LATER,
        }

    def start(self) -> float | None:
        """Return ``base_size`` within the limits; None leaves the first size to the controller."""
        return None if self.base_size is None else float(self._within({"base": self.base_size}, self.base_size))

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the averages, the timings and how far the search is."""
        checks: dict[str, Check] = {
            "base": optional(_check_size),
            "average": partial(_check_average, horizon=self.horizon),
            "has_noise": check_flag,
            "scale": optional(check_positive),
            "length": optional(check_positive),
            "timings": check_timings,
            "explored": optional(check_whole),
            "size": optional(_check_size),
            "waited": check_whole,
            "recent": check_recent,
            "moves": check_whole,
            "grace": check_whole,
            "readings": check_token_readings,
            "lengths": check_lengths,
            "measured": check_whole,
        }
        check_record(name, state, checks, may_lack=["measured", *_LATER])
        if state.get("readings") and not state.get("lengths"):
            raise ArgumentError(f"{name}['lengths'] must not be empty beside readings")
        is_done = self.time is None and state["explored"] is None
        if is_done and not state.get("readings") and len(timed(state["timings"])) < FEWEST:  # these may divide anew
            raise ArgumentError(f"{name}['timings'] must hold {FEWEST} timed sizes after the search, got fewer")

    def decide(self, state: State, observation: Observation) -> Answer:
        """Take in the update; then time a size, or compare sizes every few updates."""
        if observation.ends_epoch or (observation.batch_size is None and state["size"] is not None):
            return hold(observation, state, "no batch ran")
        measured = round(NoiseAverage(**state["average"]).num_updates)  # for states of versions that did not count them
        state = self._take_in({**_LATER, "measured": measured, **state}, observation)
        left = _until_look(state["waited"])
        if left and state["explored"] is None:
            return hold(observation, state, f"the next look comes after {left} updates")
        if self.time is None and state["explored"] is None and len(_known(state)) < FEWEST:
            state = {**state, "explored": 0}  # groups of readings may divide anew
        if state["explored"] is not None:
            return self._explore(state, observation)
        return self._look(state, observation)

    def _take_in(self, state: State, observation: Observation) -> State:
        """Return the state with the noise, the seconds and the tokens of an update."""
        num_examples = int(observation.need("batch_size", by=self.name))
        num_tokens = self._tokens(observation)
        now = observation.current
        waited = state["waited"] + 1 if state["size"] == now else 1
        moves = min(state["moves"] + (state["size"] not in (None, now)), _MOST_MOVES)
        base = state["base"] or min(now, int(LARGEST_SIZE))
        after = {**state, "base": base, "size": now, "waited": waited, "moves": moves}
        if num_tokens and num_tokens <= LARGEST_SIZE:
            after["length"] = _mean(state["length"], num_tokens / num_examples)
            after["lengths"] = add_length(state["lengths"], num_tokens / num_examples)
        if self._needs_tokens and after["length"] is None and waited >= _FIRST_LOOK:
            raise MissingSignalError(
                f"{self.name} needs the tokens of updates, and {waited} updates told none; {SOURCES['batch_tokens']}"
            )
        if self.time is None:
            after |= self._time(after, observation, float(observation.need("seconds", by=self.name)))
        each = (after["length"] or math.inf) if self.unit == "tokens" else 1.0
        num = min(now, int(LARGEST_SIZE)) / each
        return take_noise(after, observation, size=num, horizon=self.horizon, by=self.name)

    def _time(self, state: State, observation: Observation, seconds: float) -> State:
        """Return what changes with the seconds of an update: by its tokens where they are told, else by its size.

        A state that timed sizes before tokens were told goes on with these.
        """
        tokens, waited = observation.batch_tokens, state["waited"]
        is_start = state["moves"] == 0 and state["explored"] == 0
        if tokens and not timed(state["timings"]):
            if waited <= (_START_IN_TOKENS if is_start else 1):
                return {}
            return {"readings": add_tokens(state["readings"], tokens, seconds), "timings": []}
        amount = self._amount(observation)
        if not amount or state["readings"] or (is_start and waited <= _START):
            return {}
        return {"timings": add_reading(state["timings"], amount, seconds)}

    def _tokens(self, observation: Observation) -> int | None:
        """Return the tokens of an update, or refuse if they are needed and never come."""
        if self._needs_tokens and observation.tokens is None:
            observation.need("batch_tokens", by=self.name)
        return observation.batch_tokens

    @property
    def _needs_tokens(self) -> bool:
        return self.unit == "tokens" or (self.time is not None and not self.time.lengths)

    def _amount(self, observation: Observation) -> int:
        """Return the size of the batch that ran in the unit of sizes, 0 if it is not known."""
        return (observation.batch_size if self.unit == "examples" else observation.batch_tokens) or 0

    def _explore(self, state: State, observation: Observation) -> Answer:
        """Time a second size, unless lengths have shown the curve; what runs are ordinary updates of training."""
        targets = [state["base"] * part for part in _EXPLORED]
        at, num_known = state["explored"], len(_known(state))
        while at < len(targets) and not self._is_explored(state, at):
            target = self._within(state, targets[at])
            is_there = observation.rounded(target) == observation.current
            num, enough = self._num_readings(state, observation, target, is_there=is_there)
            # A size that is not reached is waited for only as long as the size in force still moves.
            patience = _PATIENCE if is_there else _SETTLED if at == 0 else 2
            # Where not even the base is timed, nothing would be: another size is no use.
            is_open = at > state["explored"] or state["waited"] < patience or (at == 0 and not num_known)
            if num < enough and is_open:
                words = f"timing {show(target)}, {num} of {enough} updates"
                return ask(observation, {**state, "explored": at}, target, words)
            at += 1
        if num_known < FEWEST:  # bounds or pauses kept the size; it may be free later
            is_due = state["waited"] > _TRY_AGAIN * 4 ** state["moves"]
            again = {**state, "explored": 0 if is_due else at}
            return ask(observation, again, self._home(state), "no second size was timed, back to the base")
        return self._look({**state, "explored": None}, observation, is_first=True)

    def _is_explored(self, state: State, at: int) -> bool:
        """Return whether the curve is known well enough to compare sizes, after ``at`` sizes were tried."""
        if state["readings"] and at < 2:
            return spans_enough(token_timings(state["readings"]))
        return len(_known(state)) >= FEWEST

    def _num_readings(
        self, state: State, observation: Observation, target: float, *, is_there: bool
    ) -> tuple[int, int]:
        """Return how often a size was timed, as itself or as what its batches are after a while, and what is enough."""
        if state["readings"]:
            is_base = target <= self._within(state, state["base"])
            enough = _LENGTHS_OF_BASE if is_base else _LENGTHS_OF_OTHER
            return (min(state["waited"] - 1, len(state["readings"])) if is_there else 0), enough
        num = num_readings(state["timings"], float(observation.rounded(target)))
        ran = self._amount(observation)
        if is_there and ran and state["waited"] > _SETTLED:
            num = max(num, num_readings(state["timings"], ran))
        return num, ENOUGH

    def _look(self, state: State, observation: Observation, *, is_first: bool = False) -> Answer:
        """Compare sizes at the noise scale as far as it is known, else at the base size."""
        found = find_scale(state)
        if found.scale is None and lacks_noise(observation):
            return need_two(observation, state)
        state = {**state, "scale": found.scale if found.is_sure else None}
        each = (state["length"] or math.nan) if self.unit == "tokens" else 1.0
        scale, is_known = (found.scale or 0.0) * each, found.is_sure
        # A base is chosen near the noise scale or below it: far above it would waste.
        is_guess = not is_known and not scale > state["base"]
        if is_guess:
            scale = float(state["base"])
            name = f"noise scale not known yet, taken as the base size, {show(scale)}"
        else:
            name = f"noise scale {'' if is_known else 'at least '}{show(scale)} over {found.num_updates:.0f} updates"
            scale, words = lean(scale, state["base"], found.num_updates)
            name += words
        best = self._best(state, observation, scale, least=self._home(state) if is_guess else 1.0)
        if not (is_known or is_guess or is_first) and best.size < observation.current:
            # What is at least so much may be more; the time must demand a smaller size at several times as much too.
            best = self._best(state, observation, _MORE * scale, least=best.size)
        is_early = best.size < observation.current and found.num_updates < EARLY
        least = max(self.gain, _GAIN_DOWN) if is_early else self.gain
        if best.gain <= least:
            words = f"{name}, {show(best.size)} promises {best.gain:.3f} of the progress per second"
            return hold(observation, state, f"{words}, not above {show(least)}")
        words = f"{name}: {best.speed:.2f} times the {self.unit} per second of {observation.current}"
        return ask(observation, state, best.size, f"{words}, each worth {best.worth:.2f}")

    def _best(self, state: State, observation: Observation, scale: float, *, least: float) -> Comparison:
        candidates = self._candidates(state)
        sizes = np.array([float(observation.current), *candidates[candidates >= least]])
        speed = sizes / self._seconds(state, sizes)
        worth = (scale + state["base"]) / (scale + sizes)
        best = int(np.argmax(speed * worth))
        return Comparison(float(sizes[best]), float(speed[best] / speed[0]), float(worth[best] / worth[0]))

    def _candidates(self, state: State) -> FloatArray:
        low, high = self._limits(state)
        steps = np.geomspace(low, high, self.num_candidates)
        candidates = np.unique(np.rint([*steps, self._home(state)]))
        if self.time is not None:
            return candidates
        known, (short, long) = _known(state), np.quantile(self._lengths(state), _USUAL)
        is_near = (candidates * short >= known[0]["work"] / _REACH) & (candidates * long <= known[-1]["work"] * _REACH)
        return np.asarray(candidates[is_near])

    def _lengths(self, state: State) -> list[float]:
        """Return the work of one unit of a size in recent updates."""
        return state["lengths"] if state["readings"] and self.unit == "examples" else [1.0]

    def _limits(self, state: State) -> tuple[int, int]:
        base = state["base"]
        high = min(round(64 * base), int(LARGEST_SIZE)) if self.largest is None else self.largest
        low = self.smallest or max(1, round(min(base, 8 * high) / 8))
        return low, max(low, high)

    def _home(self, state: State) -> float:
        """Return the base within the limits, and at least two examples: one alone has no noise to measure."""
        return self._within(state, max(2, state["base"]) if self.unit == "examples" else state["base"])

    def _within(self, state: State, size: float) -> float:
        low, high = self._limits(state)
        return min(max(size, low), high)

    def _seconds(self, state: State, sizes: FloatArray) -> FloatArray:
        if self.time is None and state["readings"]:
            return mean_seconds(token_timings(state["readings"]), sizes, self._lengths(state))
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


def _known(state: State) -> list[Timing]:
    """Return the amounts of work that are timed, smallest first."""
    if state["readings"]:
        return timed(token_timings(state["readings"]), ENOUGH_OF_TOKENS)
    return timed(state["timings"])


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
    mine = as_number(f"{name}['horizon']", given, above=0)
    check_average(name, saved, horizon=mine if horizon is None else horizon)


def _check_size(name: str, saved: Any) -> None:
    check_number(name, saved, least=1, most=LARGEST_SIZE)
