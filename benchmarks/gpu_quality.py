"""Validation loss against seconds of training: the same model, data and seconds for every arm.

    python benchmarks/gpu_quality.py --prepare FOLDER --task translation --data translation.npz   # needs no GPU
    python benchmarks/gpu_quality.py --data translation.npz --output quality.json --plot quality.svg
    python benchmarks/gpu_quality.py --report quality.json --task translation --plot quality.svg   # only table and plot
    python benchmarks/gpu_quality.py --smoke

Tasks: ``translation`` (Python documentation, English to Spanish; M2M100, 6 + 6 layers, width 512) and ``decoder``
(instructions; Llama, 110 million parameters), both from scratch, bf16 autocast, fused AdamW, gradients clipped at 1,
SDPA without cuDNN. The learning rate rises over 5 % of the time and falls to 0, linear in time; every arm gets the same
grid of rates, and counts at its best one. Where results lack some of these runs, table and plot say so. Capture and
compilation are inside the clock. Batches are made and pinned before the clock starts, for every arm alike, as workers
would make them; copies to the device count. The clock stands still while the validation loss is taken. Arms have names
such as ``graphs-16-8192``; ``quality/arms.py`` lists them.

A run is one arm, learning rate and seed. Finished runs are kept in ``--output`` after each of them and not run again;
results of other seconds or data are refused. A run that diverged never counts as the best.
A command stops before a run that would not end within ``--budget-seconds``. Each command runs the control first, so
that two commands can be compared. Arms in ``--leading`` have all seeds, at their best learning rate. ``--runs`` names
the runs one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import os
import pstats
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

# Compilation that a cache shortens would say nothing about its cost.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import numpy as np
from _gpu import GIB, Device, Row, make_parser, write
from _quality.arms import Arm
from _quality.chart import draw
from _quality.corpus import END, Corpus, Texts
from _quality.results import (
    Unit,
    best_rate,
    chart_series,
    check_alike,
    has_diverged,
    rates_note,
    read_rows,
    render,
    summarize,
)
from _quality.training import Clock, Pace, Run, Settings, warm_device
from _resuming import data_digest

Number = TypeVar("Number", int, float)
MARKS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 21, 24, 28)
ARMS = {
    "translation": (
        "graphs-16-8192,graphs-32-4096,dynabatch-16,grouped-128,buckets-16-8192,max_tokens-8192,dynabatch-64,grouped-32,"
        "group_by_length-128,group_by_length-32,batch_rebalance-64-4,fixed-16,graphs-32-8192,compile_dynamic-16-8192,"
        "compile_dynamic_apart-16-8192"
    ),
    "decoder": (
        "graphs-16-4096,max_tokens-16384,grouped-32,fixed-32,graphs-16-8192,max_tokens-8192,dynabatch-64,buckets-16-4096,"
        "group_by_length-32,dynabatch-16,fixed-16,batch_rebalance-64-4,compile_dynamic-16-4096"
    ),
}
LEADING = {
    "translation": "graphs-16-8192,graphs-32-4096,dynabatch-16,grouped-128",
    "decoder": "graphs-16-4096,max_tokens-16384,grouped-32",
}
CONTROL = "max_tokens-8192"
# Without torch.compile, which takes a minute on a CPU.
SMOKE_ARMS = (
    "graphs-2-128,buckets-2-128,max_tokens-128,fixed-4,grouped-8,group_by_length-8,batch_rebalance-8-2,dynabatch-4"
)
EXTRA_SECONDS = {"compile": 120, "compile_apart": 240, "compile_dynamic": 90, "compile_dynamic_apart": 120}


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, cap_gib=120.0)
    parser.add_argument("--task", choices=("translation", "decoder"), default=None, help="(default: that of the data)")
    parser.add_argument("--data", type=Path, help="the file that --prepare wrote")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make --data from a folder of corpora, stop")
    parser.add_argument("--lengths", type=Path, help="with --prepare: lengths of 40,000 pairs for gpu_training.py")
    parser.add_argument("--arms", help="names with commas, the most important first")
    parser.add_argument("--lrs", default="1e-3,5e-4", help="the grid of learning rates (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="(default: %(default)s)")
    parser.add_argument("--leading", help="arms that have all seeds; others have the first")
    parser.add_argument("--runs", help="ARM:RATE:SEED with commas, run in this order instead of all of the above")
    parser.add_argument("--control", default=CONTROL, help="arm that every command runs first; none for no control")
    parser.add_argument("--seconds", type=float, default=28.0, help="of training (default: %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=560.0, help="of the command (default: %(default)s)")
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="results whose runs are not run again")
    parser.add_argument("--report", type=Path, nargs="*", help="only print the table of these results, and draw")
    parser.add_argument("--plot", type=Path, help="an SVG file of loss against seconds")
    parser.add_argument("--profile", metavar="ARM", help="profile the host in one arm's steps, stop")
    options = parser.parse_args()
    if not options.seconds > 0:
        raise SystemExit(f"--seconds must be above 0, got {options.seconds:g}")
    if options.smoke:
        options.seconds, options.task = min(options.seconds, 0.1), options.task or "translation"
        options.lrs, options.seeds, options.arms = "1e-3", "0", options.arms or SMOKE_ARMS
        options.control = "none"
    numbers("--lrs", options.lrs, float)
    numbers("--seeds", options.seeds, int)
    if options.runs is not None:
        options.control, options.arms = "none", ",".join(dict.fromkeys(arm for arm, _, _ in runs_of(options)))
    return options


def runs_of(options: argparse.Namespace) -> list[tuple[str, float, int]]:
    """Return the arm, rate and seed of each of ``--runs``."""
    found = [part.split(":") for part in options.runs.split(",")]
    if any(len(part) != 3 for part in found):
        raise SystemExit(f"--runs must be ARM:RATE:SEED with commas between them, got {options.runs!r}")
    arms, rates, seeds = (",".join(column) for column in zip(*found, strict=True))
    return list(zip(arms.split(","), numbers("--runs", rates, float), numbers("--runs", seeds, int), strict=True))


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """Return the numbers of an option."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise SystemExit(f"{option} must be numbers with commas between them, got {text!r}") from None


