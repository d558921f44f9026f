"""What a lab left in its folder: the plan, and the newest record of every run."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

from ..errors import ArgumentError
from ._store import read_records

Record: TypeAlias = Mapping[str, Any]

RUNS = "runs.jsonl"
PLAN = "lab.json"
# The strategy that all others are compared with.
BASELINE = "constant"
_NEEDED = ("dataset", "model", "strategy", "seed", "status")


class Cell(NamedTuple):
    """A data set and the model trained on it: one column of the matrix."""

    dataset: str
    model: str

    def __str__(self) -> str:
        return f"{self.dataset} · {self.model}"


@final
@dataclass(frozen=True, kw_only=True)
class Lab:
    """A folder as read.

    Args:
        name: of the folder.
        records: one for each data set, model, strategy and seed, in the order they ended.
        plan: what ``lab.json`` holds; empty where there is none.
        num_replaced: runs left out since a later one has the same data set, model, strategy and seed.
        num_unreadable: lines that are no record of a run.
    """

    name: str
    records: tuple[Record, ...]
    plan: Mapping[str, Any]
    num_replaced: int = 0
    num_unreadable: int = 0


def read_lab(folder: Path) -> Lab:
    """Read ``runs.jsonl`` and ``lab.json`` of a folder.

    Args:
        folder: where ``batchwright lab run`` wrote.

    Returns:
        The runs, also of a lab that is still at work.
    """
    if not folder.is_dir():
        raise ArgumentError(f"no folder {folder}; run a lab first: batchwright lab run PRESET --folder {folder}")
    path = folder / RUNS
    if not path.is_file():
        raise ArgumentError(f"{folder} holds no {RUNS}; it is no folder of a lab, or its first run has not ended yet")
    records, num_unreadable = _read_runs(path)
    newest = newest_records(records)
    return Lab(
        name=folder.resolve().name,
        records=tuple(newest),
        plan=_read_plan(folder / PLAN),
        num_replaced=len(records) - len(newest),
        num_unreadable=num_unreadable,
    )


def newest_records(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each data set, model, strategy and seed: a run may have been repeated.

    >>> run = {"dataset": "wine", "model": "mlp", "strategy": "constant", "seed": 0}
    >>> [record["status"] for record in newest_records([run | {"status": "failed"}, run | {"status": "ok"}])]
    ['ok']
    """
    newest: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = (record["dataset"], record["model"], record["strategy"], record["seed"])
        newest.pop(key, None)
        newest[key] = record
    return list(newest.values())


def cell_of(record: Record) -> Cell:
    """Return the data set and the model of a run."""
    return Cell(record["dataset"], record["model"])


def finished(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the runs that ended well: not failed, and with a finite loss at the end."""
    return (record for record in records if record["status"] == "ok" and not diverged(record))


def diverged(record: Record) -> bool:
    """Say whether a run came to its end with a loss that is no number.

    >>> diverged({"status": "ok", "final": {"validation_loss": float("nan")}})
    True
    """
    return record["status"] == "ok" and number((record.get("final") or {}).get("validation_loss")) is None


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else.

    >>> number(2), number(float("inf")), number(None)
    (2.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def ordered(names: Iterable[str]) -> list[str]:
    """Return names once each, the baseline first and the others as they came.

    >>> ordered(["linear", "constant", "linear"])
    ['constant', 'linear']
    """
    return sorted(dict.fromkeys(names), key=lambda name: name != BASELINE)


def _read_runs(path: Path) -> tuple[list[Record], int]:
    """Return the runs and how many lines are none; a last line that is being written is no such line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records: list[Record] = list(read_records(path))
    whole = [record for record in records if all(name in record for name in _NEEDED)]
    return whole, len(caught) + len(records) - len(whole)


def _read_plan(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read {path}: {error}") from None
    return plan if isinstance(plan, dict) else {}
