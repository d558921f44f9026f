"""The report as Markdown and as a table of runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ._observe_effects import LOSS, METRIC, Measure, effects, mean_loss
from ._observe_slices import cells_of
from ._report_matrix import SIGNS, Effect, matrix_effects, pooled_effects, row_order
from ._report_parts import TOPICS, footer_text
from ._report_records import BASELINE, Cell, Lab, Record, cell_of, diverged
from .observations import Observation, observe

_FINAL = ("metric", "validation_loss", "train_loss", "updates", "seconds", "examples")
CSV_COLUMNS = (
    *("dataset", "model", "strategy", "group", "seed", "status", "metric_name", *_FINAL),
    *("mean_validation_loss", "num_decisions", "loss_change", "metric_change", "error"),
)


def render_csv(lab: Lab) -> str:
    """Return one line for each run: its end, and its change against the baseline's run with the same seed.

    ``loss_change`` is the quotient of the validation losses less 1, ``metric_change`` the difference of the metrics.
    """
    losses, metrics = (effects(lab.records, measure) for measure in (LOSS, METRIC))
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in lab.records:
        place = (cell_of(run), run["strategy"])
        change = losses.get(place, {}).get(run["seed"])
        writer.writerow(
            {
                **{
                    key: run.get(key)
                    for key in ("dataset", "model", "strategy", "group", "seed", "metric_name", "error")
                },
                **{key: (run.get("final") or {}).get(key) for key in _FINAL},
                "status": "diverged" if diverged(run) else run["status"],
                "mean_validation_loss": mean_loss(run),
                "num_decisions": len(run.get("decisions") or ()),
                "loss_change": None if change is None else math.expm1(change),
                "metric_change": metrics.get(place, {}).get(run["seed"]),
            }
        )
    return text.getvalue()


def render_markdown(lab: Lab, *, observations: Sequence[Observation] | None = None) -> str:
    """Return the matrix, the observations with their tests, and the failed runs.

    Args:
        lab: the runs.
        observations: what they show; None works it out.
    """
    observations = observe(lab.records) if observations is None else observations
    lead = next((one.sentence for one in observations if one.topic == "overall"), "")
    parts = [
        f"# batchwright lab: {lab.name}",
        lead,
        f"## Final validation loss against {BASELINE}",
        "▲ better, ▼ worse, after correction for all strategies of a column; ○ no difference shown; ? one seed. "
        "Mean change and 95 % interval.",
        _matrix(lab.records, LOSS),
        "## Observations",
        *_observations(observations),
        "## Failed runs",
        _failures(lab.records),
        f"---\n\n{footer_text(lab.records)}",
    ]
    return "\n\n".join(parts) + "\n"


def _matrix(records: Sequence[Record], measure: Measure) -> str:
    cells = cells_of(records)
    entries = matrix_effects(records, measure)
    pooled = pooled_effects(records, measure)
    head = ["strategy", *(["over all"] if pooled else []), *map(str, cells)]
    rows = [_row(name, [pooled.get(name)] if pooled else [], cells, entries) for name in row_order(records)]
    return "\n".join(_line(row) for row in (head, ["---"] * len(head), *rows))


def _row(
    name: str, pooled: Sequence[Effect | None], cells: Sequence[Cell], entries: Mapping[tuple[Cell, str], Effect]
) -> list[str]:
    return [name, *(_entry(one) for one in [*pooled, *(entries.get((cell, name)) for cell in cells)])]


def _entry(entry: Effect | None) -> str:
    if entry is None:
        return ""
    interval = f" ({entry.interval})" if entry.interval else ""
    return f"{SIGNS[entry.verdict]} {entry.text}{interval}"


def _observations(observations: Sequence[Observation]) -> list[str]:
    parts = []
    for topic, some in groupby(observations, key=lambda one: one.topic):
        parts.append(f"### {TOPICS.get(topic, topic)}")
        for one in some:
            parts += [one.sentence, *(["\n".join(f"- {test}" for test in one.evidence)] if one.evidence else [])]
    return parts


def _failures(records: Sequence[Record]) -> str:
    bad = [run for run in records if run["status"] != "ok" or diverged(run)]
    lines = [f"- {cell_of(run)}, {run['strategy']}, seed {run['seed']}: {_reason(run)}" for run in bad]
    return "\n".join(lines) or "None."


def _reason(run: Mapping[str, Any]) -> str:
    """Return why a run has no result, on one line."""
    return " ".join(str(run.get("error") or "diverged: the loss is no finite number").split())


def _line(cells: Sequence[str]) -> str:
    # A bar inside a cell would begin another one.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
