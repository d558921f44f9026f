"""The report as one page that needs nothing else: style, script and numbers are in it."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..._charts.page import read_asset, render_page
from ..._types import FloatArray
from .._records import CellKey, RunRecord, cell_of, finished, number, ordered
from ..observations._effects import counted, end_of
from ..observations._slices import cells_of, groups_of
from ..observations.evidence import Finding
from ..observations.observing import observe
from ..strategies.strategy import BASELINE
from ._tables import (
    NAMES,
    footer_text,
    prose,
    render_datasets,
    render_failures,
    render_findings,
    render_matrix,
    render_rates,
    render_settings,
    row_order,
)
from ._verdict import verdict_of
from .folder import LabFolder

# In this order: each uses names of the ones before it.
_SCRIPTS = ("curves.js", "pareto.js", "page.js")
_CONTENTS = (
    ("matrix", "Effects"),
    ("observations", "Observations"),
    ("curves", "Curves"),
    ("pareto", "Cost and quality"),
    ("decisions-of", "Decisions"),
    ("failed", "Failed runs"),
    ("about", "Data and settings"),
)
_NO_SCRIPT = "<noscript><p>The charts need JavaScript; the tables and observations do not.</p></noscript>"
# How many strategies are coloured when the page opens.
_NUM_LEADERS = 5
_AXES = {"examples": "examples", "updates": "updates", "simulated": "simulated seconds", "seconds": "measured seconds"}
_VALUES = {"loss": "validation loss", "metric": "quality", "train": "training loss"}


def render_html(
    lab: LabFolder, *, observations: Sequence[Finding] | None = None, live: str = "", stamp: str = ""
) -> str:
    """Return the page.

    Args:
        lab: the runs.
        observations: what they show; None observes them.
        live: the address that answers with the state of the lab, for a page that follows it; empty for a file.
        stamp: the state that this page shows.
    """
    observations = observe(lab.records) if observations is None else observations
    body = [
        _header(lab, observations),
        _filters(lab.records),
        "<main>",
        *_sections(lab, observations),
        "</main>",
        f"<footer>{html.escape(footer_text(lab.records))}</footer>",
    ]
    return render_page(
        f"batchwright lab: {lab.name}",
        "\n".join(body),
        scripts=[read_asset(__package__, f"assets/{name}") for name in _SCRIPTS],
        data=make_view(lab),
        attributes={
            "class": "dashed",
            "data-live": live,
            "data-stamp": stamp,
            "data-leaders": json.dumps(leaders(lab.records)),
        },
    )


def leaders(records: Sequence[RunRecord]) -> list[str]:
    """Return the strategies to colour at first: the best over all cells, or simply the first ones if none is ranked."""
    return row_order(records)[:_NUM_LEADERS]


def _header(lab: LabFolder, observations: Sequence[Finding]) -> str:
    kinds = (("dataset", "data set"), ("model", "model"), ("strategy", "strategy"), ("seed", "seed"))
    counts = [counted(len(lab.records), "run")]
    counts += [counted(len({run[key] for run in lab.records}), what) for key, what in kinds]
    figures = "".join("<li><b>{}</b>{}</li>".format(*count.split(" ", 1)) for count in counts)
    verdict = verdict_of(lab.records, observations)
    answers = "".join(f"<dt>{question}</dt><dd>{prose(answer)}</dd>" for question, answer in verdict.answers)
    exact = "".join(f'<p class="verdict">{prose(sentence)}</p>' for sentence in verdict.exact)
    folded = f"<details><summary>The same with intervals and p-values</summary>{exact}</details>" if exact else ""
    return (
        '<a class="skip" href="#matrix">To the results</a><header>'
        f'<p class="eyebrow">batchwright lab · {html.escape(lab.name)}</p>'
        "<h1>Which batch size strategy, on which data?</h1>"
        '<div id="live" hidden><p role="status"></p><progress hidden></progress></div>'
        f'<p class="lead">{prose(verdict.lead)}</p><dl class="answers">{answers}</dl>{folded}'
        f'<ul class="figures">{figures}</ul></header>'
    )


def axes_of(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return what the curves can be drawn along; older records have no simulated seconds."""
    has_simulated = any(end_of(run, "simulated_seconds") is not None for run in records)
    return {name: title for name, title in _AXES.items() if name != "simulated" or has_simulated}


