"""Results that grow from command to command: what is done is not done again, and only like runs stand together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from _gpu import Row


def data_digest(path: Path | None) -> str:
    """Return what tells a file of data from another."""
    return "drawn" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read_report(path: Path | None) -> Row:
    """Return the results of earlier commands, empty ones where there are none."""
    if path is None or not path.exists():
        return {"commands": [], "rows": []}
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise SystemExit(f"{path} cannot be read: {error}; name a file that --output wrote") from error
    if not isinstance(report, dict) or not {"commands", "rows"} <= report.keys():
        raise SystemExit(f"{path} holds no commands and rows; name a file that --output wrote")
    return report


def check_alike(report: Row, command: Row, names: Sequence[str]) -> None:
    """Refuse results whose runs cannot stand in one table with those of a command.

    Args:
        report: of earlier commands.
        command: what this one runs with.
        names: of what must be the same.
    """
    for earlier in report["commands"]:
        name = next((name for name in names if earlier.get(name) != command[name]), None)
        if name is not None:
            raise SystemExit(
                f"results differ in {name} ({earlier.get(name)}, {command[name]}), so they cannot be compared; name "
                "another --output"
            )


def check_data(path: Path | None, *, smoke: bool) -> None:
    """Refuse a file of data that is not there."""
    if path is None and not smoke:
        raise SystemExit("--data must name a file that was prepared; --smoke runs a tiny corpus on the CPU")
    if path is not None and not path.exists():
        raise SystemExit(f"{path} does not exist; name the file that was prepared")
