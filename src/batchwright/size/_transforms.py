"""What may be put behind a policy to shape its answer: bounds, multiples, an average, a limit on each change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, SupportsIndex, final

from ..errors import ArgumentError
from ._counting import in_force
from ._named import Named
from ._numbers import as_number, as_whole, show
from .observation import Observation
from .policy import State, Transform


class NamedTransform(Named, Transform):
    """A transform that is written as its call and explains itself in one verb; abstract.

    Attributes:
        verb: what it does to a size that it changes.
    """

    verb: ClassVar[str] = "makes it"

    def init(self) -> State:
        """Return None: most have nothing to remember."""
        return None

    def explain(self, state: State, observation: Observation, size: float) -> str:
        """Say what becomes of the size; empty where it stays."""
        changed, _ = self.update(state, observation, size)
        return "" if changed == size else f"{self!r} {self.verb} {show(changed)}"


@final
@dataclass(frozen=True, repr=False)
class Clamp(NamedTransform):
    """At least one size, at most another."""

    name: ClassVar[str] = "clamp"
    min_size: int
    max_size: int

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the nearest size between the bounds."""
        return float(min(max(size, self.min_size), self.max_size)), state


def clamp(min_size: SupportsIndex, max_size: SupportsIndex) -> Transform:
    """Return a transform that keeps the size between bounds; put it last, what follows may leave them again.

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

    name: ClassVar[str] = "multiple_of"
    number: int

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return ``number × max(1, round(size / number))``."""
        return float(self.number * max(1, round(size / self.number))), state


def multiple_of(number: SupportsIndex) -> Transform:
    """Return a transform that rounds to the nearest multiple, at least to ``number`` itself.

    Bounds win over multiples: ``clamp`` behind it, and the controller's, may cut to a size that is none. Choose bounds
    that are multiples.

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

    name: ClassVar[str] = "smooth"
    keep: float

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the average with one more size; the first is taken as it is."""
        wanted = math.log(max(size, 1.0))
        if state is None or state == wanted:
            return max(size, 1.0), wanted
        average = self.keep * state + (1 - self.keep) * wanted
        return math.exp(average), average


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
    share = as_number("keep", keep, least=0)
    if share >= 1:
        raise ArgumentError(f"keep must be below 1, got {keep!r}; at 1 the size would never move")
    return Smooth(share)


@final
@dataclass(frozen=True, repr=False)
class RateLimit(NamedTransform):
    """At most a factor away from the size in force."""

    name: ClassVar[str] = "rate_limit"
    verb: ClassVar[str] = "allows"
    factor: float

    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the nearest size within the factor."""
        now = in_force(observation)
        if now is None:
            return size, state
        # One example is always allowed: a small factor at a small size would be rounded back for ever.
        low, high = min(now / self.factor, now - 1), max(now * self.factor, now + 1)
        return float(min(max(size, low), high)), state


def rate_limit(factor: float) -> Transform:
    """Return a transform that lets the size grow or shrink by at most a factor per decision, or by one example.

    >>> rate_limit(2).update(None, Observation(size=64), 1000.0)
    (128.0, None)
    """
    return RateLimit(as_number("factor", factor, above=1))