def _filters(records: Sequence[RunRecord]) -> str:
    cells = cells_of(records)
    choices = (
        ("dataset", "Data set", "all data sets", dict.fromkeys(cell.dataset for cell in cells)),
        ("model", "Model", "all models", dict.fromkeys(sorted({cell.model for cell in cells}))),
        ("group", "Group of strategies", "all groups", dict.fromkeys(groups_of(records).values())),
    )
    selects = "".join(
        _select(name, title, [("", every), *((value, value) for value in values)])
        for name, title, every, values in choices
    )
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in _CONTENTS)
    return (
        f'<nav aria-label="Contents">{links}</nav>'
        f'<form class="filters" aria-label="Filters" onsubmit="return false">{selects}'
        '<button type="button" id="reset">Show all</button></form>'
    )


def _sections(lab: LabFolder, observations: Sequence[Finding]) -> list[str]:
    records, axes = lab.records, axes_of(lab.records)
    return [
        _section(
            "matrix",
            f"Against {BASELINE}",
            "What each strategy changed in pairs of runs with the same data set, model and seed. "
            '<span class="better">▲ better</span>, <span class="worse">▼ worse</span>, corrected for the whole '
            "table, and over all for the headline; ○ no difference shown; ? only one seed, no test. Strategies are "
            "ordered by their mean over all. Losses after equal updates or seconds are read off the curves.",
            _controls(_select("measure", "Compare by", NAMES.items())) + render_matrix(records),
        ),
        _section(
            "observations",
            "Observations",
            "Made from the numbers of all runs; filters do not change them.",
            render_findings(observations),
        ),
        _section(
            "curves",
            "Curves",
            "Means over seeds; the shade reaches from the lowest to the highest seed. Below is the batch size. "
            "Grey lines are the other strategies: choose a name to colour its line, point at a chart to see values.",
            _controls(_switch("x", "Along", axes) + _select("y", "Show", _VALUES.items()))
            + f'<div id="chips" role="group" aria-label="Strategies in colour"></div>{_NO_SCRIPT}'
            '<div class="charts many" id="curves-grid"></div>',
        ),
        _section(
            "pareto",
            "Cost and quality",
            "Up is better, left is cheaper. Whiskers reach from the lowest to the highest seed. The line joins the "
            "strategies that no other beats in both.",
            _controls(_switch("cost", "Cost", {name: title for name, title in axes.items() if name != "examples"}))
            + '<div class="charts many" id="pareto-grid"></div>',
        ),
        _section(
            "decisions-of",
            "Decisions",
            "Every change of the batch size in one run, and why.",
            _controls('<label>Run <select id="run"></select></label>') + '<div id="decisions"></div>',
        ),
        _section("failed", "Failed runs", "", render_failures(records)),
        _section(
            "about",
            "Data and settings",
            "",
            render_datasets(records) + render_settings(records) + render_rates(records, lab.plan) + _notes(lab),
        ),
    ]


def _notes(lab: LabFolder) -> str:
    notes = []
    if lab.num_replaced:
        notes.append(f"{lab.num_replaced:,} older runs of the same data set, model, strategy and seed are left out.")
    if lab.num_unreadable:
        notes.append(f"{lab.num_unreadable:,} lines of runs.jsonl are not records of runs and are left out.")
    return "".join(f"<p>{note}</p>" for note in notes)


def _section(name: str, title: str, note: str, body: str) -> str:
    text = f'<p class="note">{note}</p>' if note else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{text}{body}</section>'
    )


def _controls(content: str) -> str:
    return f'<div class="controls">{content}</div>'


def _switch(name: str, title: str, options: Mapping[str, str]) -> str:
    """Return buttons of which one is pressed; Tab reaches them, and the arrow keys go from one to the next."""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{html.escape(value)}" data-state="{name}">'
        f"<span>{html.escape(text)}</span></label>"
        for value, text in options.items()
    )
    return f'<fieldset class="switch"><legend>{title}</legend>{buttons}</fieldset>'


def _select(name: str, title: str, options: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<option value="{html.escape(value)}">{html.escape(text)}</option>' for value, text in options)
    return f'<label>{title} <select data-state="{name}" autocomplete="off">{items}</select></label>'


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
