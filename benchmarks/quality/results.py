"""What runs say together: the best learning rate of an arm, its mean curve, and when it passes a loss."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TypeAlias, final

from _gpu import Row, markdown

from .arms import Arm

Curve: TypeAlias = "list[tuple[float, float]]"

COLUMNS = (
    ("arm", "arm", ""), ("real tokens/s", "tokens_per_second", ",.0f"), ("updates", "updates", ",.0f"),
    ("padding", "padding", ".1%"), ("shapes", "shapes", ",.0f"), ("capture s", "capture_seconds", ".1f"),
    ("compile s", "compile_seconds", ".0f"), ("pool GiB", "pool_gib", ".2f"), ("peak GiB", "peak_gib", ".1f"),
    ("loss by lr", "by_lr", ""), ("loss", "loss", ".3f"), ("seeds", "seeds", "d"), ("min to max", "spread", ""),
    ("s to best peer's loss", "to_peer", ".1f"), ("best peer's s ÷ it", "times_peer", ".1f"),
    ("s to best eager plan's loss", "to_eager", ".1f"), ("best eager plan's s ÷ it", "times_eager", ".1f"),
)  # fmt: skip


@final
class Unit(NamedTuple):
    """One run to make."""

    task: str
    arm: str
    lr: float
    seed: int

    def is_of(self, row: Row) -> bool:
        """Return whether a row is a finished run of it."""
        return "error" not in row and self == (row["task"], row["arm"], row["lr"], row["seed"])


def read_rows(paths: Iterable[Path]) -> tuple[list[Row], list[Row]]:
    """Return the commands and runs of result files; a row that stands in several counts once."""
    commands: dict[str, Row] = {}
    rows: dict[str, Row] = {}
    for path in paths:
        report = json.loads(path.read_text())
        commands |= {command["id"]: command for command in report["commands"]}
        rows |= {
            json.dumps([row["command"], row["task"], row["arm"], row["lr"], row["seed"]]): row for row in report["rows"]
        }
    return list(commands.values()), list(rows.values())


def best_rate(rows: Sequence[Row], task: str, arm: str) -> float | None:
    """Return the learning rate with the least loss of an arm, by the first seed."""
    found = [row for row in _done(rows, task) if row["arm"] == arm]
    if not found:
        return None
    first = min(row["seed"] for row in found)
    return min((row for row in found if row["seed"] == first), key=lambda row: row["loss"])["lr"]


def summarize(rows: Sequence[Row], task: str) -> list[Row]:
    """Return one row per arm, the best first; an arm counts at its best learning rate, averaged over seeds."""
    names = dict.fromkeys(row["arm"] for row in _done(rows, task))
    table = [_summary([row for row in _done(rows, task) if row["arm"] == name], name) for name in names]
    for kind, key in (("peer", _is_peer), ("eager", _is_planned_eager)):
        of_kind = [row for row in table if key(row["arm"])]
        if of_kind:
            target = min(of_kind, key=lambda row: row["loss"])
            for row in table:
                row[f"to_{kind}"] = seconds_to(row["curve"], target["loss"])
                row[f"times_{kind}"] = None if row[f"to_{kind}"] is None else target["curve"][-1][0] / row[f"to_{kind}"]
    return sorted(table, key=lambda row: row["loss"])


def _done(rows: Sequence[Row], task: str) -> list[Row]:
    return [row for row in rows if row["task"] == task and "error" not in row]


def _is_peer(name: str) -> bool:
    return not Arm.parse(name).is_ours


def _is_planned_eager(name: str) -> bool:
    return Arm.parse(name).is_planned_eager


def _summary(rows: Sequence[Row], name: str) -> Row:
    rate = best_rate(rows, rows[0]["task"], name)
    best = [row for row in rows if row["lr"] == rate]
    losses = [row["loss"] for row in best]
    by_rate = {row["lr"]: min(other["loss"] for other in rows if other["lr"] == row["lr"]) for row in rows}
    keys = (
        "tokens_per_second",
        "updates",
        "padding",
        "shapes",
        "capture_seconds",
        "compile_seconds",
        "pool_bytes",
        "peak_gib",
    )
    means = {key: mean(values) for key in keys if (values := [row[key] for row in best if row.get(key) is not None])}
    if "pool_bytes" in means:
        means["pool_gib"] = means.pop("pool_bytes") / 2**30
    return {
        "arm": name,
        **means,
        "lr": rate,
        "by_lr": ", ".join(f"{lr:g}: {loss:.2f}" for lr, loss in sorted(by_rate.items())),
        "loss": mean(losses),
        "seeds": len({row["seed"] for row in best}),
        "spread": f"{min(losses):.3f} to {max(losses):.3f}" if len(losses) > 1 else None,
        "curve": mean_curve([row["curve"] for row in best]),
    }


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves that were taken at about the same times; longer ones are cut.

    >>> mean_curve([[(0, 4.0), (1.0, 2.0)], [(0, 5.0), (1.2, 3.0)]])
    [(0, 4.5), (1.1, 2.5)]
    """
    return [(mean(p[0] for p in points), mean(p[1] for p in points)) for points in zip(*curves, strict=False)]


def seconds_to(curve: Curve, loss: float) -> float | None:
    """Return when a curve first reaches a loss, by a straight line between two points; None if it never does.

    >>> seconds_to([(0, 9.0), (2, 5.0), (4, 3.0)], 4.0)
    3.0
    """
    for (start, before), (end, after) in pairwise(curve):
        if after <= loss:
            return end if before <= after else start + (end - start) * max(0.0, (before - loss) / (before - after))
    return None


def render(rows: Sequence[Row], task: str) -> str:
    """Return the table of a task, with the control of every command below it."""
    found = summarize(rows, task)
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in found)]
    controls = [
        f"command {row['command']}: {_name(row)}: {row['tokens_per_second']:,.0f} tokens/s, {row['updates']} updates, "
        f"loss {row['loss']:.3f}"
        for row in _done(rows, task)
        if row.get("is_control")
    ]
    failed = [f"failed: {_name(row)}: {row['error']}" for row in rows if row["task"] == task and "error" in row]
    return "\n".join([f"## {task}", "", markdown(found, columns), "", *controls, *failed])


def _name(row: Row) -> str:
    return f"{row['arm']} lr {row['lr']:g} seed {row['seed']}"


def chart_series(rows: Sequence[Row], task: str) -> list[tuple[str, Curve, str]]:
    """Return what is drawn: name, curve and kind, the best arm first."""

    def kind(name: str) -> Any:
        arm = Arm.parse(name)
        return "graphs" if arm.is_graphed else "compile" if arm.is_compiled else "eager" if arm.is_ours else "peer"

    return [(row["arm"], row["curve"], kind(row["arm"])) for row in summarize(rows, task)]
