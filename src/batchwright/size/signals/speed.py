"""speed_driven and step_time: the batch follows the seconds of updates."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import SupportsIndex, final

from ..._checks import as_number, as_whole
from .._states import check_number, check_record, check_size, check_whole, optional
from ..observation import Observation, Unit
from ..policy import TIMES, Answer, Policy, ReasoningPolicy, State, hold, options, show, word
from ._readings import Reading, Readings, make_readings

# A change counts if it is this many of its own standard errors; fewer is the noise of the clock. A larger batch that
# seems faster is worth trying out, a device that seems to have changed is not.
_FASTER, _CHANGED = 2.0, 3.0
# Steps of a period, if the user does not say. Speeds of two periods are compared, seconds with a target only.
_SPEED_STEPS, _TIME_STEPS = 32, 16


@final
@dataclass(frozen=True, repr=False)
class SpeedDriven(ReasoningPolicy):
    """Grows the batch while the examples per second stay the same; the state remembers the last period's speed."""

    _: KW_ONLY
    plateau: float
    factor: float
    patience: int | None
    readings: Readings

    def init(self) -> State:
        """Return a state without readings."""
        return {"readings": self.readings.init(), "before": None, "num_in_vain": 0}

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the readings and the last period."""
        speed = {
            "size": check_size,
            "speed": lambda at, saved: check_number(at, saved, above=0),
            "error": lambda at, saved: check_number(at, saved, least=0),
        }
        checks = {
            "readings": lambda at, saved: self.readings.check_state(saved, at),
            "before": optional(lambda at, saved: check_record(at, saved, speed)),
            "num_in_vain": check_whole,
        }
        check_record(name, state, checks)

    def decide(self, state: State, observation: Observation) -> Answer:
        """Gather speeds, and at the end of a period compare with the one before."""
        value = _seconds(observation, state["readings"], by=self.name)
        if value is not None and math.isfinite(value) and value > 0:
            value = observation.need("batch_size") / value
        gathered, rolls = state["readings"], self._has_given_up(state)
        found, readings, done = self.readings.gather(gathered, observation, value, by=self.name, rolls=rolls)
        state = {**state, "readings": readings}
        return hold(observation, state, done) if found is None else self._compare(state, observation, found)

    def _has_given_up(self, state: State) -> bool:
        return self.patience is not None and state["num_in_vain"] >= self.patience

    def _compare(self, state: State, observation: Observation, found: Reading) -> Answer:
        before, size, given_up = state["before"], observation.current, self._has_given_up(state)
        now = {**state, "before": {"size": size, "speed": found.value, "error": found.error}}
        speed = f"{show(found.value)} examples per second"
        if before is None or before["size"] > size:
            return hold(observation, now, f"{speed} at {size}, nothing to compare with")
        rise, is_larger = found.value / before["speed"] - 1, before["size"] < size
        errors = (_FASTER if is_larger else _CHANGED) * math.hypot(found.error, before["error"])
        sure = max(self.plateau, errors)
        words = f"{speed}, {show(100 * rise)} % more than before at {before['size']} (plateau {show(100 * sure)} %)"
        if rise > sure:
            return hold(observation, {**now, "num_in_vain": 0}, f"{words}, still rising")
        if rise < -sure and not is_larger:
            return hold(observation, {**now, "num_in_vain": 0}, f"{words}, slower than before")
        num = state["num_in_vain"] + is_larger
        # Once it has given up, all later speeds are compared with one and the same: each comparison may err.
        state = {**(state if given_up and not is_larger else now), "num_in_vain": num}
        if self._has_given_up(state):
            return hold(observation, state, f"{words}, and {num} larger batches in a row were no faster")
        wanted = observation.exact * self.factor
        return Answer(wanted, state, f"{words}: {show(observation.exact)} {TIMES} {show(self.factor)} = {show(wanted)}")

    def arguments(self) -> list[str]:
        """Return the arguments of the call."""
        settings = options(plateau=(self.plateau, 0.05), factor=(self.factor, 2), patience=(self.patience, 2))
        return [*settings, *self.readings.written("epoch")]


def speed_driven(
    *,
    plateau: float = 0.05,
    factor: float = 2.0,
    patience: SupportsIndex | None = 2,
    per: Unit = "epoch",
    every: SupportsIndex | None = None,
) -> Policy:
    """Grow the batch when training no longer becomes faster; it never shrinks the batch.

    The speed of a period is the median of ``batch_size / seconds`` over its updates. It is at a plateau if it rose by
    at most ``plateau`` since the period before::

        plateau   B × factor
        rising    B holds, until the speed has settled

    A rise counts only if it is above two of its standard errors too, so a noisy clock is not followed. If
    ``patience`` larger batches in a row were no faster, the device is busy and the size holds, until the speed changes.

    This is one half of the rule *if memory is free and speed is at a plateau, grow; if memory is full, shrink*:
    ``minimum(memory_driven(per="epoch"), speed_driven())``.

    Args:
        plateau: the rise of the speed that still counts as none, as a share, 0 or more.
        factor: by how much to grow, above 1.
        patience: larger batches in a row that bring nothing before the size holds; None goes on to the maximum.
        per: a period: ``"epoch"``, ``"step"`` or ``"examples"``.
        every: units per period; 1 epoch or 32 steps by default, needed for examples.

    Returns:
        A policy that needs ``seconds`` and ``batch_size`` of every update, and ``epoch`` for periods of epochs.

    >>> policy = speed_driven(per="step", every=3)
    >>> state, size, sizes = policy.init(), 16, []
    >>> for _ in range(60):  # 0.1 seconds for each update and 0.01 for each example: at most 100 examples per second
    ...     seen = Observation(size=size, batch_size=size, seconds=0.1 + 0.01 * size)
    ...     wanted, state = policy.update(state, seen)
    ...     size = round(wanted)
    ...     sizes.append(size)
    >>> sorted(set(sizes))
    [16, 32, 64, 128, 256, 512]
    """
    return SpeedDriven(
        plateau=as_number("plateau", plateau, least=0),
        factor=as_number("factor", factor, above=1),
        patience=None if patience is None else as_whole("patience", patience, least=1),
        readings=make_readings(per, every, by="speed_driven", num_usual=_SPEED_STEPS),
    )


@final
@dataclass(frozen=True, repr=False)
class StepTimeTarget(ReasoningPolicy):
    """Holds the seconds of an update near a target; the state remembers a size that was too slow."""

    name = "step_time"
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
        value = _seconds(observation, state["readings"], by=self.name)
        gathered = state["readings"]
        found, readings, done = self.readings.gather(gathered, observation, value, by=self.name, rolls=True)
        state = {**state, "readings": readings}
        return hold(observation, state, done) if found is None else self._compare(state, observation, found)

    def _compare(self, state: State, observation: Observation, found: Reading) -> Answer:
        sure, size = max(self.tolerance, _CHANGED * found.error), observation.current
        share = found.value * 1000 / self.target_ms
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
        wanted = max(1.0, exact * factor)
        if factor > 1 and slow is not None and wanted >= slow:
            # Halfway, in factors: whatever the seconds do between the two sizes, this search ends.
            wanted = math.sqrt(exact * slow)
            if round(wanted) in (observation.current, slow):
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
        per: a period: ``"step"``, ``"epoch"`` or ``"examples"``.
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
        readings=make_readings(per, every, by="step_time", num_usual=_TIME_STEPS),
    )


def _seconds(observation: Observation, gathered: State, *, by: str) -> float | None:
    """Return the seconds of an update, None for an observation that only ends an epoch in which others had them."""
    is_bare = observation.batch_size is None and observation.seconds is None
    if observation.ends_epoch or (is_bare and gathered["num_seen"] > 0):
        return None
    observation.need("batch_size", by=by)
    return float(observation.need("seconds", by=by))
