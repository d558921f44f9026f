"""Measure planners side by side: time, memory, padding, balance and randomness.

    python benchmarks/planning.py [--num-examples 1000000] [--repeats 3] [--quick] [--large]

Every arm runs in a process of its own, on the same lengths, under the same budget, judged by the same
functions. A peer that is not installed or fails gives a row with the reason. Prints a Markdown table for each
distribution and writes the rows with hardware and versions as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _arms import ARMS, LARGE_ARMS, QUICK_ARMS
from _distributions import DISTRIBUTIONS, QUICK_DISTRIBUTIONS
from _measure import Task, measure
from _report import environment, markdown

_ROOT = Path(__file__).resolve().parent.parent
_LARGE = 10_000_000
# One thread for everyone: the planners are serial, and idle thread pools only add noise on shared cores.
_ENV = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
_ENV |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}


def main() -> int:
    """Run every task, print the tables, write the JSON; 1 if an arm of batchwright failed, else 0."""
    options = _options()
    if options.task:
        return _work(Task(**json.loads(options.task)), Path(options.output))
    rows, tasks = [], _tasks(options)
    for number, task in enumerate(tasks, start=1):
        print(
            f"[{number:>3}/{len(tasks)}] {task.distribution:<8} {task.arm:<14}",
            end="",
            file=sys.stderr,
            flush=True,
        )
        rows.append(_run(task, options.timeout_seconds))
        print(f" {_outcome(rows[-1])}", file=sys.stderr)
    env = environment(_ENV)
    _write(Path(options.output), {**env, "repeats": options.repeats, "rows": rows})
    print(markdown(rows, env))
    return int(any("error" in row and ARMS[row["arm"]].is_ours for row in rows))


def _tasks(options: argparse.Namespace) -> list[Task]:
    plans = [(options.num_examples, options.arms)]
    if options.large:
        plans.append((_LARGE, [name for name in options.arms if name in LARGE_ARMS]))
    return [
        Task(arm, distribution, num_examples, options.repeats, options.max_seconds)
        for num_examples, arms in plans
        for distribution in options.distributions
        for arm in arms
    ]


def _run(task: Task, timeout_seconds: float) -> dict[str, Any]:
    """Measure in a fresh process; whatever happens there becomes a row."""
    arm = ARMS[task.arm]
    row = {
        "arm": task.arm,
        "title": arm.title,
        "distribution": task.distribution,
        "requested": task.num_examples,
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--task", json.dumps(asdict(task)), "--output", str(output)]
        env = {**os.environ, **_ENV}
        try:
            done = subprocess.run(command, env=env, capture_output=True, timeout=timeout_seconds, check=False)
        except subprocess.TimeoutExpired:
            return {**row, "error": f"stopped after {timeout_seconds:g} s"}
        if not output.exists():
            return {**row, "error": f"its process ended with status {done.returncode}"}
        return {**row, **json.loads(output.read_text())}


def _work(task: Task, output: Path) -> int:
    """Measure in this process and leave the figures, or the reason there are none, in a file."""
    try:
        result = measure(task)
    except ModuleNotFoundError as error:
        result = {"error": f"{error.name} is not installed"}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    output.write_text(json.dumps(result))
    return 0


def _outcome(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    return f"{row['plan_seconds']:8.3f} s {row['batches']:>8,} batches {row['padding']:>7.2%} padding"


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num-examples", type=int, help="lengths of each distribution (1,000,000; quick: 50,000)")
    parser.add_argument("--repeats", type=int, help="timed plans of each arm (3; quick: 1)")
    parser.add_argument("--arms", type=_names(ARMS), help=f"some of {','.join(ARMS)}")
    parser.add_argument("--distributions", type=_names(DISTRIBUTIONS), help=f"some of {','.join(DISTRIBUTIONS)}")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few examples, no slow peers")
    parser.add_argument("--large", action="store_true", help="also 10,000,000 lengths for our arms and numpy")
    parser.add_argument("--output", default=str(_ROOT / "benchmarks" / "results" / "planning.json"))
    parser.add_argument("--max-seconds", type=float, default=60, help="no further repeat after so long")
    parser.add_argument("--timeout-seconds", type=float, default=600, help="an arm is stopped after so long")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.num_examples = options.num_examples or (50_000 if options.quick else 1_000_000)
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.arms = options.arms or list(QUICK_ARMS if options.quick else ARMS)
    options.distributions = options.distributions or list(QUICK_DISTRIBUTIONS if options.quick else DISTRIBUTIONS)
    return options


def _names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
