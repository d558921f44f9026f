"""Evaluation in planned batches: less padding, results in the order of the data, an exact mean loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .._types import IntArray
from ..errors import ArgumentError
from ..plan.budget import Budget, MaxCost
from ..plan.grouping.sorting import Sorted
from ..plan.plan import plan_batches
from ._huggingface_loader import options_of


@final
@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """Which examples each rank evaluates in each step; all ranks have equally many, as their results are gathered.

    Attributes:
        steps: ``(ranks, examples)`` of each step.
        is_own: ``(steps, ranks)``, False where a rank without an example of its own repeats that of another.
    """

    steps: list[IntArray]
    is_own: npt.NDArray[np.bool_]

    @property
    def num_rows(self) -> int:
        """Return how many rows are gathered, repeated ones too."""
        return sum(step.size for step in self.steps)

    @cached_property
    def places(self) -> IntArray:
        """Return where among the gathered rows each example stands."""
        gathered = np.concatenate([step.reshape(-1) for step in self.steps])
        return np.unique(gathered, return_index=True)[1]

    def of_rank(self, rank: int) -> list[list[int]]:
        """Return the batches of a rank."""
        return [step[rank].tolist() for step in self.steps]


def plan_evaluation(
    lengths: npt.ArrayLike, budget: Budget, *, world_size: int = 1, pad_multiple_of: int = 1
) -> EvaluationPlan:
    """Plan an evaluation: examples of similar lengths together, as many on every rank.

    Args:
        lengths: of the examples.
        budget: what a batch of one rank may cost; an example over it runs alone.
        world_size: ranks.
        pad_multiple_of: of the collator.

    >>> from batchwright import MaxTokens
    >>> plan = plan_evaluation([5, 1, 4, 2, 3], MaxTokens(5), world_size=2)
    >>> [step.tolist() for step in plan.steps], plan.is_own.tolist()
    ([[[0], [2]], [[4], [3]], [[1], [1]]], [[True, True], [True, True], [True, False]])
    """

    def cost(num_items: IntArray, padded: IntArray) -> npt.NDArray[Any]:
        return budget.fraction(-(-num_items // world_size), padded)

    plan = plan_batches(
        lengths,
        budget if world_size == 1 else MaxCost(cost, 1.0),
        grouping=Sorted(),
        shuffle=False,
        size_multiple_of=world_size,
        pad_multiple_of=pad_multiple_of,
        oversize="alone",
    )
    steps, is_own = [], []
    for batch in plan:
        rows = np.array(batch)
        even = len(rows) - len(rows) % world_size
        for part in (rows[:even], rows[even:]):
            if len(part):
                steps.append(np.resize(part, (max(1, len(part) // world_size), world_size)).T)
                is_own.append(np.arange(world_size) < len(part))
    return EvaluationPlan(steps, np.array(is_own))


@final
class EvaluationLoader(DataLoader[Any]):
    """A trainer's loader with the batches of a plan.

    Args:
        base: the trainer's own loader.
        plan: which examples each rank evaluates.
        rank: this process.
    """

    def __init__(self, base: Any, plan: EvaluationPlan, *, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        super().__init__(base.dataset, batch_sampler=plan.of_rank(rank), collate_fn=base.collate_fn, **options_of(base))


@final
class EvaluationRun:
    """One evaluation: sums up its loss, and puts what was gathered in the order of the data.

    Args:
        loader: what is evaluated.
    """

    def __init__(self, loader: EvaluationLoader) -> None:
        self._plan = loader.plan
        self._rank = loader.rank
        self._num_done = 0
        self._sums: Tensor | None = None

    def add(self, loss: Tensor, weight: Tensor) -> None:
        """Add the mean loss of a batch and what it is a mean over."""
        is_own = bool(self._plan.is_own[self._num_done, self._rank])
        self._num_done += 1
        wide = torch.float32 if loss.device.type == "mps" else torch.float64
        count = weight.to(loss.device, wide) * is_own
        # The mean over no label is NaN.
        part = torch.stack([torch.where(count > 0, loss.detach().to(wide) * count, 0), count])
        self._sums = part if self._sums is None else self._sums + part

    @property
    def sums(self) -> Tensor | None:
        """Return the summed loss and what it sums over, on this rank; None where there was no loss."""
        return self._sums

    def in_order(self, values: Any) -> Any:
        """Return gathered rows in the order of the data; nested tuples, lists and mappings of arrays."""
        if values is None:
            return None
        if isinstance(values, Mapping):
            return {name: self.in_order(value) for name, value in values.items()}
        if isinstance(values, tuple | list):
            return tuple(self.in_order(value) for value in values)
        if len(values) != self._plan.num_rows:
            raise ArgumentError(
                f"an output of the model has {len(values)} rows for {self._plan.num_rows} examples, so its order "
                "cannot be restored; leave it out with ignore_keys, or pass eval_budget=None"
            )
        return values[self._plan.places]

    def prediction_in_order(self, prediction: Any) -> Any:
        """Return what ``compute_metrics`` receives, in the order of the data; a loss is that of an example's batch."""
        losses = prediction.losses
        if losses is not None:
            # The trainer repeats the loss of a batch, step by step and rank by rank, equally often each.
            sizes = [len(rows) for step in self._plan.steps for rows in step]
            losses = np.repeat(np.reshape(losses, (len(sizes), -1))[:, 0], sizes)
        return type(prediction)(
            predictions=self.in_order(prediction.predictions),
            label_ids=self.in_order(prediction.label_ids),
            inputs=self.in_order(prediction.inputs),
            losses=self.in_order(losses),
        )
