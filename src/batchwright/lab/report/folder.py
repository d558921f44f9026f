"""What a lab left in its folder: the plan, the newest record of every run, and how many are still to come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from ...errors import ArgumentError
from .._records import RunRecord, newest_records, scan_records
from ..observations._slices import properties_of
from ..strategies.catalogue import get

RUNS = "runs.jsonl"
PLAN = "lab.json"
_NEEDED = ("dataset", "model", "strategy", "seed", "status")


@final
@dataclass(frozen=True, kw_only=True)
class LabFolder:
    """What the folder of a lab holds.

    Args:
        name: the name of the folder.
        records: one per data set, model, strategy and seed, in the order in which the runs ended.
        plan: what ``lab.json`` holds; empty without that file.
        num_replaced: runs left out because a later one has the same data set, model, strategy and seed.
        num_unreadable: lines that are not the record of a run.
    """

    name: str
    records: tuple[RunRecord, ...]
    plan: Mapping[str, Any]
    num_replaced: int = 0
    num_unreadable: int = 0


# The name it had first; ``batchwright.lab.Lab`` is what runs a plan.
Lab: TypeAlias = LabFolder


def read_lab(folder: Path) -> LabFolder:
    """Read ``runs.jsonl`` and ``lab.json`` of a folder.

    Args:
        folder: the folder that ``batchwright lab run`` wrote.

    Returns:
        The runs so far; the lab may still be running.
    """
    if not folder.is_dir():
        raise ArgumentError(f"no folder {folder}; run a lab first: batchwright lab run PRESET --folder {folder}")
    path = folder / RUNS
    if not path.is_file():
        raise ArgumentError(
            f"{folder} has no {RUNS}; it is not the folder of a lab, or its first run has not ended yet"
        )
    records, num_unreadable = _read_runs(path)
    newest = newest_records(records)
    return LabFolder(
        name=folder.resolve().name,
        records=tuple(newest),
        plan=_read_plan(folder / PLAN),
        num_replaced=len(records) - len(newest),
        num_unreadable=num_unreadable,
    )


def expected_runs(lab: LabFolder) -> int | None:
    """Return how many runs the plan has, None if the folder has no readable plan.

    A strategy that needs classes does not run on a regression, nor do cycles in few epochs; a data set without a
    run yet is assumed to have classes.
    """
    plan = lab.plan.get("plan")
    if not isinstance(plan, Mapping):
        return None
    try:
        num_seeds, strategies = len(plan["seeds"]), [get(name) for name in plan["strategies"]]
        # A replay repeats the sizes of another seed, so with one seed there is none.
        made = [one for one in strategies if one.replays is None or num_seeds > 1]
        given = properties_of(lab.records).items()
        regressions = {name for name, properties in given if properties.get("num_classes") is None}
        return num_seeds * sum(
            one.fits(None if cell["dataset"] in regressions else 2, num_epochs=cell["num_epochs"])
            for cell in plan["cells"]
            for one in made
        )
    except (ArgumentError, KeyError, TypeError):
        return None


def progress_text(lab: LabFolder) -> str:
    """Return a sentence about a lab that has runs left, empty if it is complete or has no plan."""
    expected = expected_runs(lab)
    if expected is None or len(lab.records) >= expected:
        return ""
    return f"{len(lab.records):,} of {expected:,} runs so far; this page follows the lab."


def _read_runs(path: Path) -> tuple[Sequence[RunRecord], int]:
    """Return the runs, and how many lines are not a run; a last line that is being written does not count."""
    records = [record for _, record in scan_records(path)]
    runs = [record for record in records if record is not None and all(name in record for name in _NEEDED)]
    return runs, len(records) - len(runs)


def _read_plan(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read {path}: {error}") from None
    return plan if isinstance(plan, dict) else {}
