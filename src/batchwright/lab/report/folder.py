"""What a lab left in its folder: the plan, the newest record of every run, and how many are still to come."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from ...errors import ArgumentError
from .._records import RunRecord, newest_records, scan_records
from ..observations._slices import properties_of
from ..runner.forecast import about
from ..strategies.catalogue import get

RUNS = "runs.jsonl"
TUNING = "tuning.jsonl"
PLAN = "lab.json"
_NEEDED = ("dataset", "model", "strategy", "seed", "status")
# The pace of a lab is taken over this many looks, so that it follows slower and faster parts.
_NUM_MOMENTS = 20


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
        raise ArgumentError(f"no folder {folder}; run a lab first: batchwright lab run quick --folder {folder}")
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


def count_lines(path: Path) -> int:
    """Return how many lines have been written to the end, 0 if there is no such file."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


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


@final
@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a lab is.

    Args:
        num_done: runs that have ended.
        num_expected: runs of the plan; None if the folder has no readable plan.
        seconds_left: about how long the rest takes; None if that is not known.

    >>> Progress(num_done=20, num_expected=30, seconds_left=130.0).text
    '20 of 30 runs so far, about 2 minutes left; this page follows the lab.'
    """

    num_done: int
    num_expected: int | None
    seconds_left: float | None = None

    @property
    def num_left(self) -> int:
        """Return how many runs are to come, as far as is known."""
        return 0 if self.num_expected is None else max(0, self.num_expected - self.num_done)

    @property
    def text(self) -> str:
        """Return a sentence about a lab that has runs left, empty if it is complete or has no plan."""
        if not self.num_left:
            return ""
        left = "" if self.seconds_left is None else f", {about(self.seconds_left)} left"
        return f"{self.num_done:,} of {self.num_expected:,} runs so far{left}; this page follows the lab."


@final
class Pace:
    """How long a run takes, by the clock, from how many had ended at some moments."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_NUM_MOMENTS)

    def note(self, seconds: float, num_done: int) -> None:
        """Note how many runs had ended at a moment; a lab that was begun anew is timed anew."""
        if self._seen and num_done < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((seconds, num_done))

    def seconds_left(self, seconds: float, num_left: int) -> float | None:
        """Return about how long some runs take from a moment on; None until runs have ended between two moments.

        >>> pace = Pace()
        >>> pace.note(0.0, 3)
        >>> pace.seconds_left(0.0, 10)
        >>> pace.note(20.0, 7)
        >>> pace.seconds_left(20.0, 10), pace.seconds_left(26.0, 10)
        (50.0, 44.0)
        """
        if not self._seen:
            return None
        (begun, before), (ended, after) = self._seen[0], self._seen[-1]
        if after == before:
            return None
        return max(0.0, num_left * (ended - begun) / (after - before) - (seconds - ended))


def progress_of(lab: LabFolder) -> Progress:
    """Return how far a lab is."""
    return Progress(num_done=len(lab.records), num_expected=expected_runs(lab))


def read_begun(folder: Path) -> LabFolder:
    """Return a lab of which no run has ended yet: its plan alone."""
    return LabFolder(name=folder.resolve().name, records=(), plan=_read_plan(folder / PLAN))


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
