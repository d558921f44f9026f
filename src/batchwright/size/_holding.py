"""What may be put behind a policy to hold its answer: a pause, a dead band, no way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, SupportsIndex, final

from ..errors import ArgumentError
from ._counting import Unit, count_of, in_force
from ._numbers import as_number, as_whole
from ._transforms import NamedTransform
from .observation import Observation
from .policy import State, Transform


@final
@dataclass(frozen=True, repr=False)
class Cooldown(NamedTransform):
    """No change for a while after a change.

    The state remembers the size in force and the count at the last observation, and the count at the last change. The
    change is seen on the size in force, so that bounds and rounding behind this are counted as they came out.
    """

    name: ClassVar[str] = "cooldown"
    verb: ClassVar[str] = "holds"
    per: Unit
    pause: int

    def init(self) -> State:
        """Return a state that has seen nothing."""
        return {"size": None, "count": None, "changed": None}

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the size in force during the pause, else the size."""
        now = in_force(observation)
        if now is None:
            return size, state
        count = count_of(observation, self.per, by=self.name)
        changed: int | None = state["changed"] if state["size"] in (None, now) else state["count"]
        after: dict[str, Any] = {"size": now, "count": count, "changed": changed}
        pausing = changed is not None and count - changed < self.pause
        return (float(now) if pausing else size), after

    def _arguments(self) -> list[str]:
        return [f"{_PLURALS[self.per]}={self.pause}"]


_PLURALS: dict[Unit, str] = {"examples": "examples", "step": "steps", "epoch": "epochs"}


def cooldown(
    *, examples: SupportsIndex | None = None, steps: SupportsIndex | None = None, epochs: SupportsIndex | None = None
) -> Transform:
    """Return a transform that holds the size for a while after each change; give one of the three.

    Args:
        examples: examples to hold for.
        steps: updates to hold for.
        epochs: epochs to hold for.

    >>> cooldown(steps=100)
    cooldown(steps=100)
    """
    pauses: dict[Unit, SupportsIndex | None] = {"examples": examples, "step": steps, "epoch": epochs}
    given = [(per, pause) for per, pause in pauses.items() if pause is not None]
    if len(given) != 1:
        named = ", ".join(f"{_PLURALS[per]}={pause!r}" for per, pause in given) or "none"
        raise ArgumentError(f"cooldown needs one of examples, steps and epochs, got {named}")
    [(per, pause)] = given
    return Cooldown(per, as_whole(_PLURALS[per], pause, least=1))


@final
@dataclass(frozen=True, repr=False)
class Hysteresis(NamedTransform):
    """No change while the wanted size is near the size in force."""

    name: ClassVar[str] = "hysteresis"
    verb: ClassVar[str] = "holds"
    fraction: float

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the size in force inside the dead band, else the size."""
        now = in_force(observation)
        if now is None:
            return size, state
        inside = now / (1 + self.fraction) <= size <= now * (1 + self.fraction)
        return (float(now) if inside else size), state


def hysteresis(fraction: float) -> Transform:
    """Return a transform that ignores small wishes: it holds while ``|log(b / B)| <= log(1 + fraction)``.

    Args:
        fraction: half the width of the dead band; 0.25 holds from ``B / 1.25`` to ``1.25 × B``.

    >>> step = hysteresis(0.25)
    >>> [step.update(None, Observation(size=100), size)[0] for size in (79.0, 81.0, 125.0, 126.0)]
    [79.0, 100.0, 100.0, 126.0]
    """
    return Hysteresis(as_number("fraction", fraction, above=0))


@final
@dataclass(frozen=True, repr=False)
class Monotone(NamedTransform):
    """Never below the largest size that was in force; the state is that size."""

    name: ClassVar[str] = "monotone"
    verb: ClassVar[str] = "holds"

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the size, or the largest so far."""
        now = in_force(observation)
        floor = max(state or 0.0, float(now or 0))
        # Where no size is in force, the answers themselves are remembered.
        return max(size, floor), max(size, floor) if now is None else floor


def monotone() -> Transform:
    """Return a transform that never asks for less than the largest size that was in force.

    A wish that bounds or a rate limit cut down is not remembered.

    >>> step = monotone()
    >>> step.update(step.init(), Observation(size=64), 32.0)
    (64.0, 64.0)
    """
    return Monotone()
