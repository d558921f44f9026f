"""The report as files: the page, the same as Markdown, and a table of runs."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import final

from ..._files import write_atomic
from ...errors import ArgumentError
from .._records import RunRecord, cell_of, diverged
from ..observations._effects import METRIC, Measure, changes_of, end_of, mean_loss
from ..observations._equal import BASES, EQUAL_EXAMPLES, EQUAL_SIMULATED, EQUAL_UPDATES
from ..observations._headline import Family, family_of
from ..observations._slices import overall
from ..observations._tuning import tuning_of
from ..observations.evidence import Finding
from ..observations.observing import observe
from ..strategies.strategy import BASELINE
from ._tables import NAMES, SIGNS, TOPICS, Effect, failed_runs, footer_text, matrix_rows, row_order
from ._verdict import verdict_of
from .folder import LabFolder, read_lab
from .page import render_html

_TABLES = (EQUAL_EXAMPLES, EQUAL_UPDATES, EQUAL_SIMULATED)
_FINAL = ("metric", "validation_loss", "train_loss", "updates", "seconds", "examples")
_PLACE = ("dataset", "model", "strategy", "group", "seed")
CSV_COLUMNS = (
    *(*_PLACE, "status", "metric_name", *_FINAL),
    *("mean_validation_loss", "num_decisions", "loss_change", "metric_change", "error"),
    *("simulated_seconds", "lr", "rate_at_edge", *(f"{basis.measure.name}_change" for basis in BASES[1:])),
)


@final
@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Where a report was written, and what stands on top of it in plain words, one sentence or answer each."""

    html: Path
    markdown: Path
    csv: Path
    verdict: tuple[str, ...] = ()


def write_report(folder: str | os.PathLike[str]) -> ReportFiles:
    """Write ``report.html``, ``report.md`` and ``report.csv`` into the folder of a lab.

    Args:
        folder: the folder with ``runs.jsonl``; the lab may still be running.

    Returns:
        The three files and the verdict.

    Raises:
        ArgumentError: the folder does not exist, or holds no run.
    """
    place = Path(folder)
    lab = read_lab(place)
    if not lab.records:
        raise ArgumentError(f"{place} has no finished run yet; wait for the first one to end")
    observations = observe(lab.records)
    files = ReportFiles(
        html=place / "report.html",
        markdown=place / "report.md",
        csv=place / "report.csv",
        verdict=verdict_of(lab.records, observations).sentences(),
    )
    for path, content in (
        (files.html, render_html(lab, observations=observations)),
        (files.markdown, render_markdown(lab, observations=observations)),
        (files.csv, render_csv(lab)),
    ):
        write_atomic(path, content)
    return files


def render_csv(lab: LabFolder) -> str:
    """Return one line per run: its end, and its change against the run of the baseline with the same seed.

    ``loss_change`` is the quotient of the validation losses minus 1, ``metric_change`` the difference of the metrics;
    ``loss_updates_change`` is the quotient after equal updates minus 1, and likewise for both kinds of seconds.
    """
    metrics = changes_of(lab.records, METRIC)
    losses = {basis.measure.name: changes_of(lab.records, basis.measure) for basis in BASES}
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in lab.records:
        place = (cell_of(run), run["strategy"])
        changes = {f"{name}_change": found.get(place, {}).get(run["seed"]) for name, found in losses.items()}
        tuning = tuning_of(run)
        writer.writerow(
            {
                **{key: run.get(key) for key in (*_PLACE, "metric_name", "error")},
                **{key: (run.get("final") or {}).get(key) for key in _FINAL},
                "status": "diverged" if diverged(run) else run["status"],
                "mean_validation_loss": mean_loss(run),
                "num_decisions": len(run.get("decisions") or ()),
                **{name: None if change is None else math.expm1(change) for name, change in changes.items()},
                "simulated_seconds": end_of(run, "simulated_seconds"),
                "lr": (run.get("settings") or {}).get("lr"),
                "rate_at_edge": None if tuning is None else bool(tuning.get("is_at_edge")),
                "metric_change": metrics.get(place, {}).get(run["seed"]),
            }
        )
    return text.getvalue()


def render_markdown(lab: LabFolder, *, observations: Sequence[Finding] | None = None) -> str:
    """Return the matrix, the findings with their tests, and the failed runs.

    Args:
        lab: the runs.
        observations: what they show; None observes them.
    """
    observations = observe(lab.records) if observations is None else observations
    family = family_of(lab.records, overall(lab.records)) if lab.records else None
    matrices = [
        part
        for basis in _TABLES
        for part in (
            f"## {NAMES[basis.measure.name]} against {BASELINE}",
            _matrix(lab.records, basis.measure, family),
        )
    ]
    parts = [
        f"# batchwright lab: {_plain(lab.name)}",
        *map(_plain, verdict_of(lab.records, observations).sentences()),
        "In the tables: ▲ better, ▼ worse, corrected for the whole table, and over all for the headline; ○ no "
        "difference shown; ? only one seed. Mean change and 95 % interval; an edge is that of the grid of rates.",
        *matrices,
        "## Observations",
        *_observations(observations),
        "## Failed runs",
        _failures(lab.records),
        f"---\n\n{footer_text(lab.records)}",
    ]
    return "\n\n".join(parts) + "\n"


def _matrix(records: Sequence[RunRecord], measure: Measure, family: Family | None) -> str:
    columns, rows = matrix_rows(records, row_order(records), measure, family=family)
    head = ["strategy", *("over all" if cell is None else str(cell) for cell in columns)]
    lines = [[name, *map(_entry, row)] for name, row in rows.items()]
    return "\n".join(_line(line) for line in (head, ["---"] * len(head), *lines))


def _entry(entry: Effect | None) -> str:
    if entry is None:
        return ""
    interval = f" ({entry.interval})" if entry.interval else ""
    edge = f"; rate at the edge: {entry.rate}" if entry.rate else ""
    return f"{SIGNS[entry.verdict]} {entry.text}{interval}{edge}"


def _observations(observations: Sequence[Finding]) -> list[str]:
    parts = []
    for topic, some in groupby(observations, key=lambda one: one.topic):
        parts.append(f"### {TOPICS.get(topic, topic)}")
        for one in some:
            parts += [_plain(one.sentence), *([_plain(f"Why? {one.why}")] if one.why else [])]
            parts += [*(["\n".join(f"- {_plain(str(test))}" for test in one.evidence)] if one.evidence else [])]
    return parts


def _failures(records: Sequence[RunRecord]) -> str:
    # An error may have several lines; an item of a list has one.
    lines = [_plain(f"- {cell}, {strategy}, seed {seed}: {why}") for cell, strategy, seed, why in failed_runs(records)]
    return "\n".join(lines) or "None."


def _line(cells: Sequence[str]) -> str:
    # A bar inside a cell would start another cell.
    return "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"


def _plain(text: str) -> str:
    """Return a text on one line in which names of files and columns make no markup: no tags, links, code or stars.

    >>> print(_plain("a*b, <script> and [x](y), p < 0.001"))
    a\\*b, &lt;script> and \\[x\\](y), p < 0.001
    """
    text = re.sub(r"([\\`*\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)
