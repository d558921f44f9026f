"""Transforms, which shape a policy's answer, and ``chain``, which puts them after one.

``clamp``, ``multiple_of``, ``smooth`` and ``rate_limit`` change the size; ``cooldown``, ``hysteresis`` and ``monotone``
hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, SupportsIndex, final

from .._checks import as_number, as_whole
from ..errors import ArgumentError, MissingSignalError
from ._states import check_none, check_number, check_parts, check_record, check_size, check_whole, optional
from .observation import Observation, Unit, nearest_multiple
from .policy import Named, Policy, State, Transform, as_size, check_policies, checker_of, show, unit_of, word

_BEGINNING = Observation(epoch=0, step=0, examples=0, tokens=0)


@final
@dataclass(frozen=True, repr=False)
class Chain(Named, Policy):
    """A policy whose answer goes through transforms.

    What the last answer was before a rounding is in the state too, beside the answer itself: while that answer is in
    force, the policy goes on from the number before the rounding.
    """

    policy: Policy
    transforms: tuple[Transform, ...]

    @property
    def unit(self) -> str | None:
        """Return what sizes count, None if the policy does not say."""
        return unit_of(self.name, [self.policy])

    def init(self) -> State:
        """Return the states of all parts."""
        return {"policy": self.policy.init(), "transforms": [transform.init() for transform in self.transforms]}

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the transformed size; NaN, which holds the size, skips the transforms after it."""
        wanted, inner = self.policy.update(state["policy"], self._inside(state, observation))
        size, after = as_size(wanted), list(state["transforms"])
        exact = size
        for index, transform in enumerate(self.transforms):
            if math.isnan(size):
                break
            answer, after[index] = transform.update(after[index], observation, size)
            changed = as_size(answer)
            if isinstance(transform, MultipleOf):
                exact = max(exact, float(transform.number))  # the smallest multiple is a bound, not a rounding
            elif changed != size and not isinstance(transform, Hysteresis):
                exact = changed
            size = changed
        found: dict[str, Any] = {"policy": inner, "transforms": after}
        if math.isnan(size):
            return size, {**state, **found}
        return size, (found if exact == size else {**found, "rounded": {"from": exact, "to": size}})

    def start(self) -> float | None:
        """Return the policy's start, transformed with fresh states."""
        size = self.policy.start()
        for transform in self.transforms if size is not None else ():
            try:
                size, _ = transform.update(transform.init(), _BEGINNING, as_size(size))
            except MissingSignalError:  # a transform of a measured figure has nothing to say yet
                continue
        return size

    def explain(self, state: State, observation: Observation) -> str:
        """Join the words of all parts that change something."""
        inside = self._inside(state, observation)
        words = [self.policy.explain(state["policy"], inside)]
        size = as_size(self.policy.update(state["policy"], inside)[0])
        for transform, memory in zip(self.transforms, state["transforms"], strict=True):
            if math.isnan(size):
                break
            words.append(transform.explain(memory, observation, size))
            size = as_size(transform.update(memory, observation, size)[0])
        return "; ".join(said for said in words if said)

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the states of all parts."""
        sizes = {"from": check_number, "to": check_number}
        checks = {
            "policy": lambda at, saved: self.policy.check_state(saved, at),
            "transforms": lambda at, saved: check_parts(at, saved, [checker_of(part) for part in self.transforms]),
            "rounded": lambda at, saved: check_record(at, saved, sizes),
        }
        check_record(name, state, checks, may_lack=["rounded"])

    def _inside(self, state: State, observation: Observation) -> Observation:
        """Return what the policy sees: the roundings to come, and the size before the last one if it is in force."""
        numbers = tuple(part.number for part in self.transforms if isinstance(part, MultipleOf))
        if numbers:
            observation = replace(observation, multiples=(*numbers, *observation.multiples))
        rounded = state.get("rounded")
        if rounded is None or observation.exact_size != rounded["to"]:
            return observation
        # Below one example, as states of earlier versions may say, no policy can go on by factors.
        return replace(observation, exact_size=max(1.0, rounded["from"]))

    def arguments(self) -> list[str]:
        """Return the policy and its transforms."""
        return [word(part) for part in (self.policy, *self.transforms)]


def chain(policy: Policy, *transforms: Transform) -> Policy:
    """Return a policy whose answer goes through transforms, first to last.

    Args:
        policy: asks for a size.
        *transforms: shape the answer; put ``clamp`` last.

    >>> from .schedules import exponential
    >>> policy = chain(exponential(30, 3), rate_limit(2), multiple_of(8), clamp(32, 4096))
    >>> policy.explain(policy.init(), Observation(epoch=2, size=85))
    'exponential: 30 × 3^2 = 270 at epoch 2; rate_limit(2) allows 170; multiple_of(8) makes it 168'
    """
    check_policies("chain", (policy,))
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise ArgumentError(
                f"chain takes a policy and then transforms, got {transform!r}; "
                "several policies go into maximum or switch"
            )
    return Chain(policy, transforms)


class NamedTransform(Named, Transform):
    """A transform that is written as its call and explains itself in one verb; abstract.

    Attributes:
        verb: what it does to a size that it changes.
    """

    verb: ClassVar[str] = "makes it"

    def init(self) -> State:
        """Return None: most transforms have nothing to remember."""
        return None

    def check_state(self, state: State, name: str = "transform_state") -> None:
        """Refuse a state where there is nothing to remember."""
        check_none(name, state)

    def explain(self, state: State, observation: Observation, size: float) -> str:
        """Say what the size becomes; empty if it stays."""
        changed, _ = self.update(state, observation, size)
        return "" if changed == size else f"{self!r} {self.verb} {show(changed)}"


class HoldingTransform(NamedTransform):
    """A transform that keeps a size that was or is in force; abstract."""

    verb: ClassVar[str] = "holds"


@final
@dataclass(frozen=True, repr=False)
class Clamp(NamedTransform):
    """At least one size, at most another."""

    min_size: int
    max_size: int

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the nearest size between the bounds."""
        return float(min(max(size, self.min_size), self.max_size)), state


