"""What runs say together: the best learning rate of an arm, its mean curve, and when it passes a loss."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from _gpu import Row, markdown

from .arms import Arm

Curve: TypeAlias = "list[tuple[float, float]]"

# What commands must have in common, and how a message calls it.
ALIKE = {"seconds_a_run": "seconds", "data": "data", "smoke": "--smoke"}
RATES_DIFFER = "learning rates as listed in the table"

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
        report = _read(path)
        commands |= {command["id"]: command for command in report["commands"]}
        rows |= {
            json.dumps([row["command"], row["task"], row["arm"], row["lr"], row["seed"]]): row for row in report["rows"]
        }
    return list(commands.values()), list(rows.values())


def _read(path: Path) -> Row:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read: {error}; name a file that --output wrote") from error
    if not isinstance(report, dict) or not {"commands", "rows"} <= report.keys():
        raise SystemExit(f"{path} holds no commands and rows; name a file that --output wrote")
    return report


def check_alike(commands: Sequence[Row], rows: Sequence[Row], task: str, wanted: Row | None = None) -> None:
    """Refuse results whose runs cannot stand in one table: of other seconds, other data, or a trial run.

    Args:
        commands: that made the runs.
        rows: the runs.
        task: whose runs are compared.
        wanted: what this command has; None compares what the files say, and older ones say less.
    """
    used = {row["command"] for row in rows if row["task"] == task}
    for name, words in ALIKE.items():
        found = {command.get(name) for command in commands if command["id"] in used}
        found = found - {None} if wanted is None else found | {wanted[name]}
        if len(found) > 1:
            values = ", ".join(sorted("unknown" if value is None else str(value) for value in found))
            raise SystemExit(
                f"runs of {task} differ in {words} ({values}), so they cannot be compared; name another --output, or "
                "leave their file out"
            )


def has_diverged(row: Row) -> bool:
    """Return whether a run, or an arm, ended without a loss that is a number."""
    return not math.isfinite(row["loss"])


def _order(row: Row) -> tuple[bool, float]:
    return has_diverged(row), row["loss"]


def rates_note(rows: Sequence[Row], task: str) -> str:
    """Return how the learning rates of the arms were chosen, as far as the runs say."""
    done = _done(rows, task)
    grids = {frozenset(row["lr"] for row in done if row["arm"] == arm) for arm in {row["arm"] for row in done}}
    return "best learning rate of the same grid for each arm" if len(grids) == 1 else RATES_DIFFER


def best_rate(rows: Sequence[Row], task: str, arm: str) -> float | None:
    """Return the learning rate with the least loss of an arm, by the first seed."""
    found = [row for row in _done(rows, task) if row["arm"] == arm]
    if not found:
        return None
    first = min(row["seed"] for row in found)
    return min((row for row in found if row["seed"] == first), key=_order)["lr"]


def summarize(rows: Sequence[Row], task: str) -> list[Row]:
    """Return one row per arm, the best first; an arm counts at its best learning rate, averaged over seeds.

    Arms that diverged in a seed come last, and have no times.
    """
    names = dict.fromkeys(row["arm"] for row in _done(rows, task))
    table = [_summary([row for row in _done(rows, task) if row["arm"] == name], name) for name in names]
    for kind, key in (("peer", _is_peer), ("eager", _is_planned_eager)):
        of_kind = [row for row in table if key(row["arm"]) and not has_diverged(row)]
        if of_kind:
            target = min(of_kind, key=_order)
            for row in table:
                seconds = None if has_diverged(row) else seconds_to(row["curve"], target["loss"])
                row[f"to_{kind}"] = seconds
                row[f"times_{kind}"] = target["curve"][-1][0] / seconds if seconds else None
    return sorted(table, key=_order)


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
    by_rate = {row["lr"]: min((other for other in rows if other["lr"] == row["lr"]), key=_order) for row in rows}
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
    if Arm.parse(name).is_graphed and not all("stepper_peak_gib" in row for row in best):
        keys = keys[:-1]  # the allocator's own peak leaves out the pool
    means = {key: mean(values) for key in keys if (values := [row[key] for row in best if row.get(key) is not None])}
    if "pool_bytes" in means:
        means["pool_gib"] = means.pop("pool_bytes") / 2**30
    return {
        "arm": name,
        **means,
        "lr": rate,
        "by_lr": ", ".join(f"{lr:g}: {_in_words(by_rate[lr])}" for lr in sorted(by_rate)),
        "loss": mean(losses),
        "seeds": len({row["seed"] for row in best}),
        "spread": f"{min(losses):.3f} to {max(losses):.3f}" if len(losses) > 1 and math.isfinite(sum(losses)) else None,
        "curve": mean_curve([row["curve"] for row in best]),
    }


def _in_words(row: Row) -> str:
    return "diverged" if has_diverged(row) else f"{row['loss']:.2f}"


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves at all times that one of them has, by straight lines between the points of each.

    After its end a curve stays where it is, so that the mean ends with the mean of the last losses.

    >>> mean_curve([[(0, 4.0), (2, 2.0)], [(0, 6.0), (1, 3.0), (2, 2.0)]])
    [(0.0, 5.0), (1.0, 3.0), (2.0, 2.0)]
    """
    times = np.unique([seconds for curve in curves for seconds, _ in curve])
    losses = np.mean([np.interp(times, *zip(*curve, strict=True)) for curve in curves], axis=0)
    return list(zip(times.tolist(), losses.tolist(), strict=True))


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
    grids = [] if rates_note(rows, task) != RATES_DIFFER else ["arms have different learning rates: see loss by lr"]
    failed = [f"failed: {_name(row)}: {row['error']}" for row in rows if row["task"] == task and "error" in row]
    return "\n".join([f"## {task}", "", markdown(found, columns), "", *grids, *controls, *failed])


def _name(row: Row) -> str:
    return f"{row['arm']} lr {row['lr']:g} seed {row['seed']}"


def chart_series(rows: Sequence[Row], task: str) -> list[tuple[str, Curve, str]]:
    """Return what is drawn: name, curve and kind, the best arm first; arms that diverged are left out."""

    def kind(name: str) -> Any:
        arm = Arm.parse(name)
        return "graphs" if arm.is_graphed else "compile" if arm.is_compiled else "eager" if arm.is_ours else "peer"

    return [(row["arm"], row["curve"], kind(row["arm"])) for row in summarize(rows, task) if not has_diverged(row)]
