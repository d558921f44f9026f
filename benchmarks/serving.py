"""How long single requests take through a batcher, ours beside others, under open-loop load.

    python benchmarks/serving.py                # every arm that is installed, three passes, about half an hour
    python benchmarks/serving.py --quick        # our arms, one pass, two seconds a point
    python benchmarks/serving.py --traces DIR   # also the arrivals of real traces in DIR
    python benchmarks/serving.py --resume       # go on where an earlier command with the same output ended

Prints a table and writes results/serving.json after every point. A point is a rate; a cell holds the median of the
passes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from serving_arms import ARMS
from serving_load import Load, Stub, drive, poisson, summarise, trace

HERE = Path(__file__).parent
OURS = (
    *("ours", "ours-texts", "ours-unmeasured", "greedy", "window"),
    *("ours-constant", "greedy-constant", "ours-slow", "ours-fast"),
)
TRACES = ("azure-llm-trace-conv-2023.csv.gz", "azure-llm-trace-code-2023.csv.gz")
PACKAGES = ("batchwright", "numpy", "ray", "bentoml", "batched", "async-batcher")
FIGURES = (
    *("p50_ms", "p99_ms", "throughput", "goodput", "missed"),
    *("refusal_p50_ms", "mean_batch", "load_lag_p99_ms"),
)
Row = dict[str, Any]


def main() -> None:
    options = parse()
    rows: list[Row] = []
    if options.resume and options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    done = {(row["arm"], row["load"], row["rate"], row["pass"]) for row in rows}
    for number in range(options.passes):
        for rate in options.rates:
            for load in loads(rate, options, seed=number):
                for name in arms_for(load, options):
                    if (name, load.name, rate, number) not in done:
                        rows.append(measure(name, load, rate, number))
                        write(rows, options)
    print(markdown(summary(rows)))


def write(rows: list[Row], options: argparse.Namespace) -> None:
    if not options.quick:
        report = {"environment": environment(), "summary": summary(rows), "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rates", nargs="+", type=int, default=[200, 500, 1000, 2000, 3000, 5000])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of load at each point, the first one not counted")
    parser.add_argument("--traces", type=Path, default=HERE.parents[1] / "shared" / "data")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "serving.json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true", help="keep the points that the output already holds")
    options = parser.parse_args()
    if options.quick:
        options.arms = [name for name in options.arms if name in OURS]
        options.passes, options.seconds = 1, 2.0
    return options


def loads(rate: int, options: argparse.Namespace, seed: int) -> list[Load]:
    drawn = [poisson(rate, options.seconds, seed), poisson(rate, options.seconds, seed, constant=True)]
    paths = [] if options.quick else [options.traces / name for name in TRACES if (options.traces / name).exists()]
    return drawn + [trace(path, rate, options.seconds, seed) for path in paths]


def arms_for(load: Load, options: argparse.Namespace) -> list[str]:
    """The controls have a load of their own; real traces are for the policies and the best of the others."""
    named = [name for name in options.arms if (ARMS[name].distribution or "lognormal") == load.name]
    if load.name in ("lognormal", "constant"):
        return named
    return [name for name in options.arms if name in ("ours", "greedy", "window", "bentoml")]


def measure(name: str, load: Load, rate: int, number: int) -> Row:
    row: Row = {"arm": name, "load": load.name, "rate": rate, "pass": number}
    try:
        row |= asyncio.run(_measure(name, load))
    except ImportError as error:
        row["missing"] = str(error)
    gc.collect()
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


async def _measure(name: str, load: Load) -> Row:
    stub = Stub()
    async with ARMS[name].make(stub) as ask:
        answers = await drive(ask, load)
    return summarise(load, answers, stub.batches)


def summary(rows: list[Row]) -> list[Row]:
    """The median of each figure over the passes, and the range of what was missed."""
    table = []
    for key in dict.fromkeys((row["load"], row["arm"], row["rate"]) for row in rows):
        chosen = [row for row in rows if (row["load"], row["arm"], row["rate"]) == key]
        line: Row = dict(zip(("load", "arm", "rate"), key, strict=True))
        if "missing" in chosen[0]:
            line["missing"] = chosen[0]["missing"]
        else:
            for figure in FIGURES:
                values = [row[figure] for row in chosen if row[figure] is not None]
                line[figure] = statistics.median(values) if values else None
            line["missed_range"] = [min(row["missed"] for row in chosen), max(row["missed"] for row in chosen)]
        table.append(line)
    return table


def markdown(table: list[Row]) -> str:
    parts = []
    for load in dict.fromkeys(line["load"] for line in table):
        lines = [line for line in table if line["load"] == load]
        rates = list(dict.fromkeys(line["rate"] for line in lines))
        head = ["arm", *(f"{rate:,}/s" for rate in rates)]
        parts += [f"### {load}", "", _line(head), _line(["---"] * len(head))]
        for arm in dict.fromkeys(line["arm"] for line in lines):
            cells = {line["rate"]: _cell(line) for line in lines if line["arm"] == arm}
            parts.append(_line([ARMS[arm].title, *(cells.get(rate, "") for rate in rates)]))
        parts.append("")
    parts.append("Cells: p50 / p99 ms, mean batch, answers in time, missed (range over passes), median to a refusal.")
    return "\n".join(parts)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(line: Row) -> str:
    if "missing" in line:
        return "not installed"
    if line["p50_ms"] is None:
        return "nothing answered"
    low, high = line["missed_range"]
    refusal = "" if line["refusal_p50_ms"] is None else f", refused after {line['refusal_p50_ms']:.1f} ms"
    return (
        f"{line['p50_ms']:.1f} / {line['p99_ms']:.1f}, b {line['mean_batch']:.1f}, {line['goodput']:,.0f}/s, "
        f"missed {line['missed']:.1%} ({low:.1%}-{high:.1%}){refusal}"
    )


def environment() -> Row:
    return {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