def clamp(min_size: SupportsIndex, max_size: SupportsIndex) -> Transform:
    """Return a transform that keeps the size between bounds; put it last, as a later transform may leave them again.

    >>> clamp(32, 4096).update(None, Observation(), 9000.0)
    (4096.0, None)
    """
    low, high = as_whole("min_size", min_size, least=1), as_whole("max_size", max_size, least=1)
    if low > high:
        raise ArgumentError(f"clamp needs min_size <= max_size, got {low} and {high}")
    return Clamp(low, high)


@final
@dataclass(frozen=True, repr=False)
class MultipleOf(NamedTransform):
    """The nearest multiple of a number, at least the number itself."""

    number: int

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return ``number × max(1, round(size / number))``."""
        return nearest_multiple(size, self.number), state


def multiple_of(number: SupportsIndex) -> Transform:
    """Return a transform that rounds to the nearest multiple, at least to ``number`` itself.

    Bounds win over multiples: a later ``clamp`` and the controller's bounds may cut to a size that is not a multiple.
    Choose bounds that are multiples.

    Args:
        number: e.g. 8 for tensor cores, or the number of ranks times the micro-batch.

    >>> multiple_of(8).update(None, Observation(), 45.0)
    (48.0, None)
    """
    return MultipleOf(as_whole("number", number, least=1))


@final
@dataclass(frozen=True, repr=False)
class Smooth(NamedTransform):
    """A moving average of the logarithm of the size; the state is that average."""

    keep: float

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the average with one more size; the first size is taken as it is."""
        wanted = math.log(max(size, 1.0))
        if state is None or state == wanted:
            return max(size, 1.0), wanted
        average = self.keep * state + (1 - self.keep) * wanted
        return math.exp(average), average

    def check_state(self, state: State, name: str = "transform_state") -> None:
        """Refuse what is not the logarithm of a size."""
        optional(lambda at, saved: check_number(at, saved, least=0, most=700))(name, state)


def smooth(keep: float) -> Transform:
    """Return a transform that averages the size in time, in logarithms: ``log B ← keep × log B + (1 − keep) × log b``.

    So ×2 and ÷2 weigh the same. A size below 1 counts as 1.

    Args:
        keep: share of the past in each new value, from 0 (no average) to below 1.

    >>> step = smooth(0.5)
    >>> size, state = step.update(step.init(), Observation(), 64.0)
    >>> round(step.update(state, Observation(), 256.0)[0], 6)
    128.0
    """
    return Smooth(as_number("keep", keep, least=0, below=1))


