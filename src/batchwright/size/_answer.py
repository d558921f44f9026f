"""An answer: the size, the next state and the reason, made in one place so that they cannot disagree."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple

from ._numbers import as_size, show
from .observation import Observation
from .policy import Policy, State


class Answer(NamedTuple):
    """What a policy answers, and why."""

    size: float
    state: State
    reason: str


class ReasoningPolicy(Policy):
    """A policy that makes its reason along with its answer."""

    @abstractmethod
    def decide(self, state: State, observation: Observation) -> Answer:
        """Return the wanted size, the next state and the reason."""

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the wanted size and the next state."""
        size, state, _ = self.decide(state, observation)
        return size, state

    def explain(self, state: State, observation: Observation) -> str:
        """Say in words why ``update`` answers what it does."""
        return self.decide(state, observation).reason


def hold(observation: Observation, state: State, reason: str) -> Answer:
    """Return the answer to keep the size in force."""
    return Answer(float(observation.current), state, f"{reason}: holds {observation.current}")


def ask(observation: Observation, state: State, size: float, reason: str) -> Answer:
    """Return the answer for a size, or to hold where it is no finite number above 0."""
    if not (math.isfinite(size) and size > 0):
        return hold(observation, state, f"{reason} = {size}")
    return Answer(as_size(size), state, f"{reason}: {show(size)}")
