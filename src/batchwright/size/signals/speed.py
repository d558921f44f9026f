"""speed_driven: the batch grows when examples per second no longer rise."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import SupportsIndex, final

from ..._checks import as_number, as_whole
from .._states import check_number, check_record, check_size, check_whole, optional
from ..observation import Observation, Unit
from ..policy import TIMES, Answer, Policy, ReasoningPolicy, State, hold, options, show
from ._readings import SURE, Reading, Readings, make_readings, seconds_of

# A change counts if it is this many of its own standard errors. A larger batch that seems faster is worth trying out,
# a device that seems to have changed is not.
_FASTER = 2.0
# Steps of a period, if the user does not say; more than for a comparison with a target, as two periods are compared.
_NUM_STEPS = 32


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
        value = seconds_of(observation, self.readings, state["readings"], by=self.name)
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
        errors = (_FASTER if is_larger else SURE) * math.hypot(found.error, before["error"])
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
        per: a period: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
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
        readings=make_readings(per, every, by="speed_driven", num_usual=_NUM_STEPS),
    )
