"""The machine a run was made on, and the table it prints."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from _arms import ARMS
from _distributions import DISTRIBUTIONS

_PACKAGES = (
    *("batchwright", "datasets", "dynabatch", "lhotse", "llvmlite", "numba", "numpy", "pandas", "pyarrow"),
    *("scipy", "speechbrain", "torch", "transformers", "trl", "xgboost-cpu"),
)
Row = dict[str, Any]


def environment(env: dict[str, str]) -> dict[str, Any]:
    """Hardware, versions, date and command; ``env`` is what every arm's process was started with."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "env": env,
    }


def markdown(rows: list[Row], env: dict[str, Any]) -> str:
    """One table for each distribution and number of examples, and the notes below."""
    parts = [_headline(env)]
    for num_examples, name in dict.fromkeys((row["requested"], row["distribution"]) for row in rows):
        chosen = [row for row in rows if (row["requested"], row["distribution"]) == (num_examples, name)]
        parts.append(_table(name, num_examples, chosen))
    parts.append(_notes(rows))
    return "\n\n".join(part for part in parts if part)


def _headline(env: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
    return f"{env['cpu']}, {env['num_cpus']} cores, Python {env['python']}; {versions}; {env['date']}"


_COLUMNS = (
    ("arm", lambda row: row["title"]),
    ("N", lambda row: _count(row["num_examples"])),
    ("plan s", lambda row: f"{row['plan_seconds']:.3f}"),
    ("÷ argsort (min to max)", lambda row: _spread(row)),
    ("peak B/example", lambda row: f"{row['peak_bytes_per_example']:.0f}"),
    ("batches (floor)", lambda row: f"{row['batches']:,} ({row['floor']:,})"),
    ("padding", lambda row: f"{row['padding']:.2%}"),
    ("budget used", lambda row: f"{row['budget_used']:.1%}"),
    ("largest ÷ budget", lambda row: f"{row['largest']:.2f}"),
    ("shapes", lambda row: f"{row['shapes']:,}"),
    ("straggler waste W=8", lambda row: _maybe(row["straggler_waste"], ".1%")),
    ("recurrence", lambda row: _maybe(row["recurrence"], ".4f")),
    ("order corr. W=8", lambda row: _maybe(row["order_correlation"], "+.2f")),
    ("order corr. W=1", lambda row: _maybe(row["order_correlation_batches"], "+.2f")),
)


def _table(name: str, num_examples: int, rows: list[Row]) -> str:
    distribution = DISTRIBUTIONS[name]
    lines = [
        f"### {distribution.title}; budget {distribution.budget:,}, {_count(num_examples)} examples",
        "",
        "| " + " | ".join(title for title, _ in _COLUMNS) + " |",
        "| --- |" + " ---: |" * (len(_COLUMNS) - 1),
    ]
    for row in rows:
        cells = [row["title"], f"did not run: {row['error']}"] if "error" in row else _cells(row)
        lines.append("| " + " | ".join(cells + [""] * (len(_COLUMNS) - len(cells))) + " |")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    return [show(row) for _, show in _COLUMNS]


def _notes(rows: list[Row]) -> str:
    notes = [f"- {ARMS[name].title}: {ARMS[name].note}." for name in _arms_of(rows) if ARMS[name].note]
    for row in rows:
        if row.get("missing") or row.get("repeated"):
            what = f"{row['missing']:,} examples missing, {row['repeated']:,} repeated"
            notes.append(f"- {row['title']}, {row['distribution']}: {what}.")
    return "\n".join(notes)


def _arms_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows))


def _count(number: int) -> str:
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if number >= unit and number % unit == 0:
            return f"{number // unit}{name}"
    return f"{number:,}"


def _spread(row: Row) -> str:
    """The median of the ratios, and between which they lie."""
    form = ".1f" if row["argsort_ratio"] < 100 else ".0f"
    low, middle, high = (format(row[f"argsort_ratio{end}"], form) for end in ("_min", "", "_max"))
    return f"{middle} ({low} to {high})"


def _maybe(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout, with ``-dirty`` after it if a file was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
