"""Time to a loss, on a CPU: strategies that choose the batch size against the best of a sweep of constant sizes.

    python benchmarks/quality.py                      # three tasks, seconds of the processor
    python benchmarks/quality.py --clock graphs       # seconds of a stated GPU that is bound by launches: repeatable
    python benchmarks/quality.py --report             # only the tables and the plot of what was run

Every run trains for some seconds, with a learning rate that rises over 5 % of them and then falls to 0, so that each
strategy has the schedule that fits its time. The best constant is chosen from 6 sizes × 3 rates, and trained again with
other seeds: its loss after T seconds is the target. A strategy, at the one rate and base size of the task, is then run
for shorter or longer times until it reaches that loss. Everything that a strategy costs is inside the clock; validation
is not. A command can be ended at any time, and the next one goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from _cpu_quality.chart import draw
from _cpu_quality.protocol import LADDER, SIZES, Plan, wanted
from _cpu_quality.results import render, summarize
from _cpu_quality.strategies import STRATEGIES
from _cpu_quality.tasks import TASKS
from _cpu_quality.training import Row, Unit, run
from _gpu import write

RESULTS = Path(__file__).parent / "results" / "quality.json"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", default="cpu", help="cpu, graphs, eager or FIXED_MS,PER_EXAMPLE_MS (%(default)s)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="(default: %(default)s)")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="that are compared (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=3600.0, help="no run starts later (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all horizons; below 1 only to see that it runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="(default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="only print the tables, and draw")
    parser.add_argument("--plot", type=Path, help="an SVG file (default: beside --output)")
    parser.add_argument("--smoke", action="store_true", help="two sizes, one seed, tiny horizons: to see that it runs")
    options = parser.parse_args(arguments)
    for task in options.tasks.split(","):
        if task not in TASKS:
            raise SystemExit(f"{task!r} is no task; tasks are {', '.join(TASKS)}")
    if options.smoke:
        options.scale, options.seeds = min(options.scale, 0.02), 1
    return options


def plans(options: argparse.Namespace) -> list[Plan]:
    """Return what is compared, one plan per task."""
    names = tuple(name for name in options.strategies.split(",") if name)
    sizes, ladder = ((16, 64), (1.0,)) if options.smoke else (SIZES, LADDER)
    seeds = tuple(range(options.seeds))
    return [Plan(options.clock, task, names, seeds, sizes, ladder) for task in options.tasks.split(",")]


def read(path: Path, made_with: Row) -> Row:
    """Return the results so far; those of other horizons or another machine cannot be continued."""
    if not path.exists():
        return {**made_with, "commands": [], "rows": []}
    try:
        found: Row = json.loads(path.read_text())
    except ValueError as error:
        raise SystemExit(f"{path} cannot be read: {error}; name another --output") from error
    differing = [name for name, value in made_with.items() if found.get(name) != value]
    if differing:
        words = ", ".join(f"{name} {found.get(name)} and not {made_with[name]}" for name in differing)
        raise SystemExit(f"{path} was made with {words}, so its runs cannot be continued; name another --output")
    return found


def run_all(todo: list[Plan], options: argparse.Namespace, results: Row, started: float) -> None:
    """Make the runs that are missing, several at a time, and write the results after each."""
    rows: list[Row] = results["rows"]
    rows[:] = [row for row in rows if "error" not in row]  # what failed is tried again
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        running: dict[Future[Row], Unit] = {}
        while True:
            for unit in missing(todo, rows, list(running.values())):
                if len(running) >= options.workers or time.perf_counter() - started > options.budget_seconds:
                    break
                running[pool.submit(attempt, unit, options.scale)] = unit
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                row = {**running.pop(future)._asdict(), **future.result()}
                rows.append(row)
                write(options.output, results)
                print(line(row, len(rows), time.perf_counter() - started), flush=True)


def missing(todo: list[Plan], rows: list[Row], running: list[Unit]) -> Iterator[Unit]:
    """Yield runs that are neither done nor under way; one that failed is not tried twice in a command."""
    done = {tuple(row[name] for name in Unit._fields) for row in rows}
    for plan in todo:
        yield from (unit for unit in wanted(plan, rows) if tuple(unit) not in done and unit not in running)


def attempt(unit: Unit, scale: float) -> Row:
    """Return the figures of a run, or the error that ended it: the runs after it are still worth their time."""
    began = time.perf_counter()
    try:
        found = run(unit, scale)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    return {**found, "wall_seconds": time.perf_counter() - began}


def line(row: Row, num: int, seconds: float) -> str:
    name = " ".join(str(row[name]) for name in Unit._fields)
    name = f"{seconds:5.0f} s, run {num}: {name}"
    if "error" in row:
        return f"{name}: failed: {row['error']}"
    return f"{name}: loss {row['loss']:.4f}, {row['updates']} updates, mean size {row['mean_size']:.0f}"


def plot(todo: list[Plan], rows: list[Row], path: Path) -> None:
    """Draw the tasks whose best constant is known."""
    found = [(f"{plan.task}: {TASKS[plan.task].title}", summarize(plan, rows)) for plan in todo]
    found = [(title, table) for title, table in found if table]
    if found:
        how = f"clock {todo[0].clock}; {len(todo[0].seeds)} seeds, 95 % intervals"
        draw(path, found, note=f"1 is the best constant's time, the dashed line is 1.1; {how}")


def main(arguments: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    options = parse(arguments)
    made_with = {"scale": options.scale, "smoke": options.smoke, "seconds": {n: t.seconds for n, t in TASKS.items()}}
    results = read(options.output, made_with)
    todo = plans(options)
    if not options.report:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
        results["commands"].append({"date": now, "clock": options.clock, "workers": options.workers, **machine})
        run_all(todo, options, results, started)
    for plan in todo:
        print(render(plan, results["rows"]), end="\n\n")
    plot(todo, results["rows"], options.plot or options.output.with_name(f"{options.output.stem}_{options.clock}.svg"))


if __name__ == "__main__":
    main()