def arms_of(options: argparse.Namespace, task: str) -> list[str]:
    """Return the names of the arms; a wrong name is better found before the first run."""
    arms = (options.arms or ARMS[task]).split(",")
    for arm in arms if options.control == "none" else [*arms, options.control]:
        Arm.parse(arm)
    return arms


def drawn_corpus(task: str, *, with_peers: bool = True) -> Corpus:
    """Return a tiny corpus of random tokens, to see that everything runs."""
    from _quality.preparing import add_orders

    rng = np.random.default_rng(0)
    columns = tuple(
        Texts.of([[*rng.integers(4, 60, rng.integers(2, 20)), END] for _ in range(220)])
        for _ in range(2 if task == "translation" else 1)
    )
    corpus = Corpus(task, columns, 64, 20)
    words = corpus.lengths[:, 0]
    return add_orders(corpus, words, 5 * words, small=True) if with_peers else corpus


def units(options: argparse.Namespace, task: str, rows: list[Row]) -> Iterator[tuple[Unit, bool]]:
    """Yield the runs in the order of their importance, and whether a run is the control of this command."""
    arms = arms_of(options, task)
    if options.runs is not None:
        yield from ((Unit(task, *run), False) for run in runs_of(options))
        return
    rates, seeds = numbers("--lrs", options.lrs, float), numbers("--seeds", options.seeds, int)
    if options.control != "none":
        yield Unit(task, options.control, rates[0], seeds[0]), True
    leading = (options.leading or LEADING[task]).split(",")
    # Compilation takes minutes, so these come last.
    for is_compiled in (False, True):
        some = [arm for arm in arms if Arm.parse(arm).is_compiled == is_compiled]
        yield from ((Unit(task, arm, rate, seeds[0]), False) for rate in rates for arm in some)
        for seed in seeds[1:]:
            for arm in some:
                rate = best_rate(rows, task, arm)
                if arm in leading and rate is not None:
                    yield Unit(task, arm, rate, seed), False


