"""Build a sampler from known lengths with dynabatch and with the module of the same names here.

    .venv-bench/bin/python benchmarks/dynabatch_planning.py [--num-examples 100000] [--repeats 3]

Each arm has a process of its own, one thread, the same lists of lengths and the same arguments, which are the defaults
with ``batch_size=32``. The clock runs only around the constructor. The median counts; the JSON holds every time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _distributions import DISTRIBUTIONS
from _report import environment

_ROOT = Path(__file__).resolve().parent.parent
_MODULES = {"batchwright": "batchwright.integrations.dynabatch", "dynabatch": "dynabatch"}
_ENV = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
_BATCH_SIZE = 32


def main() -> int:
    """Measure both arms, print the ratio, write the JSON."""
    options = _options()
    if options.arm:
        print(json.dumps(_measure(options.arm, options.num_examples, options.repeats)))
        return 0
    rows = [_run(arm, options) for arm in _MODULES]
    ratios = {f"{kind}_ratio": _ratio(rows, f"{kind}_seconds") for kind in ("wall", "cpu")}
    result = {**environment(_ENV), "num_examples": options.num_examples, **ratios, "rows": rows}
    Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(_line(row))
    for name, ratio in ratios.items():
        print(f"{name}:", "unknown" if ratio is None else f"{ratio:,.0f}")
    return 0


def _ratio(rows: list[dict[str, Any]], name: str) -> float | None:
    """Return how many times as long dynabatch takes; None where an arm has failed."""
    seconds = {row["arm"]: statistics.median(row[name]) for row in rows if "error" not in row}
    return seconds["dynabatch"] / seconds["batchwright"] if len(seconds) == 2 else None


def _measure(arm: str, num_examples: int, repeats: int) -> dict[str, Any]:
    """Build the sampler some times in this process."""
    module = importlib.import_module(_MODULES[arm])
    tokens = DISTRIBUTIONS["short"].lengths(num_examples).tolist()
    # dynabatch asks for words and characters too: 3 words and 16 characters for 4 tokens.
    given = {"token_lengths": tokens, "word_lengths": [-(-3 * n // 4) for n in tokens]}
    given["char_lengths"] = [4 * n for n in tokens]
    texts = [""] * num_examples
    small = {name: lengths[:200] for name, lengths in given.items()}
    module.dynabatch_sampler(texts[:200], None, _BATCH_SIZE, **small)  # loads what is loaded once
    wall, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        sampler = module.dynabatch_sampler(texts, None, _BATCH_SIZE, **given)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    return {"arm": arm, "wall_seconds": wall, "cpu_seconds": cpu, **_describe(sampler, tokens)}


def _describe(sampler: Any, tokens: list[int]) -> dict[str, Any]:
    batches = list(sampler)
    padded = sum(len(batch) * max(tokens[index] for index in batch) for batch in batches)
    assert sorted(index for batch in batches for index in batch) == list(range(len(tokens)))
    sizes = [len(batch) for batch in batches]
    return {"num_batches": len(batches), "largest": max(sizes), "padding": 1 - sum(tokens) / padded}


def _run(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a fresh process; whatever happens there becomes a row."""
    command = [sys.executable, __file__, "--arm", arm, "--num-examples", str(options.num_examples)]
    command += ["--repeats", str(options.repeats)]
    done = subprocess.run(command, env={**os.environ, **_ENV}, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"arm": arm, "error": done.stderr.strip().splitlines()[-1][:200]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['arm']:<12} {row['error']}"
    wall, cpu = statistics.median(row["wall_seconds"]), statistics.median(row["cpu_seconds"])
    figures = f"{wall:9.4f} s wall {cpu:9.4f} s CPU {row['num_batches']:>7,} batches {row['padding']:7.2%} padding"
    return f"{row['arm']:<12} {figures}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num-examples", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3, help="timed samplers of each arm")
    parser.add_argument("--output", default=str(_ROOT / "benchmarks" / "results" / "dynabatch_planning.json"))
    parser.add_argument("--arm", choices=list(_MODULES), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
