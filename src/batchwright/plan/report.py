"""What a plan is worth, in numbers a user can act on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import final

import numpy as np

from .._checks import as_world_size
from .._types import FloatArray, IntArray
from ._batches import PlanArrays, run_length
from ._cost import evaluate
from ._order import step_cost


@final
@dataclass(frozen=True)
class PlanReport:
    """The figures of a plan; ``str()`` is a table, ``to_dict()`` plain values.

    Attributes:
        num_batches: batches, over all ranks.
        padding: share of padded tokens that are padding.
        budget_used: mean share of the budget that a batch uses, padding included.
        largest: the largest share; above 1 only for oversize examples that run alone.
        num_shapes: distinct shapes ``(num_items, padded lengths)``.
        straggler_waste: share of time that ranks wait for the slowest of a step, by the cost of the plan.
        recurrence: probability that two examples sharing a batch share one again in the next epoch.
        order_correlation: correlation of the mean lengths of consecutive steps; near 0 is a random order.
        repeated: examples given out twice because fewer than ``world_size`` were left, or fewer groups.
        dropped: examples left out.
        truncated: examples planned shorter than they are.
        world_size: ranks the straggler waste is for.
        balance_over: how many batches of near-equal cost stand together.
        num_groups: groups whose examples stay together, 0 where none are given.
        largest_group: examples of the largest of them.
    """

    num_batches: int
    padding: float
    budget_used: float
    largest: float
    num_shapes: int
    straggler_waste: float
    recurrence: float
    order_correlation: float
    repeated: int
    dropped: int
    truncated: int
    world_size: int
    balance_over: int
    num_groups: int = 0
    largest_group: int = 0

    def to_dict(self) -> dict[str, float | int]:
        """Return the figures as plain numbers."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("batches", f"{self.num_batches:,}"),
            ("padding", f"{self.padding:.2%}"),
            ("budget used", f"{self.budget_used:.1%}"),
            ("largest batch / budget", f"{self.largest:.3f}"),
            ("shapes", f"{self.num_shapes:,}"),
            (f"straggler waste, {self.world_size} ranks", f"{self.straggler_waste:.2%}"),
            ("recurrence", f"{self.recurrence:.4f}"),
            ("balanced in runs of", f"{self.balance_over:,}"),
            ("order correlation", f"{self.order_correlation:+.2f}"),
            ("repeated / dropped / truncated", f"{self.repeated:,} / {self.dropped:,} / {self.truncated:,}"),
        ]
        if self.num_groups:
            rows.append(("groups / examples of the largest", f"{self.num_groups:,} / {self.largest_group:,}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def make_report(plan: PlanArrays, following: PlanArrays, *, world_size: int | None) -> PlanReport:
    """Measure a plan; ``following`` is the plan of the next epoch, for the recurrence."""
    world_size = as_world_size(plan.world_size if world_size is None else world_size)
    num_items, padded = plan.shapes[:, 0].astype(np.int64), plan.shapes[:, 1:].astype(np.int64)
    share = plan.budget.fraction(num_items, padded)
    total = float((num_items * padded.sum(axis=1)).sum())
    real = _batch_sums(plan, plan.lengths.sum(axis=1, dtype=np.float64))
    groups = plan.settings.groups
    means = real / np.diff(plan.offsets)
    return PlanReport(
        num_batches=len(plan),
        padding=1 - float(real.sum()) / total if total else 0.0,
        budget_used=float(share.mean()) if len(plan) else 0.0,
        largest=float(share.max()) if len(plan) else 0.0,
        num_shapes=len(np.unique(plan.shapes, axis=0)),
        straggler_waste=_straggler_waste(_work(plan), world_size),
        recurrence=_recurrence(plan, following),
        order_correlation=_lag_correlation(_steps(means, world_size).mean(axis=1)),
        repeated=plan.num_repeated,
        dropped=plan.num_dropped,
        truncated=plan.num_truncated,
        world_size=world_size,
        balance_over=run_length(plan.settings, len(plan)),
        num_groups=0 if groups is None else len(groups.sizes),
        largest_group=0 if groups is None else groups.largest,
    )


def _batch_sums(plan: PlanArrays, values: FloatArray) -> FloatArray:
    if len(plan) == 0:
        return np.empty(0)
    return np.add.reduceat(values[plan.indices], plan.offsets[:-1])


def _work(plan: PlanArrays) -> FloatArray:
    """Return the cost of each batch; in packed rows that of the examples inside."""
    if plan.settings.cost is not None:
        return evaluate(plan.settings.cost, plan.shapes[:, 0], plan.shapes[:, 1:])
    if plan.row_offsets is not None:
        return _batch_sums(plan, step_cost(np.array(1), plan.lengths))
    return step_cost(plan.shapes[:, 0], plan.shapes[:, 1:])


def _steps(values: FloatArray, world_size: int) -> FloatArray:
    """Return the values of whole steps, ``(steps, world_size)``."""
    return values[: len(values) // world_size * world_size].reshape(-1, world_size)


def _straggler_waste(work: FloatArray, world_size: int) -> float:
    """Return ``1 − sum of mean work / sum of largest work`` over the steps."""
    steps = _steps(work, world_size)
    slowest = steps.max(axis=1).sum() if len(steps) else 0.0
    return float(1 - steps.mean(axis=1).sum() / slowest) if slowest else 0.0


def _lag_correlation(values: FloatArray) -> float:
    """Return the correlation of each value with the one before; 0 where it is not defined."""
    if len(values) < 3 or values[1:].std() < 1e-12 or values[:-1].std() < 1e-12:
        return 0.0
    return float(np.corrcoef(values[:-1], values[1:])[0, 1])


def _recurrence(plan: PlanArrays, following: PlanArrays) -> float:
    """Return the share of pairs in a batch of this epoch that are in one batch of the next, counted exactly."""
    next_batch = np.full(len(plan.lengths), -1, dtype=np.int64)
    next_batch[following.indices] = _batch_ids(following)
    here, there = _batch_ids(plan), next_batch[plan.indices]
    joint = np.sort((here << 32 | there)[there >= 0])
    _, together = np.unique(joint, return_counts=True)
    pairs = _num_pairs(np.diff(plan.offsets))
    return _num_pairs(together) / pairs if pairs else 0.0


def _batch_ids(plan: PlanArrays) -> IntArray:
    return np.repeat(np.arange(len(plan), dtype=np.int64), np.diff(plan.offsets))


def _num_pairs(sizes: IntArray) -> float:
    return float((sizes.astype(np.float64) * (sizes - 1)).sum() / 2)
