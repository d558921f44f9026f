"""What a measurement has left: what its result file lacks, which tests failed, and what stands in the status file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from .entries import ROOT, Entry

Row = dict[str, Any]
STATUS = "status.json"
LINE = 200


class Found(NamedTuple):
    """What a result file says: what it lacks, and the errors of its rows."""

    missing: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def look(entry: Entry, result: Path, *, smoke: bool = False) -> Found:
    """Return what the result of an entry lacks; a trial run has any rows, and its tests are skipped."""
    if not result.exists():
        return Found((f"no {result.name}",))
    if entry.is_tests:
        return _look_at_tests(result, smoke=smoke)
    try:
        report = json.loads(result.read_text())
    except ValueError:
        return Found((f"{result.name} is no JSON",))
    rows = report.get("rows", [])
    allowed = entry.cpu_error if smoke else None
    errors = [row for row in rows if "error" in row and not (allowed and allowed in row["error"])]
    # A row that failed once and ran later counts as it ran later.
    good = [row for row in rows if "error" not in row]
    errors = [row for row in errors if not any(_name(row) == _name(one) for one in good)]
    missing = [] if rows else ["rows"]
    if not smoke:
        for key, wanted in entry.rows.items():
            present = {row.get(key) for row in rows}
            missing += [value for value in wanted if value not in present]
        if len(report.get("turns", ())) < entry.num_turns:
            missing.append(f"{entry.num_turns - len(report.get('turns', ()))} turns")
    return Found(tuple(missing), tuple(f"{_name(row)[0]}: {row['error']}"[:LINE] for row in errors))


def _name(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("arm", "model", "lr", "seed", "phase"))


def _look_at_tests(result: Path, *, smoke: bool) -> Found:
    try:
        cases = list(ET.parse(result).iter("testcase"))
    except ET.ParseError:
        return Found((f"{result.name} is no XML",))
    if not cases:
        return Found(("tests",))
    if smoke:  # nothing runs, but all is to be collected
        return Found(errors=read_tests(result).failed)
    ran = [case for case in cases if case.find("skipped") is None]
    return Found() if ran else Found(("tests that ran: all were skipped",))


class Tests(NamedTuple):
    """What a junit file says."""

    passed: int
    skipped: int
    failed: tuple[str, ...]  # each with the first line of why


def read_tests(result: Path) -> Tests:
    """Return how many tests passed, and which failed."""
    cases = list(ET.parse(result).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = []
    for case in cases:
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is not None:
                first = (found.get("message") or "").strip().splitlines() or [kind]
                failed.append(f"{case.get('classname')}::{case.get('name')}: {first[0]}"[:LINE])
    return Tests(len(cases) - len(skipped) - len(failed), len(skipped), tuple(failed))


def source_digest(script: str, root: Path = ROOT) -> str:
    """Return what tells the package and a script from other versions; a copy of the tree may have no history."""
    paths = sorted((root / "src" / "batchwright").rglob("*.py"))
    script_path = root / "benchmarks" / script
    found = hashlib.sha256()
    for path in [*paths, *([script_path] if script_path.exists() else [])]:
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


class Gpu(NamedTuple):
    """The name of a GPU, and what tells it from others of that name."""

    name: str
    unit: str


def find_gpu() -> Gpu | None:
    """Return what the driver says of the first GPU, None where there is none; torch would take seconds to say."""
    asked = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, unit = (found[0] if found else "").partition(",")
    return Gpu(name.strip(), unit.strip()) if name.strip() else None


def read_status(output: Path) -> dict[str, Row]:
    """Return what earlier commands wrote of each entry."""
    path = output / STATUS
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())["entries"]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no status of gpu_all.py ({error!r}); name another --output") from error
    return dict(entries)


def write_status(output: Path, entries: dict[str, Row], command: Row) -> None:
    """Write the status, whole or not at all."""
    unfinished = output / f"{STATUS}.unfinished"
    unfinished.write_text(json.dumps({**command, "entries": entries}, indent=1) + "\n")
    os.replace(unfinished, output / STATUS)


def pack(output: Path, archive: Path) -> None:
    """Write results, logs and status as one file, for a machine that gives few files back."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(archive.name + ".unfinished")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(output.rglob("*")):
            if path.is_file() and path not in (archive, unfinished):
                file.write(path, path.relative_to(output))
    os.replace(unfinished, archive)
