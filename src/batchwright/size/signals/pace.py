"""step_time: the time of an update is held at a target."""

from __future__ import annotations

import math
import sys
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, SupportsIndex, final

from ..._checks import as_number
from .._states import check_number, check_record, check_size, optional
from ..observation import Observation, Unit
from ..policy import TIMES, Answer, Policy, ReasoningPolicy, State, as_size, hold, options, show, word
from ._readings import SURE, Reading, Readings, make_readings, seconds_of

# Steps of a period, if the user does not say.
_NUM_STEPS = 16


@final
@dataclass(frozen=True, repr=False)
class StepTimeTarget(ReasoningPolicy):
    """Holds the seconds of an update near a target; the state remembers a size that was too slow."""

    name: ClassVar[str] = "step_time"
    target_ms: float
    _: KW_ONLY
    tolerance: float
    max_factor: float
    readings: Readings

    def init(self) -> State:
        """Return a state without readings."""
        return {"readings": self.readings.init(), "too_slow": None, "base": None}

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the readings and the size that was too slow."""
        base = {"size": check_size, "seconds": lambda at, saved: check_number(at, saved, above=0)}
        checks = {
            "readings": lambda at, saved: self.readings.check_state(saved, at),
            "too_slow": optional(check_size),
            "base": optional(lambda at, saved: check_record(at, saved, base)),
        }
        check_record(name, state, checks)

    def decide(self, state: State, observation: Observation) -> Answer:
        """Gather seconds, and at the end of a period scale the size if they are off the target."""
        value = seconds_of(observation, self.readings, state["readings"], by=self.name)
        gathered = state["readings"]
        found, readings, done = self.readings.gather(gathered, observation, value, by=self.name, rolls=True)
        state = {**state, "readings": readings}
        return hold(observation, state, done) if found is None else self._compare(state, observation, found)

    def _compare(self, state: State, observation: Observation, found: Reading) -> Answer:
        sure, size = max(self.tolerance, SURE * found.error), observation.current
        share = max(found.value * 1000 / self.target_ms, sys.float_info.min)  # a quotient of extremes may come out as 0
        words = f"{show(1000 * found.value)} ms per update, target {show(self.target_ms)} ms ± {show(100 * sure)} %"
        if share > 1 + sure:
            return self._scale({**state, "too_slow": size, "base": None}, observation, 1 / share, words)
        state = self._weigh(state, size, found, sure)
        if share >= 1 - sure:
            return hold(observation, state, f"{words}, near it")
        return self._scale(state, observation, 1 / share, words)

    def _weigh(self, state: State, size: int, found: Reading, sure: float) -> State:
        """Forget the size that was too slow once updates of the same size have become faster."""
        base = state["base"]
        if state["too_slow"] is None or base is None or base["size"] != size:
            return {**state, "base": {"size": size, "seconds": found.value}}
        if found.value < base["seconds"] * (1 - sure):
            return {**state, "too_slow": None, "base": {"size": size, "seconds": found.value}}
        return state

    def _scale(self, state: State, observation: Observation, factor: float, words: str) -> Answer:
        exact, slow = observation.exact, state["too_slow"]
        factor = min(max(factor, 1 / self.max_factor), self.max_factor)
        wanted = as_size(max(1.0, exact * factor))
        # What counts is the size that will run: a wish just below the size that was too slow is rounded to it.
        if factor > 1 and slow is not None and observation.rounded(wanted) >= slow:
            # Halfway between whole sizes, in factors: whatever the seconds do between the two, this search ends.
            wanted = math.sqrt(observation.current * slow)
            if not observation.current < observation.rounded(wanted) < slow:
                return hold(observation, state, f"{words}, but {show(slow)} was too slow")
            words = f"{words}, but {show(slow)} was too slow"
        return Answer(wanted, state, f"{words}: {show(exact)} {TIMES} {show(wanted / exact)} = {show(wanted)}")

    def arguments(self) -> list[str]:
        """Return the arguments of the call."""
        settings = options(tolerance=(self.tolerance, 0.1), max_factor=(self.max_factor, 2))
        return [word(self.target_ms), *settings, *self.readings.written("step")]


def step_time(
    target_ms: float,
    *,
    tolerance: float = 0.1,
    max_factor: float = 2.0,
    per: Unit = "step",
    every: SupportsIndex | None = None,
) -> Policy:
    """Hold the time of an update at a target, so that the device is neither overloaded nor idle.

    With ``t`` the median seconds of the updates of a period, outside ``target ± tolerance``::

        B ← B · target / t,   at most max_factor up or down per period

    An update has costs that do not depend on its size, so this comes nearer from one side and does not pass the target.
    The band around the target is at least three standard errors of the median wide, so a noisy clock is not followed;
    while the size stays, the median is that of up to 101 updates, and the band becomes narrower. A
    size that was too slow is remembered: the batch then only grows halfway towards it, until updates of the same size
    become faster.

    Args:
        target_ms: milliseconds of an update, above 0.
        tolerance: how far off is near enough, as a share, above 0 and below 1.
        max_factor: the most that the size changes by per period, above 1.
        per: a period: ``"step"``, ``"epoch"``, ``"examples"`` or ``"tokens"``.
        every: units per period; 16 steps or 1 epoch by default, needed for examples.

    Returns:
        A policy that needs ``seconds`` and ``batch_size`` of every update, and ``epoch`` for periods of epochs.

    >>> policy = step_time(100, every=3)
    >>> state, size, sizes = policy.init(), 16, []
    >>> for _ in range(40):  # 20 ms for each update and 1 ms for each example: 80 examples take 100 ms
    ...     wanted, state = policy.update(state, Observation(size=size, batch_size=size, seconds=0.02 + 0.001 * size))
    ...     size = round(wanted)
    ...     sizes.append(size)
    >>> sorted(set(sizes)), sizes[-1]  # 16 · 2, 32 · 100 / 52, 62 · 100 / 82; 76 examples take 96 ms
    ([16, 32, 62, 76], 76)
    """
    return StepTimeTarget(
        as_number("target_ms", target_ms, above=0),
        tolerance=as_number("tolerance", tolerance, above=0, below=1),
        max_factor=as_number("max_factor", max_factor, above=1),
        readings=make_readings(per, every, by="step_time", num_usual=_NUM_STEPS),
    )
