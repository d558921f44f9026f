"""Schedule: a size that is a closed form of one count."""

from __future__ import annotations

from abc import abstractmethod

from ._counting import Unit, index_of, when
from ._named import Named
from .observation import Observation
from .policy import Policy, State


class Schedule(Named, Policy):
    """A size that depends on nothing but the number of completed epochs, updates or examples.

    It is computed from the index and never from the size before it, so that rounding does not add up.

    Attributes:
        per: what is counted.
        every: how many make one index.
    """

    per: Unit
    every: int

    @abstractmethod
    def size_at(self, index: int) -> float:
        """Return the size at an index."""

    @abstractmethod
    def words_at(self, index: int) -> str:
        """Say how the size at an index comes about."""

    def init(self) -> State:
        """Return None: there is nothing to remember."""
        return None

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the size at the index that comes next."""
        return self.size_at(self._index(observation)), state

    def start(self) -> float:
        """Return the size at index 0."""
        return self.size_at(0)

    def explain(self, state: State, observation: Observation) -> str:
        """Say how the size comes about."""
        return f"{self.name}: {self.words_at(self._index(observation))} {when(observation, self.per)}"

    def _index(self, observation: Observation) -> int:
        return index_of(observation, self.per, self.every, by=self.name)
