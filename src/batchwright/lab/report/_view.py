"""What the charts of the page draw: mean curves, ends and decisions, thinned so that a page stays small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._types import FloatArray
from .._records import CellKey, RunRecord, cell_of, finished, number, ordered
from ..observations._effects import end_of
from ..observations._slices import cells_of, groups_of
from ..strategies.strategy import BASELINE
from .folder import LabFolder

# Columns of a curve that are averaged over seeds, and the name each has on the page.
_COLUMNS = {
    "updates": "updates",
    "seconds": "seconds",
    "simulated_seconds": "simulated",
    "batch_size": "size",
    "validation_loss": "loss",
    "train_loss": "train",
    "metric": "metric",
}
# A higher metric is better, so that of language is minus the loss.
_METRICS = {"r2": "R²", "loss": "minus the loss"}
_SPREAD = ("loss", "metric")
# So that the page of a very large lab stays below a few megabytes, longer curves are thinned, and of a run with many
# decisions only the first and the last are kept.
MAX_VALUES = 400_000
MAX_POINTS = 60
MAX_DECISIONS = 15_000
MAX_DECISIONS_PER_RUN = 200


def make_view(lab: LabFolder) -> dict[str, Any]:
    """Return what the charts show: cells, strategies, mean curves, ends and decisions."""
    records = lab.records
    cells, groups = cells_of(records), groups_of(records)
    names = ordered(groups)
    runs = _by_place(records)
    return {
        "baseline": BASELINE,
        "cells": [_describe(cell, records) for cell in cells],
        "strategies": [{"name": name, "group": groups[name]} for name in names],
        "curves": _curves(runs, cells, names),
        "ends": _ends(runs, cells, names),
        **_decisions(records, cells, names),
    }


def mean_curve(runs: Sequence[RunRecord], *, max_points: int = MAX_POINTS) -> dict[str, list[float | None]]:
    """Return the mean curve of some seeds at the examples of the first one, with the lowest and the highest value.

    Seeds that were validated at other numbers of examples are read along straight lines between their points.

    >>> run = {"curve": [{"examples": n, "validation_loss": 1.0 - n / 8} for n in (0, 4)]}
    >>> other = {"curve": [{"examples": n, "validation_loss": 2.0 - n / 8} for n in (0, 4)]}
    >>> curve = mean_curve([run, other])
    >>> curve["examples"], curve["loss"], curve["lossLow"], curve["lossHigh"]
    ([0.0, 4.0], [1.5, 1.0], [1.0, 0.5], [2.0, 1.5])
    """
    curves = [run["curve"] for run in runs if run.get("curve")]
    if not curves:
        return {}
    grid = _thinned(np.array([float(point["examples"]) for point in curves[0]]), max_points)
    found: dict[str, list[float | None]] = {"examples": _plain(grid)}
    for column, name in _COLUMNS.items():
        rows = np.stack([_read_off(curve, column, grid) for curve in curves])
        found[name] = _plain(rows.mean(axis=0))
        if name in _SPREAD:
            found |= {f"{name}Low": _plain(rows.min(axis=0)), f"{name}High": _plain(rows.max(axis=0))}
    return found


def _describe(cell: CellKey, records: Sequence[RunRecord]) -> dict[str, Any]:
    metric = next((run["metric_name"] for run in records if cell_of(run) == cell and run.get("metric_name")), None)
    return {"dataset": cell.dataset, "model": cell.model, "metric": _METRICS.get(str(metric), metric)}


def _by_place(records: Sequence[RunRecord]) -> dict[tuple[CellKey, str], list[RunRecord]]:
    runs: dict[tuple[CellKey, str], list[RunRecord]] = {}
    for run in sorted(finished(records), key=lambda run: run["seed"]):
        runs.setdefault((cell_of(run), run["strategy"]), []).append(run)
    return runs


def _curves(
    runs: Mapping[tuple[CellKey, str], Sequence[RunRecord]], cells: Sequence[CellKey], names: Sequence[str]
) -> list[dict[str, Any]]:
    most = max(8, min(MAX_POINTS, MAX_VALUES // (12 * max(1, len(runs)))))
    found = []
    for (cell, name), some in runs.items():
        curve = mean_curve(some, max_points=most)
        if curve:
            found.append({"cell": cells.index(cell), "strategy": names.index(name), "seeds": len(some), **curve})
    return found


def _ends(
    runs: Mapping[tuple[CellKey, str], Sequence[RunRecord]], cells: Sequence[CellKey], names: Sequence[str]
) -> list[dict[str, Any]]:
    found = []
    for (cell, name), some in runs.items():
        ends: dict[str, Any] = {"cell": cells.index(cell), "strategy": names.index(name), "seeds": len(some)}
        for key, short in (
            ("updates", "updates"),
            ("seconds", "seconds"),
            ("simulated_seconds", "simulated"),
            ("metric", "metric"),
            ("validation_loss", "loss"),
        ):
            values = [value for run in some if (value := _end(run, key)) is not None]
            if values:
                ends |= {short: _short(sum(values) / len(values))}
                ends |= {f"{short}Low": _short(min(values)), f"{short}High": _short(max(values))}
        found.append(ends)
    return found


def _end(run: RunRecord, key: str) -> float | None:
    return end_of(run, key) if key == "simulated_seconds" else number(run["final"].get(key))


def _decisions(records: Sequence[RunRecord], cells: Sequence[CellKey], names: Sequence[str]) -> dict[str, Any]:
    """Return the decisions of each run; a reason that occurs several times is kept once."""
    reasons: dict[str, int] = {}
    most = max(4, min(MAX_DECISIONS_PER_RUN, MAX_DECISIONS // max(1, len(records))))
    runs = []
    for run in records:
        made = run.get("decisions") or []
        kept = made if len(made) <= most else [*made[: most // 2], *made[-(most - most // 2) :]]
        runs.append(
            {
                "cell": cells.index(cell_of(run)),
                "strategy": names.index(run["strategy"]),
                "seed": run["seed"],
                "status": run["status"],
                "made": len(made),
                "decisions": [_decision(one, reasons) for one in kept],
            }
        )
    return {"runs": runs, "reasons": list(reasons)}


def _decision(one: Mapping[str, Any], reasons: dict[str, int]) -> list[Any]:
    place = reasons.setdefault(str(one.get("reason", "")), len(reasons))
    return [one.get("examples"), one.get("step"), one.get("epoch"), one.get("old"), one.get("new"), place]


def _thinned(grid: FloatArray, most: int) -> FloatArray:
    if len(grid) <= most:
        return grid
    kept: FloatArray = grid[np.unique(np.linspace(0, len(grid) - 1, most).round().astype(int))]
    return kept


def _read_off(curve: Sequence[Mapping[str, Any]], column: str, grid: FloatArray) -> FloatArray:
    """Return a column at the points of the grid, NaN where the curve does not reach."""
    points = [(float(one["examples"]), value) for one in curve if (value := number(one.get(column))) is not None]
    if not points:
        return np.full(len(grid), np.nan)
    examples, values = np.array(points).T
    # A batch size is not interpolated: a size between two real ones was never used.
    if column == "batch_size":
        at: FloatArray = values[np.searchsorted(examples, grid, side="right").clip(1) - 1]
        at[(grid < examples[0]) | (grid > examples[-1])] = np.nan
        return at
    read: FloatArray = np.interp(grid, examples, values, left=np.nan, right=np.nan)
    return read


def _plain(values: FloatArray) -> list[float | None]:
    return [_short(float(value)) for value in values]


def _short(value: float) -> float | None:
    """Return a number with five digits, None for what JSON cannot hold."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
