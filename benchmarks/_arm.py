"""An arm: one way of planning, and how the benchmark talks to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from _metrics import Batches, IntArray

# Not the seed of the lengths: a planner that draws the bits the lengths were drawn from sees sorted data.
PLAN_SEED = 1


class Planner(ABC):
    """Holds lengths and a budget in the form the arm likes best; building it is not timed."""

    def __init__(self, lengths: IntArray, budget: int) -> None:
        self.lengths = lengths
        self.budget = budget

    @property
    def safe_size(self) -> int:
        """The largest number of examples that can never exceed the budget, whatever they are."""
        return max(1, self.budget // int(self.lengths.max()))

    @abstractmethod
    def plan(self, epoch: int) -> Any:
        """Plan one epoch from the start. This is timed."""

    @abstractmethod
    def batches(self, plan: Any) -> Batches:
        """Turn the arm's own result into arrays. This is not timed."""

    def next_epoch(self, first: Any, replanned: Any) -> Batches:
        """The epoch after ``first`` as the arm itself gives it; ``replanned`` is its plan of epoch 1."""
        return self.batches(replanned)


@final
@dataclass(frozen=True)
class Arm:
    """One row of the table.

    Args:
        name: what the command line calls it.
        title: what the table calls it.
        make: builds the planner from lengths and a budget.
        is_ours: whether it is batchwright; a failure of ours fails the run.
        max_examples: the most examples it is given, by distribution or under ``"*"``, where more would take
            minutes or gigabytes.
        warm_up_examples: how many examples are planned first, to load and compile what the arm needs.
        note: what a reader must know to judge the row.
    """

    name: str
    title: str
    make: Callable[[IntArray, int], Planner]
    is_ours: bool = False
    max_examples: Mapping[str, int] = field(default_factory=dict)
    warm_up_examples: int = 2_000
    note: str = ""

    def num_examples(self, distribution: str, wanted: int) -> int:
        """How many of the wanted examples the arm is given."""
        return min(wanted, self.max_examples.get(distribution, self.max_examples.get("*", wanted)))
