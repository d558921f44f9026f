"""Which runs are made: a sweep of constant sizes and rates, the best of it again, and strategies at longer horizons.

1. Every size and rate of the sweep runs with the seeds of the sweep, for the task's seconds T.
2. The best cells by their mean loss run with other seeds. The lower mean is the loss to reach, L*. The best size at
   the task's own rate runs with them too, for comparison.
3. A strategy runs for T with the seeds of step 2. If it reaches L*, shorter horizons are tried, else longer ones, until
   one horizon of the ladder reaches L* and the one below does not. The same is done for the loss of the best size at
   the task's own rate: the first ratio has the size and the rate in it, the second the size alone.

Each rate of the sweep is a factor of the task's rate as its rule scales it to the size, so that the sweep is centred on
rates that suit the size, and not on rates that suit only one size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import NamedTuple, final

from .strategies import STRATEGIES
from .tasks import TASKS
from .training import Row, Unit

SIZES = (8, 16, 32, 64, 128, 256)
FACTORS = (1 / 3, 1.0, 3.0)
SWEEP_SEEDS = (1000, 1001)
NUM_BEST = 2  # cells of the sweep that run again
LADDER = (0.6, 0.8, 1.0, 1.1, 1.25, 1.5, 2.0)


@final
class Plan(NamedTuple):
    """What is compared: the names may be fewer, and the seeds other ones, than the usual."""

    clock: str
    task: str
    strategies: tuple[str, ...] = STRATEGIES
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    sizes: tuple[int, ...] = SIZES
    ladder: tuple[float, ...] = LADDER

    def unit(self, strategy: str, horizon: float, seed: int) -> Unit:
        """Return a run."""
        return Unit(self.clock, self.task, strategy, horizon, seed)


def cells(plan: Plan) -> list[str]:
    """Return the constants of the sweep."""
    return [f"constant-{size}x{factor:.3g}" for size in plan.sizes for factor in FACTORS]


def control(plan: Plan) -> str:
    """Return the constant at the base size and the task's rate: what a user has who changes nothing."""
    return f"constant-{TASKS[plan.task].base_size}x1"


def mean_loss(plan: Plan, rows: Sequence[Row], strategy: str, horizon: float, seeds: Sequence[int]) -> float | None:
    """Return the mean final loss over some seeds, None if one is missing; infinite if one diverged."""
    wanted = [plan.unit(strategy, horizon, seed) for seed in seeds]
    found = [next((row["loss"] for row in rows if unit.is_of(row)), None) for unit in wanted]
    if any(loss is None for loss in found):
        return None
    losses = [float(loss) for loss in found if loss is not None]
    return mean(losses) if all(map(math.isfinite, losses)) else math.inf


def best_cells(plan: Plan, rows: Sequence[Row]) -> list[str] | None:
    """Return the best cells of the sweep, None before it has ended."""
    losses = {cell: mean_loss(plan, rows, cell, 1.0, SWEEP_SEEDS) for cell in cells(plan)}
    if any(loss is None for loss in losses.values()):
        return None
    return sorted(losses, key=lambda cell: losses[cell] or math.inf)[:NUM_BEST]


def best_at_rate(plan: Plan, rows: Sequence[Row]) -> str | None:
    """Return the best cell at the task's own rate, None before the sweep has ended."""
    losses = {cell: mean_loss(plan, rows, cell, 1.0, SWEEP_SEEDS) for cell in cells(plan) if cell.endswith("x1")}
    known = {cell: loss for cell, loss in losses.items() if loss is not None}
    return min(known, key=lambda cell: known[cell]) if len(known) == len(losses) else None


def target(plan: Plan, rows: Sequence[Row]) -> tuple[str, float] | None:
    """Return the best constant and its mean loss L* over the seeds that are compared, None before it is known."""
    again = best_cells(plan, rows)
    if again is None:
        return None
    losses = {cell: mean_loss(plan, rows, cell, 1.0, plan.seeds) for cell in again}
    known = {cell: loss for cell, loss in losses.items() if loss is not None}
    return min(known.items(), key=lambda item: item[1]) if len(known) == len(again) else None


def own_target(plan: Plan, rows: Sequence[Row]) -> tuple[str, float] | None:
    """Return the best constant at the task's own rate and its mean loss, None before it is known."""
    own = best_at_rate(plan, rows)
    loss = None if own is None else mean_loss(plan, rows, own, 1.0, plan.seeds)
    return None if own is None or loss is None else (own, loss)


def arms(plan: Plan) -> list[str]:
    """Return what walks the ladder: the strategies, and the control."""
    return [*plan.strategies, control(plan)]


def next_horizon(plan: Plan, rows: Sequence[Row], arm: str, loss: float) -> float | None:
    """Return the horizon at which an arm runs next, None if it is done."""
    place = plan.ladder.index(1.0)
    first = mean_loss(plan, rows, arm, 1.0, plan.seeds)
    if first is None:
        return 1.0
    step = -1 if first <= loss else 1
    for horizon in plan.ladder[place + step :: step] if place + step >= 0 else ():
        found = mean_loss(plan, rows, arm, horizon, plan.seeds)
        if found is None:
            return horizon
        if (found <= loss) != (step < 0):
            return None
    return None


def wanted(plan: Plan, rows: Sequence[Row]) -> Iterator[Unit]:
    """Yield the runs that can be made now, the most important first; those that are done are among them."""
    for seed in SWEEP_SEEDS:
        yield from (plan.unit(cell, 1.0, seed) for cell in cells(plan))
    again = best_cells(plan, rows)
    if again is None:
        return
    # A strategy runs for T in any case, and so does the best size at its rate: it tells the size from the rate.
    own = best_at_rate(plan, rows)
    at_once = dict.fromkeys([*again, *([] if own is None else [own]), *arms(plan)])
    yield from (plan.unit(arm, 1.0, seed) for arm in at_once for seed in plan.seeds)
    for found, walking in ((target(plan, rows), arms(plan)), (own_target(plan, rows), plan.strategies)):
        for arm in () if found is None else walking:
            horizon = next_horizon(plan, rows, arm, found[1])
            if horizon is not None:
                yield from (plan.unit(arm, horizon, seed) for seed in plan.seeds)