def run_all(device: Device, corpus: Corpus, options: argparse.Namespace, started: float) -> list[Row]:
    """Run what is not in the results yet, as long as the command's time suffices, and return all rows."""
    arms_of(options, corpus.task)
    has_results = options.output is not None and options.output.exists()
    commands, rows = read_rows([*options.resume, *([options.output] if has_results else [])])
    made_with = {"seconds_a_run": options.seconds, "data": data_digest(options.data), "smoke": options.smoke}
    check_alike(commands, rows, corpus.task, made_with)
    command = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    commands.append({"id": command, **made_with, **device.describe()})
    settings = make_settings(options)
    warm(device, corpus, settings)
    overhead = 8.0
    for unit, is_control in units(options, corpus.task, rows):
        if not is_control and any(unit.is_of(row) for row in rows):
            continue
        expected = options.seconds + overhead + EXTRA_SECONDS.get(Arm.parse(unit.arm).kind, 0)
        if time.perf_counter() - started + expected > options.budget_seconds:
            print(f"left for another command: {unit}", flush=True)
            continue
        start = time.perf_counter()
        row = {
            "command": command,
            "is_control": is_control,
            **unit._asdict(),
            **run_one(unit, corpus, device, settings),
        }
        row["wall_seconds"] = time.perf_counter() - start
        if "error" not in row and not Arm.parse(unit.arm).is_compiled:
            overhead = max(overhead, row["wall_seconds"] - row["seconds"])
        rows.append(row)
        write(options.output, {"commands": commands, "rows": rows})
        print(_line(row), flush=True)
    return rows


def make_settings(options: argparse.Namespace) -> Settings:
    marks = tuple(options.seconds * mark / MARKS[-1] for mark in (MARKS[-1:] if options.smoke else MARKS))
    if options.smoke:
        return Settings(options.seconds, marks, True, "eager", least_updates=12)
    return Settings(options.seconds, marks, False)


def warm(device: Device, corpus: Corpus, settings: Settings) -> None:
    small = settings._replace(small=True, seconds=0.2)
    warm_device(device, lambda: Run(Arm.parse("fixed-16"), corpus, device, small, lr=1e-3, seed=0))
    device.free()


def run_one(unit: Unit, corpus: Corpus, device: Device, settings: Settings) -> Row:
    """Return the figures of a run, or the error that ended it: the runs after it are still worth their time."""
    try:
        return Run(Arm.parse(unit.arm), corpus, device, settings, lr=unit.lr, seed=unit.seed).run()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        device.free()


def _line(row: Row) -> str:
    name = f"{row['task']} {row['arm']} lr {row['lr']:g} seed {row['seed']}"
    if "error" in row:
        return f"{name}: failed"
    curve = " ".join(f"{x:.1f}s {y:.2f}" for x, y in row["curve"])
    graphs = "" if row.get("graph_summary") is None else f"\n{row['graph_summary']}"
    return (
        f"{name}: loss {row['loss']:.3f}, {row['updates']} updates, {row['tokens_per_second']:,.0f} tokens/s, "
        f"padding {row['padding']:.1%}, wall {row['wall_seconds']:.0f} s; {curve}{graphs}"
    )


