"""One measurement after the other, as many as the time allows; what is complete is not run again."""

from __future__ import annotations

import datetime
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from .entries import ROOT, Entry, command_of
from .results import Gpu, Row, look, pack, read_status, source_digest, write_status

# A command that is told to end has this long, and what it wrote must still be packed.
GRACE_SECONDS = 15.0
TAIL_LINES, TAIL_CHARACTERS = 16, 1_600
SMOKE_SECONDS = 900.0


class Ended(NamedTuple):
    """How a command ended: its status, None where it was cut off, and the seconds that it took."""

    status: int | None
    seconds: float


Runner = Callable[[list[str], float, Path], Ended]


@final
@dataclass(frozen=True)
class Setting:
    """Where and on what measurements run.

    Args:
        output: the folder of results, logs and status.
        data: the folder of prepared data.
        gpu: what they run on.
        budget_seconds: of this command.
        archive: a file into which the folder is packed after every measurement.
        smoke: run the smallest forms, on the CPU.
    """

    output: Path
    data: Path
    gpu: Gpu
    budget_seconds: float
    archive: Path | None = None
    smoke: bool = False


def state_of(entry: Entry, setting: Setting, status: dict[str, Row]) -> str:
    """Return ``done``, ``failed``, ``partial``, ``cut off``, or ``new`` for this kind of machine and this source.

    What is not complete is new on another machine of the kind: hosts differ, and rows of one file are compared.
    """
    row = status.get(entry.name)
    if row is None or (row["machine"], row["source"]) != (setting.gpu.name, source_digest(entry.script)):
        return "new"
    if row["state"] != "done" and row["unit"] != setting.gpu.unit:
        return "new"
    if row["state"] == "done" and look(entry, setting.output / entry.result, smoke=setting.smoke).missing:
        return "new"  # its file is gone
    return str(row["state"])


def pending(entries: Sequence[Entry], setting: Setting, status: dict[str, Row]) -> list[Entry]:
    """Return what is not done, in the order of the table; what failed here before comes after the others."""
    states = {entry.name: state_of(entry, setting, status) for entry in entries}
    left = [entry for entry in entries if states[entry.name] != "done"]
    return sorted(left, key=lambda entry: states[entry.name] == "failed")


def run_all(
    entries: Sequence[Entry],
    setting: Setting,
    *,
    run: Runner,
    clock: Callable[[], float] = time.perf_counter,
    started: float | None = None,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> dict[str, Row]:
    """Run what fits into the time, and return the status of all entries that were ever run.

    Args:
        entries: in the order of their importance.
        setting: where they run.
        run: runs a command line for at most some seconds, with its output in a file.
        clock: seconds.
        started: when the budget began, by the clock.
        say: prints a line.
    """
    started = clock() if started is None else started
    (setting.output / "logs").mkdir(parents=True, exist_ok=True)
    status = read_status(setting.output)
    about: Row = {"machine": setting.gpu.name, "budget_seconds": setting.budget_seconds}
    for entry in pending(entries, setting, status):
        left = setting.budget_seconds - (clock() - started) - GRACE_SECONDS
        if left < entry.least and not setting.smoke:
            say(f"-- {entry.name}: left for another command, {left:.0f} s are left and it needs {entry.least}")
            continue
        # What hangs must not take the time of the others.
        limit = SMOKE_SECONDS if setting.smoke else min(left, 2.0 * entry.seconds + 60)
        if state_of(entry, setting, status) == "new":
            _set_aside(setting.output, entry)
        status[entry.name] = row = _run_one(entry, setting, limit, run)
        write_status(setting.output, status, about)
        if setting.archive is not None:
            pack(setting.output, setting.archive)
        say(_line(entry, row, setting.output))
    return status


def _set_aside(output: Path, entry: Entry) -> None:
    """Move the result of another machine or source away: a script would go on with it."""
    result = output / entry.result
    if result.exists():
        (output / "earlier").mkdir(exist_ok=True)
        number = sum(1 for _ in (output / "earlier").iterdir())
        os.replace(result, output / "earlier" / f"{number:03d}_{result.name}")


def _run_one(entry: Entry, setting: Setting, limit: float, run: Runner) -> Row:
    result, log = setting.output / entry.result, setting.output / "logs" / f"{entry.name}.log"
    command = command_of(entry, result, setting.data, seconds=limit - 5, smoke=setting.smoke)
    ended = run(command, limit, log)
    found = look(entry, result, smoke=setting.smoke)
    return {
        "state": _state(entry, ended, bool(found.missing), bool(found.errors)),
        "machine": setting.gpu.name,
        "unit": setting.gpu.unit,
        "source": source_digest(entry.script),
        "seconds": round(ended.seconds, 1),
        "limit_seconds": round(limit, 1),
        "status": ended.status,
        "missing": list(found.missing),
        "errors": list(found.errors),
        "command": shlex.join(command),
        "ended": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _state(entry: Entry, ended: Ended, is_missing: bool, has_errors: bool) -> str:
    # pytest ends with 1 where tests failed: that is a result too.
    is_good = ended.status in ((0, 1) if entry.is_tests else (0,))
    if not is_missing and not has_errors and (is_good or (ended.status is None and not entry.is_tests)):
        return "done"
    if ended.status is None:
        return "cut off"
    return "partial" if is_good and not has_errors else "failed"


def _line(entry: Entry, row: Row, output: Path) -> str:
    said = [f"== {entry.name}: {row['state']} after {row['seconds']:.0f} s (expected {entry.seconds})"]
    said += [f"   lacks {', '.join(row['missing'])}"] if row["missing"] else []
    said += [f"   {error}" for error in row["errors"]]
    return "\n".join([*said, tail(output / "logs" / f"{entry.name}.log")])


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return "\n".join(f"   {line}" for line in lines[-TAIL_LINES:])[-TAIL_CHARACTERS:]


def environment(data: Path, *, smoke: bool) -> dict[str, str]:
    """Return the variables that commands run with: this source before others, and the carried packages after it."""
    paths = [str(ROOT / "src"), str(data / "packages"), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Packages of a GPU machine may bring plugins of pytest, which are no part of these tests.
    found |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return found | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if smoke else {})


def run_process(command: list[str], limit: float, log: Path, *, variables: dict[str, str]) -> Ended:
    """Run a command line from the root of the repository; after its time it is told to end, and then ended."""
    start = time.perf_counter()
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            # A group, and no session: what ends this command is to end its workers too.
            preexec_fn=os.setpgrp,
        )  # fmt: skip
        try:
            status: int | None = process.wait(max(1.0, limit))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    return Ended(status, time.perf_counter() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its workers: pytest writes what it found when it is interrupted."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS / 2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
