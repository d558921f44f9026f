"""Result files of ``benchmarks/results``, read so that what is missing is named."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, final

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


@final
class StaleResult(Exception):
    """A result file lacks what the page shows; the message says which file and what to do."""


@final
class Record:
    """A JSON object that knows where it stands in which file.

    >>> Record({"rows": [{"arm": "ours", "ms": 3.0}]}, "serving.json").row(arm="ours")["ms"]
    3.0
    >>> Record({"rows": []}, "serving.json").row(arm="ours")
    Traceback (most recent call last):
    _measured.reading.StaleResult: serving.json, rows: no entry has arm='ours'; run the benchmark or change the section
    """

    def __init__(self, values: Row, where: str) -> None:
        self._values = values
        self._where = where

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            known = ", ".join(map(str, self._values))
            raise StaleResult(f"{self._where}: no {key!r} among {known}; {_DO}")
        value = self._values[key]
        return Record(value, f"{self._where}, {key}") if isinstance(value, dict) else value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value that an older file may lack."""
        return self[key] if key in self._values else default

    def keys(self) -> list[str]:
        """Return the keys."""
        return list(self._values)

    def rows(self, key: str = "rows", **wanted: Any) -> list[Record]:
        """Return the entries of a list that have these values."""
        found = self[key]
        if not isinstance(found, list):
            raise StaleResult(f"{self._where}: {key!r} is no list; {_DO}")
        return [
            Record(row, f"{self._where}, {key}[{number}]")
            for number, row in enumerate(found)
            if all(row.get(name) == value for name, value in wanted.items())
        ]

    def row(self, key: str = "rows", **wanted: Any) -> Record:
        """Return the one entry of a list that has these values."""
        found = self.rows(key, **wanted)
        if not found:
            words = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
            raise StaleResult(f"{self._where}, {key}: no entry has {words}; {_DO}")
        return found[0]


_DO = "run the benchmark or change the section"


@cache
def read(name: str) -> Record:
    """Return a result file."""
    try:
        values = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StaleResult(f"{name} is not in benchmarks/results; {_DO}") from error
    except ValueError as error:
        raise StaleResult(f"{name} is no JSON: {error}; {_DO}") from error
    if not isinstance(values, dict):
        raise StaleResult(f"{name} is no JSON object; {_DO}")
    return Record(values, name)


@cache
def _summaries(name: str, task: str) -> tuple[Row, ...]:
    """Return what ``benchmarks/gpu_quality.py --report`` says: each arm at its best rate, the mean over its seeds."""
    read(name)  # for its message
    results = _benchmark("_quality.results")
    _, rows = results.read_rows([RESULTS / name])
    return tuple(results.summarize(rows, task))


def _benchmark(module: str) -> Any:
    """Return a module of the benchmarks, which are no package: they find each other by their folder."""
    if (folder := str(ROOT / "benchmarks")) not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)


def spread(wanted: Sequence[float], *, least: float) -> list[float]:
    """Return heights as near to the wanted ones as a least distance allows, as the plots of the benchmarks do."""
    return list(_benchmark("_quality.chart").spread(wanted, least=least))


def summary_of(name: str, task: str, arms: Sequence[str]) -> list[Row]:
    """Return the arms of a run of ``gpu_quality.py``, in the order that is asked for."""
    found = {row["arm"]: row for row in _summaries(name, task)}
    missing = [arm for arm in arms if arm not in found]
    if missing:
        raise StaleResult(f"{name}: no run of {', '.join(missing)} among {', '.join(found)}; {_DO}")
    return [found[arm] for arm in arms]


@cache
def constants_of(task: str) -> tuple[Row, ...]:
    """Return what ``benchmarks/quality.py --report`` says of a task on the clock that replays graphs."""
    rows = read("quality.json")["rows"]
    plan = _benchmark("_cpu_quality.protocol").Plan("graphs", task)
    return tuple(_benchmark("_cpu_quality.results").summarize(plan, rows))
