"""What runs say together: after which part of the best constant's time a strategy reaches its loss, and how surely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np
from _gpu import markdown

from .protocol import FACTORS, SWEEP_SEEDS, Plan, arms, mean_loss, own_target, target
from .tasks import TASKS
from .training import Row

NUM_DRAWS = 2000
COLUMNS = (
    ("strategy", "name", ""), ("time ÷ best constant's", "ratio", ""), ("95 % interval", "interval", ""),
    ("÷ best's at the task's rate", "own_ratio", ""), ("its interval", "own_interval", ""),
    ("loss after T", "loss", ".4f"), ("updates", "updates", ",.0f"), ("examples", "examples", ",.0f"),
    ("mean size", "mean_size", ",.0f"), ("last size", "last_size", ",.0f"), ("experiments", "experiments", ".1%"),
)  # fmt: skip


def crossing(points: Sequence[tuple[float, float]], loss: float) -> float:
    """Return the horizon at which a loss is reached, on straight lines over the logarithm of the horizon.

    Where no two neighbours enclose the loss, the nearest two are drawn out; infinite if they do not fall.

    >>> crossing([(1.0, 3.0), (2.0, 1.0)], 2.0)
    1.414...
    >>> crossing([(1.0, 1.0), (2.0, 1.0)], 0.5)
    inf
    """
    points = sorted(points)
    if len(points) == 1:
        return points[0][0] if points[0][1] <= loss else math.inf
    pairs = list(pairwise(points))
    enclosing = [pair for pair in pairs if pair[0][1] > loss >= pair[1][1]]
    (low, before), (high, after) = enclosing[0] if enclosing else pairs[0] if points[0][1] <= loss else pairs[-1]
    if not before > after:
        return math.inf if points[-1][1] > loss else low
    share = (before - loss) / (before - after)
    return float(low * (high / low) ** share)


def ratio_of(plan: Plan, rows: Sequence[Row], arm: str, found: tuple[str, float] | None) -> dict[str, Any] | None:
    """Return the time of an arm to the loss of a constant in parts of T, and its interval; None while a run is missing.

    The interval draws the seeds again, those of the arm and of the best constant together, as both saw the same data.
    """
    if found is None:
        return None
    best, loss = found
    horizons = [h for h in plan.ladder if mean_loss(plan, rows, arm, h, plan.seeds) is not None]
    if not horizons:
        return None
    of_best = _losses(plan, rows, best, 1.0)
    table = np.array([_losses(plan, rows, arm, horizon) for horizon in horizons])
    value = crossing(list(zip(horizons, table.mean(axis=1).tolist(), strict=True)), loss)
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(NUM_DRAWS):
        chosen = rng.integers(0, len(plan.seeds), len(plan.seeds))
        points = list(zip(horizons, table[:, chosen].mean(axis=1).tolist(), strict=True))
        draws.append(crossing(points, float(of_best[chosen].mean())))
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    is_beyond = float(table.mean(axis=1).min()) > loss
    return {"ratio": value, "low": float(low), "high": float(high), "is_beyond": is_beyond, "horizons": horizons}


def _losses(plan: Plan, rows: Sequence[Row], arm: str, horizon: float) -> np.ndarray:
    units = [plan.unit(arm, horizon, seed) for seed in plan.seeds]
    return np.array([next(float(row["loss"]) for row in rows if unit.is_of(row)) for unit in units])


def summarize(plan: Plan, rows: Sequence[Row]) -> list[Row]:
    """Return one row per arm, the best constant first."""
    found = target(plan, rows)
    if found is None:
        return []
    table = [_describe(plan, rows, found[0]) | {"ratio": "1", "name": f"best constant, {found[0]}"}]
    own = own_target(plan, rows)
    if own is not None:
        # What the size alone is worth; the rest of the way to the best constant is the learning rate.
        table.append(_describe(plan, rows, own[0]) | {"name": f"best constant at the task's rate, {own[0]}"})
    for arm in arms(plan):
        ratio, of_own = ratio_of(plan, rows, arm, found), ratio_of(plan, rows, arm, own)
        if ratio is None:
            continue
        words, interval = _words(ratio)
        row = {"name": arm, "ratio": words, "interval": interval, "figures": ratio}
        if of_own is not None and arm in plan.strategies:
            row["own_ratio"], row["own_interval"] = _words(of_own)
        table.append(_describe(plan, rows, arm) | row)
    return table


def _words(ratio: dict[str, Any]) -> tuple[str, str]:
    words = f"> {ratio['horizons'][-1]:g}" if ratio["is_beyond"] else f"{ratio['ratio']:.2f}"
    return words, f"{ratio['low']:.2f} to {ratio['high']:.2f}"


def _describe(plan: Plan, rows: Sequence[Row], arm: str) -> Row:
    of_arm = [row for seed in plan.seeds for row in rows if plan.unit(arm, 1.0, seed).is_of(row)]
    keys = ("loss", "updates", "examples", "mean_size")
    return {
        **{key: mean(row[key] for row in of_arm) for key in keys},
        "last_size": mean(row["sizes"][-1][1] for row in of_arm),
        "experiments": mean(row["experiment_seconds"] / row["seconds"] for row in of_arm) or None,
    }


def render(plan: Plan, rows: Sequence[Row]) -> str:
    """Return the tables of a task: the sweep, then the strategies."""
    task = TASKS[plan.task]
    head = f"## {plan.task}, clock {plan.clock}: {task.title}; base {task.base_size}, rate {task.lr:g}"
    found = summarize(plan, rows)
    tables = [markdown(found, [c for c in COLUMNS if any(row.get(c[1]) is not None for row in found)])] if found else []
    failed = [f"failed: {row['strategy']} seed {row['seed']}: {row['error']}" for row in rows if _is_failed(plan, row)]
    return "\n\n".join([head, sweep_table(plan, rows), *tables, *failed])


def _is_failed(plan: Plan, row: Row) -> bool:
    return "error" in row and (row["clock"], row["task"]) == (plan.clock, plan.task)


def sweep_table(plan: Plan, rows: Sequence[Row]) -> str:
    """Return the mean losses of the sweep by size and rate."""
    names = [f"{factor:.3g}" for factor in FACTORS]
    columns = [("size", "size", ""), *((f"rate times {name}", name, ".4f") for name in names)]
    table = [
        {"size": size, **{name: mean_loss(plan, rows, f"constant-{size}x{name}", 1.0, SWEEP_SEEDS) for name in names}}
        for size in plan.sizes
    ]
    return markdown(table, columns)
