"""What the demo says first: what planned batches gained here, against what, and what was measured on a GPU."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from ..._charts import page
from ..._charts.page import read_asset
from ..screen import percent, times
from .records import ArmResult

# Times within this of each other are called the same: seconds vary that much from run to run.
_ALIKE = 0.1


def verdict(results: Sequence[ArmResult], longer: Sequence[ArmResult]) -> list[str]:
    """Return the verdict in sentences, the most important first.

    Args:
        results: shuffled, by length, planned with the full and with the small budget; one epoch each.
        longer: by length and planned with the small budget, for the seconds of the shuffled arm.
    """
    shuffled, grouped, _, planned = results[:4]
    grouped_longer, planned_longer = longer
    return [
        f"Against shuffled batches of the same memory: {_faster(shuffled, planned)}. Against the same fixed size "
        f"grouped by length: {_faster(grouped, planned)}.",
        f"At about equal updates ({planned.num_steps} planned, {shuffled.num_steps} of a fixed size, the same "
        f"examples): loss {planned.loss:.2f} planned, {grouped.loss:.2f} by length, {shuffled.loss:.2f} shuffled.",
        f"At about equal seconds ({_seconds(planned_longer)} planned, {_seconds(grouped_longer)} by length, "
        f"{_seconds(shuffled)} shuffled): loss {planned_longer.loss:.2f} planned, {grouped_longer.loss:.2f} by length, "
        f"{shuffled.loss:.2f} shuffled.",
        "All of this ran on your CPU, where time grows with padded tokens, however many steps they are in. "
        "One seed each: small differences in loss mean nothing.",
    ]


def _faster(slow: ArmResult, fast: ArmResult) -> str:
    """Say how many times as fast the second is, in real tokens per second."""
    ratio = fast.tokens_per_second / slow.tokens_per_second
    if abs(ratio - 1) <= _ALIKE:
        return f"about as fast ({times(ratio)})"
    return f"{times(ratio)} as fast" if ratio > 1 else f"slower ({times(ratio)})"


def _seconds(result: ArmResult) -> str:
    return f"{result.seconds:.0f} s"


def as_long_rows(results: Sequence[ArmResult], longer: Sequence[ArmResult]) -> list[list[str]]:
    """Return name, seconds, updates, examples and loss of the arms that trained equally long."""
    return [
        [arm.name, f"{arm.seconds:.1f}", f"{arm.num_steps:,}", f"{arm.checks[-1].num_examples:,}", f"{arm.loss:.3f}"]
        for arm in (results[0], *longer)
    ]


AS_LONG_HEADER = ("", "CPU seconds", "updates", "examples seen", "loss")


def stored_results() -> dict[str, Any]:
    """Return what was measured on a GPU when this version was made; ``tools/measured.py`` writes the file."""
    return dict(json.loads(read_asset(__package__, "gpu.json")))


GPU_HEADER = ("", "real tokens/s", "padding", "updates", "validation loss")


def gpu_rows(task: dict[str, Any]) -> list[list[str]]:
    """Return name, speed, padding, updates and loss of the arms of a stored task."""
    return [
        [
            row["name"],
            f"{row['tokens_per_second']:,}",
            percent(row["padding"]),
            f"{row['updates']:,}",
            f"{row['loss']:.2f}",
        ]
        for row in task["rows"]
    ]


def gpu_line(task: dict[str, Any]) -> str:
    """Return a stored task in a sentence."""
    first, last = task["rows"][0], task["rows"][-1]
    return (
        f"{task['title']}, {task['seconds']} s per arm: loss {first['loss']:.2f} with {first['name']}; "
        f"{last['loss']:.2f} with {last['name']}."
    )


def gpu_section(stored: dict[str, Any]) -> str:
    """Return the part of the page that shows stored results, marked as such."""
    tables = "".join(
        f"<h3>{html.escape(task['title'])}</h3><p>{html.escape(task['note'])}</p>"
        + page.render_table(GPU_HEADER, gpu_rows(task), numbers_from=1)
        for task in stored["tasks"]
    )
    return (
        f"<h2>What a GPU gives</h2><p><strong>Stored results, not of this run:</strong> measured on one "
        f"{html.escape(stored['device'])} with {html.escape(stored['command'])}, each arm for the same seconds, the "
        "capture of graphs inside the clock. On a GPU small steps all take the same time, so replaying planned shapes "
        f"as CUDA graphs gains most where launches bind, and less where arithmetic does.</p>{tables}"
    )
