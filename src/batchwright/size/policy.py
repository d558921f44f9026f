"""Policy and Transform: a rule for the batch size, and what may be put behind one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

from .observation import Observation

State: TypeAlias = Any  # a plain JSON value: None, a number, a list or a dict of them


class Policy(ABC):
    """Decides how many examples the next update uses.

    Settings are frozen, state is a JSON value that goes in and comes out. The answer is a real number: the controller
    rounds it once and keeps it between its bounds.

    >>> class Doubling(Policy):
    ...     def init(self):
    ...         return None
    ...
    ...     def update(self, state, observation):
    ...         return 2.0 * observation.current, state
    >>> Doubling().update(None, Observation(batch_size=8))
    (16.0, None)
    """

    @abstractmethod
    def init(self) -> State:
        """Return the state before training."""

    @abstractmethod
    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the wanted size and the next state."""

    def start(self) -> float | None:
        """Return the size before anything was observed, None where the policy has no opinion."""
        return None

    def explain(self, state: State, observation: Observation) -> str:
        """Say in words why ``update`` answers what it does, from the same arguments."""
        size, _ = self.update(state, observation)
        return f"{type(self).__name__} asks for {size:g}"


class Transform(ABC):
    """Changes the size that a policy asks for; ``chain`` puts it behind one.

    >>> class AtLeastTwo(Transform):
    ...     def init(self):
    ...         return None
    ...
    ...     def update(self, state, observation, size):
    ...         return max(2.0, size), state
    >>> AtLeastTwo().update(None, Observation(), 1.0)
    (2.0, None)
    """

    @abstractmethod
    def init(self) -> State:
        """Return the state before training."""

    @abstractmethod
    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the changed size and the next state."""

    def explain(self, state: State, observation: Observation, size: float) -> str:
        """Say in words why ``update`` changes the size; empty where it does not."""
        changed, _ = self.update(state, observation, size)
        return "" if changed == size else f"{type(self).__name__} makes it {changed:g}"