def profile(device: Device, corpus: Corpus, options: argparse.Namespace) -> None:
    """Print where the host spends the time of an arm's updates; the last third of the seconds runs under a profiler."""
    settings = make_settings(options)
    warm(device, corpus, settings)
    run = Run(Arm.parse(options.profile), corpus, device, settings, lr=5e-4, seed=0)
    clock, pace, profiler = Clock(device), Pace(device), cProfile.Profile()
    clock.start()
    plain: list[tuple[float, float]] = []
    number = profiled = 0
    while clock.seconds < options.seconds:
        is_late = clock.seconds > 2 * options.seconds / 3
        if is_late and not profiled:
            profiler.enable()
        start = time.perf_counter()
        run.step(number, clock)
        host = time.perf_counter() - start
        pace.wait()
        number, profiled = number + 1, profiled + is_late
        if not is_late:
            plain.append((host, time.perf_counter() - start))
    profiler.disable()
    in_step, whole = np.median(np.array(plain[len(plain) // 2 :]), axis=0) * 1e3
    print(f"{options.profile}: {number} updates, median {in_step:.2f} ms in the step, {whole:.2f} ms with its wait")
    print(f"{profiled} updates under the profiler, times in ms per update:")
    found = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for place, title in ((3, "with what it calls"), (2, "by itself")):
        print(f"--- {title}")
        for (file, line, name), figures in sorted(found.items(), key=lambda item: -item[1][place])[:25]:
            where, share = "/".join(Path(file).parts[-2:]), figures[place] / max(1, profiled) * 1e3
            print(f"{share:8.3f} ms {figures[1] / max(1, profiled):7.1f} calls  {where}:{line} {name}")


def report(rows: list[Row], tasks: list[str], plot: Path | None) -> None:
    """Print a table for each task, and draw that of the first."""
    for task in tasks:
        print(render(rows, task))
    if plot is None:
        return
    series = chart_series(rows, tasks[0])
    if not series:
        print(f"{plot} is not drawn, as no run of {tasks[0]} has ended with a loss")
        return
    seconds = max(row["seconds"] for row in rows if row["task"] == tasks[0] and "error" not in row)
    note = f"{seconds:.0f} seconds a run; {rates_note(rows, tasks[0])}; capture inside the clock"
    diverged = [row["arm"] for row in summarize(rows, tasks[0]) if has_diverged(row)]
    if diverged:
        note += f"; not drawn, as diverged: {', '.join(diverged)}"
    draw(plot, series, title=f"Validation loss against seconds of training: {tasks[0]}", note=note)


def prepare(options: argparse.Namespace) -> None:
    from _quality.preparing import prepare as prepare_corpus
    from _quality.preparing import prepare_lengths

    if options.lengths is not None:
        np.save(options.lengths, prepare_lengths(options.prepare))
    if options.data is not None:
        corpus = prepare_corpus(options.task or "translation", options.prepare)
        corpus.save(options.data)
        medians = np.median(corpus.lengths, axis=0).tolist()
        print(f"{len(corpus.lengths):,} texts, median {medians} tokens, {options.data.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    started = time.perf_counter()
    options = parse()
    if options.prepare is not None:
        prepare(options)
        return
    if options.report is not None:
        commands, rows = read_rows(options.report)
        tasks = [task for task in dict.fromkeys(row["task"] for row in rows) if options.task in (None, task)]
        if not tasks:
            raise SystemExit(f"{', '.join(map(str, options.report))} has no run of {options.task or 'any task'}")
        for task in tasks:
            check_alike(commands, rows, task)
        report(rows, tasks, options.plot)
        return
    if options.data is None and not options.smoke:
        raise SystemExit("--data must name the file that --prepare wrote; --smoke runs a tiny corpus on the CPU")
    if options.data is not None and not options.data.exists():
        raise SystemExit(f"{options.data} does not exist; name the file that --prepare wrote")
    if options.data is None:
        arms = [Arm.parse(name) for name in options.arms.split(",")]
        corpus = drawn_corpus(options.task, with_peers=any(arm.is_of_others for arm in arms))
    else:
        corpus = Corpus.load(options.data)
    device = Device(options.cap_gib * GIB, smoke=options.smoke)
    # A trial run does not count live tensors: that would take most of its time, and compilation cannot run under it.
    with contextlib.nullcontext() if options.smoke else device:
        if options.profile:
            profile(device, corpus, options)
            return
        rows = run_all(device, corpus, options, started)
    report(rows, [corpus.task], options.plot)


if __name__ == "__main__":
    main()
