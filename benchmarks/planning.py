"""Measure planners side by side: time, memory, padding, balance and randomness.

    python benchmarks/planning.py [--num-examples 1000000] [--repeats 5] [--quick] [--large] [--fresh]

Every arm runs in a process of its own, on the same lengths, under the same budget, judged by the same
functions; all arms of a distribution are timed in turn, again and again. A peer that is not installed or fails gives a
row with the reason. Prints a Markdown table for each distribution and writes the rows with hardware and versions as
JSON. A run that was broken off continues after the last distribution it finished.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from _arms import ARMS, LARGE_ARMS, QUICK_ARMS
from _distributions import DISTRIBUTIONS, QUICK_DISTRIBUTIONS
from _measure import Task
from _report import environment, markdown
from _turns import Row, run_in_turn

_ROOT = Path(__file__).resolve().parent.parent
_LARGE = 10_000_000
# One thread for everyone: the planners are serial, and idle thread pools only add noise on shared cores.
_ENV = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
_ENV |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}


def main() -> int:
    """Run every distribution, print the tables, write the JSON; 1 if an arm of batchwright failed, else 0."""
    options = _options()
    os.environ.update(_ENV)
    output = Path(options.output)
    finished = Finished(output.with_suffix(".partial.json"), environment(_ENV), options)
    for num_examples, distribution, arms in _blocks(options):
        if not arms or finished.has(num_examples, distribution):
            continue
        tasks = [Task(arm, distribution, num_examples) for arm in arms]
        limits = {"max_seconds": options.max_seconds, "timeout_seconds": options.timeout_seconds}
        rows = []
        for row in run_in_turn(tasks, repeats=options.repeats, say=_say, **limits):
            _say(f"{distribution}: {row['arm']:<14} {_outcome(row)}")
            rows.append(row)
        finished.add(num_examples, distribution, rows)
    rows = finished.rows
    _write(output, {**finished.env, "repeats": options.repeats, "rows": rows})
    finished.path.unlink(missing_ok=True)
    print(markdown(rows, finished.env))
    return int(any("error" in row and ARMS[row["arm"]].is_ours for row in rows))


class Finished:
    """What a run has measured so far, kept in a file beside the results: the same command goes on from there."""

    def __init__(self, path: Path, env: dict[str, Any], options: argparse.Namespace) -> None:
        self.path, self.env = path, env
        self._blocks: dict[str, list[Row]] = {}
        wanted = {name: getattr(options, name) for name in ("num_examples", "repeats", "arms", "distributions")}
        self._key = {**wanted, "commit": env["commit"], "cpu": env["cpu"], "versions": env["versions"]}
        kept = json.loads(path.read_text()) if path.exists() and not options.fresh else {}
        if kept.get("key") == json.loads(json.dumps(self._key)):
            self._blocks, self.env = kept["blocks"], kept["env"]
            _say(f"continue after {', '.join(self._blocks) or 'nothing'}; --fresh begins anew")

    @property
    def rows(self) -> list[Row]:
        """Return the rows of all blocks, in the order they were measured."""
        return [row for rows in self._blocks.values() for row in rows]

    def has(self, num_examples: int, distribution: str) -> bool:
        """Return whether a block is measured."""
        return f"{distribution} {num_examples}" in self._blocks

    def add(self, num_examples: int, distribution: str, rows: list[Row]) -> None:
        """Keep the rows of a block."""
        self._blocks[f"{distribution} {num_examples}"] = rows
        _write(self.path, {"key": self._key, "env": self.env, "blocks": self._blocks})


def _blocks(options: argparse.Namespace) -> list[tuple[int, str, list[str]]]:
    """Return number of examples, distribution and arms of each table."""
    plans = [(options.num_examples, options.arms)]
    if options.large:
        plans.append((_LARGE, [name for name in options.arms if name in LARGE_ARMS]))
    return [
        (num_examples, name, [arm for arm in arms if DISTRIBUTIONS[name].takes(arm)])
        for num_examples, arms in plans
        for name in options.distributions
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _outcome(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    spread = f"{row['argsort_ratio']:6.1f} ({row['argsort_ratio_min']:.1f} to {row['argsort_ratio_max']:.1f}) sorts"
    return f"{row['plan_seconds']:8.3f} s {spread} {row['batches']:>8,} batches {row['padding']:>7.2%} padding"


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num-examples", type=int, help="lengths of each distribution (1,000,000; quick: 50,000)")
    parser.add_argument("--repeats", type=int, help="timed plans of each arm (5; quick: 1)")
    parser.add_argument("--arms", type=_names(ARMS), help=f"some of {','.join(ARMS)}")
    parser.add_argument("--distributions", type=_names(DISTRIBUTIONS), help=f"some of {','.join(DISTRIBUTIONS)}")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few examples, no slow peers")
    parser.add_argument("--large", action="store_true", help="also 10,000,000 lengths for our arms and numpy")
    parser.add_argument("--output", help="(benchmarks/results/planning.json; quick: build/planning_quick.json)")
    parser.add_argument("--max-seconds", type=float, default=60, help="an arm gets no further turn after so long")
    parser.add_argument("--timeout-seconds", type=float, default=300, help="an arm without answer is stopped")
    parser.add_argument("--fresh", action="store_true", help="forget what a run that was broken off measured")
    options = parser.parse_args()
    options.num_examples = options.num_examples or (50_000 if options.quick else 1_000_000)
    options.repeats = options.repeats or (1 if options.quick else 5)
    options.arms = options.arms or list(QUICK_ARMS if options.quick else ARMS)
    options.distributions = options.distributions or list(QUICK_DISTRIBUTIONS if options.quick else DISTRIBUTIONS)
    # The documents are written from the results in the repository, which a smoke test must not replace.
    kept = "build/planning_quick.json" if options.quick else "benchmarks/results/planning.json"
    options.output = options.output or str(_ROOT / kept)
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