@final
@dataclass(frozen=True, repr=False)
class RateLimit(NamedTransform):
    """At most a factor away from the size in force."""

    verb: ClassVar[str] = "allows"
    factor: float

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the nearest size within the factor."""
        now = _in_force(observation) or size
        # One example is always allowed: a small factor at a small size would be rounded back for ever.
        low, high = min(now / self.factor, now - 1), max(now * self.factor, now + 1)
        return float(min(max(size, low), high)), state


def rate_limit(factor: float) -> Transform:
    """Return a transform that lets the size grow or shrink by at most a factor per decision, or by one example.

    >>> rate_limit(2).update(None, Observation(size=64), 1000.0)
    (128.0, None)
    """
    return RateLimit(as_number("factor", factor, above=1))


@final
@dataclass(frozen=True, repr=False)
class Cooldown(HoldingTransform):
    """No change for a while after a change.

    The state remembers the size in force and the count at the last observation, and the count at the last change.
    A change is read from the size in force, so that it counts as bounds and rounding left it.
    """

    per: Unit
    pause: int

    def init(self) -> State:
        """Return a state that has seen nothing."""
        return {"size": None, "count": None, "changed": None}

    def check_state(self, state: State, name: str = "transform_state") -> None:
        """Check the size and the counts."""
        counts = dict.fromkeys(("count", "changed"), optional(check_whole))
        check_record(name, state, {"size": optional(check_size), **counts})

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the size in force during the pause, else the size."""
        now = _in_force(observation)
        if now is None:
            return size, state
        count = observation.need(self.per, by=self.name)
        changed: int | None = state["changed"] if state["size"] in (None, now) else state["count"]
        changed = changed if count >= (changed or 0) else None  # a count that falls belongs to a new run or cycle
        after: dict[str, Any] = {"size": now, "count": count, "changed": changed}
        pausing = changed is not None and count - changed < self.pause
        return (float(now) if pausing else size), after

    def arguments(self) -> list[str]:
        """Return the pause in its unit."""
        return [f"{_PLURALS[self.per]}={self.pause}"]


_PLURALS: dict[Unit, str] = {"examples": "examples", "step": "steps", "epoch": "epochs", "tokens": "tokens"}


def cooldown(
    *,
    examples: SupportsIndex | None = None,
    steps: SupportsIndex | None = None,
    epochs: SupportsIndex | None = None,
    tokens: SupportsIndex | None = None,
) -> Transform:
    """Return a transform that holds the size for a while after each change; give one of the four.

    Args:
        examples: examples to hold for.
        steps: updates to hold for.
        epochs: epochs to hold for.
        tokens: tokens to hold for.

    >>> cooldown(steps=100)
    cooldown(steps=100)
    """
    pauses: dict[Unit, SupportsIndex | None] = {"examples": examples, "step": steps, "epoch": epochs, "tokens": tokens}
    given = [(per, pause) for per, pause in pauses.items() if pause is not None]
    if len(given) != 1:
        named = ", ".join(f"{_PLURALS[per]}={pause!r}" for per, pause in given) or "none"
        raise ArgumentError(f"cooldown needs one of examples, steps, epochs and tokens, got {named}")
    [(per, pause)] = given
    return Cooldown(per, as_whole(_PLURALS[per], pause, least=1))


@final
@dataclass(frozen=True, repr=False)
class Hysteresis(HoldingTransform):
    """No change while the wanted size is near the size in force."""

    fraction: float

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the size in force inside the dead band, else the size."""
        now = _in_force(observation) or size
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
class Monotone(HoldingTransform):
    """Never below the largest size that was in force; the state is that size."""

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the size, or the largest so far."""
        # Where no size is in force, the answers themselves are remembered.
        floor = max(state or 0.0, float(_in_force(observation) or size))
        return max(size, floor), floor

    def check_state(self, state: State, name: str = "transform_state") -> None:
        """Refuse what is not a size."""
        optional(lambda at, saved: check_number(at, saved, least=0))(name, state)


def monotone() -> Transform:
    """Return a transform that never asks for less than the largest size that was in force.

    A wish that bounds or a rate limit cut down is not remembered.

    >>> step = monotone()
    >>> step.update(step.init(), Observation(size=64), 32.0)
    (64.0, 64.0)
    """
    return Monotone()


def _in_force(observation: Observation) -> int | None:
    """Return the size in force, None before training."""
    return observation.batch_size if observation.size is None else observation.size
