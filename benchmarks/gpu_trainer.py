"""Training through transformers' Trainer: fixed sizes, grouped, dynabatch's trainer, ``adaptive(Trainer)``.

    OMP_NUM_THREADS=1 python benchmarks/gpu_trainer.py --prepare FOLDER --data pairs.npz   # 40,000 pairs; needs no GPU
    python benchmarks/gpu_trainer.py --data pairs.npz --output benchmarks/results/gpu_trainer.json
    python benchmarks/gpu_trainer.py --report benchmarks/results/gpu_trainer.json
    python benchmarks/gpu_trainer.py --smoke

One model (the shape of NLLB-600M, random weights, the same for every arm), one data set, one collator, 4 workers, bf16,
fused AdamW, gradients clipped at 1, a constant learning rate after 20 updates of warm-up. The allocator is capped at
32 GiB to stand for a smaller card; cuDNN attention is off, as it plans anew for every shape. Arms have names such as
``dynabatch-10``; ``_trainer_arms.py`` lists them.

Every arm trains for the same seconds. The clock starts with the first update: what ``train`` does before it, such as
calibration, is ``startup s``, and a time to a loss is given without and with it. Capture of graphs is inside the clock.
The clock stands still while the loss of the held-out pairs is taken. Peaks leave that loss and calibration out; what
calibration used itself is under ``before`` in the results. An arm counts at its best learning rate. A budget that an
arm found is known to it at its other rates, as in a second start; ``startup s`` is the longest of an arm's starts.

dynabatch plans where it is installed, with ``--prepare``, and its batches are kept with the data. Its own trainer runs
them if the package can be imported, also without the packages that only its planner needs; otherwise the plain Trainer
does, and ``ran`` says so in the results.

Results are written after every arm; arms that stand in ``--output`` are not run again, and results of other seconds or
data are refused. A command stops before an arm that would not end within ``--budget-seconds``.
"""

from __future__ import annotations

import argparse
import datetime
import math
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from _gpu import GIB, Device, Row, make_parser, markdown, write
from _quality.corpus import END, Corpus, Texts
from _quality.results import seconds_to
from _resuming import check_alike, check_data, data_digest, read_report
from _trainer_arms import PEER, Name, finds
from _trainer_run import Plan, run_arm

ARMS = (
    "fixed-10,dynabatch-10,auto,auto_sqrt-10,auto_controller-10,auto_graphs-32,group_by_length-10,batch_rebalance-10-4,"
    "calibrated-90,max_tokens-8192"
)
SMOKE_ARMS = (
    "fixed-10,group_by_length-10,batch_rebalance-10-4,dynabatch-10,max_tokens-256,calibrated-90,auto,auto_sqrt-10,"
    "auto_controller-10"
)
MARKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 21)
FIRST_BATCH = 10
# Seconds of an arm beside its training: weights and held-out losses, and more if a budget has to be found first.
OVERHEAD_SECONDS, FINDING_SECONDS = 8.0, 25.0
# What runs must have in common to stand in one table.
ALIKE = ("seconds", "data", "smoke", "cap_gib", "device")
COLUMNS = (
    ("arm", "arm", ""), ("lr", "lr", "g"), ("updates", "updates", ",d"),
    ("examples/update", "examples_per_update", ",.0f"),
    ("examples/s", "examples_per_second", ",.0f"), ("real tokens/s", "tokens_per_second", ",.0f"),
    ("padding", "padding", ".1%"), ("÷ fixed", "to_fixed", ".2f"), ("÷ dynabatch", "to_peer", ".2f"),
    ("OOMs", "ooms", "d"), ("peak/cap", "peak_of_cap", ".1%"), ("reserved/cap", "reserved_of_cap", ".1%"),
    ("startup s", "startup_seconds", ".1f"), ("calibration s", "calibration_seconds", ".1f"),
    ("replayed", "hit_rate", ".0%"), ("loss", "loss", ".3f"), ("s to dynabatch's loss", "seconds_to_peer", ".1f"),
    ("dynabatch's s ÷ it", "times_peer", ".1f"), ("with startup", "times_peer_with_startup", ".1f"),
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, cap_gib=32.0)
    parser.add_argument("--data", type=Path, help="the file that --prepare wrote")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make --data from a folder of corpora, stop")
    parser.add_argument("--arms", help="names with commas, the most important first")
    parser.add_argument("--lrs", default="3e-4,1e-4", help="the grid of learning rates (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of training (default: %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=560.0, help="of the command (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="only print the table of these results")
    parser.add_argument("--default-attention", action="store_true", help="leave cuDNN attention on")
    options = parser.parse_args()
    options.arms = (options.arms or (SMOKE_ARMS if options.smoke else ARMS)).split(",")
    for arm in options.arms:
        Name.parse(arm)
    if not options.seconds > 0:
        raise SystemExit(f"--seconds must be above 0, got {options.seconds:g}")
    if options.smoke:
        options.seconds, options.lrs = min(options.seconds, 0.1), "1e-3"
    try:
        options.lrs = [float(rate) for rate in options.lrs.split(",")]
    except ValueError:
        raise SystemExit(f"--lrs must be numbers with commas between them, got {options.lrs!r}") from None
    return options


def drawn_corpus() -> Corpus:
    """Return a tiny corpus of random tokens, to see that everything runs."""
    import numpy as np
    from _quality.preparing import with_batches

    rng = np.random.default_rng(0)
    columns = tuple(Texts.of([[*rng.integers(4, 60, rng.integers(2, 20)), END] for _ in range(220)]) for _ in range(2))
    return with_batches(Corpus("translation", columns, 64, 20), ["a text"] * 220, FIRST_BATCH)


def run_all(device: Device, corpus: Corpus, options: argparse.Namespace, started: float) -> list[Row]:
    """Run what is not in the results yet, as long as the command's time suffices, and return all rows."""
    report = read_report(options.output)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    made_with = {"seconds": options.seconds, "data": data_digest(options.data), "smoke": options.smoke}
    command = {"id": now, **device.describe(), **made_with}
    check_alike(report, command, ALIKE)
    report["commands"].append(command)
    rows: list[Row] = report["rows"]
    done = {(row["arm"], row["lr"]) for row in rows if "error" not in row}
    plan = make_plan(options)
    with tempfile.TemporaryDirectory() as caches:
        if not options.smoke:
            # Starts the libraries of the device, so that the first arm does not pay for them.
            run_arm("fixed-10", corpus, device, Plan(0.5, ()), lr=1e-5, cache=Path(caches) / "first")
            device.free()
        for arm, rate in ((arm, rate) for rate in options.lrs for arm in options.arms):
            if (arm, rate) in done:
                continue
            cache = Path(caches) / arm
            needed = options.seconds + OVERHEAD_SECONDS + (FINDING_SECONDS if finds(arm) and not cache.exists() else 0)
            if time.perf_counter() - started + needed > options.budget_seconds:
                print(f"left for another command: {arm} lr {rate:g}", flush=True)
                continue
            row = {"command": now, **run_one(arm, corpus, device, plan, rate, cache)}
            rows.append(row)
            write(options.output, report)
            print(line(row), flush=True)
    return rows


def make_plan(options: argparse.Namespace) -> Plan:
    if options.smoke:
        return Plan(options.seconds, (), least_updates=2)
    return Plan(options.seconds, tuple(mark * options.seconds / 25 for mark in MARKS))


def run_one(arm: str, corpus: Corpus, device: Device, plan: Plan, rate: float, cache: Path) -> Row:
    """Return the figures of an arm, or the error that ended it: the arms after it are still worth their time."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row = run_arm(arm, corpus, device, plan, lr=rate, cache=cache)
        said = {str(warning.message) for warning in caught if "batchwright" in warning.filename}
        return row | ({"warnings": sorted(said)} if said else {})
    except Exception as error:
        traceback.print_exc()
        return {"arm": arm, "lr": rate, "error": f"{type(error).__name__}: {error}"}
    finally:
        device.free()


def line(row: Row) -> str:
    """Return what is printed after an arm."""
    name = f"{row['arm']} lr {row['lr']:g}"
    if "error" in row:
        return f"{name}: failed: {row['error']}"
    curve = " ".join(f"{seconds:.1f}s {loss:.2f}" for seconds, loss in row["curve"])
    return (
        f"{name}: {row['examples_per_second']:,.0f} examples/s, {row['tokens_per_second']:,.0f} tokens/s, padding "
        f"{row['padding']:.1%}, {row['updates']} updates, startup {row['startup_seconds']:.1f} s, {row['ooms']} OOMs, "
        f"peak {row.get('peak_of_cap', math.nan):.1%} of the cap; {curve}"
    )


def summarize(rows: list[Row]) -> list[Row]:
    """Return one row per arm, at its best learning rate, with its ratios to the fixed size and to dynabatch.

    The time to dynabatch's loss is that until an arm's held-out loss is what dynabatch's was at the end of its seconds.
    """
    best: dict[str, Row] = {}
    starts: dict[str, float] = {}
    for row in rows:
        if "error" not in row:
            starts[row["arm"]] = max(starts.get(row["arm"], 0.0), row["startup_seconds"])
        if "error" not in row and (row["arm"] not in best or _loss(row) < _loss(best[row["arm"]])):
            best[row["arm"]] = dict(row)
    peer = next((row for row in best.values() if row["arm"].startswith(PEER)), None)
    fixed = next((row for row in best.values() if row["arm"].startswith("fixed")), None)
    for row in best.values():
        row["startup_seconds"] = starts[row["arm"]]
    for row in best.values():
        for key, other in (("to_fixed", fixed), ("to_peer", peer)):
            if other is not None:
                row[key] = row["examples_per_second"] / other["examples_per_second"]
        if peer is not None:
            row |= _times(row, peer)
    return list(best.values())


def _loss(row: Row) -> float:
    return row["loss"] if math.isfinite(row["loss"]) else math.inf


def _times(row: Row, peer: Row) -> Row:
    """Return the seconds to the peer's last loss and how many times faster that is, without and with the startup."""
    seconds = seconds_to(row["curve"], peer["loss"])
    if not seconds:
        return {}
    startup = row["startup_seconds"] + row.get("calibration_seconds", 0.0)
    whole = peer["seconds"] + peer["startup_seconds"]
    return {
        "seconds_to_peer": seconds,
        "times_peer": peer["seconds"] / seconds,
        "times_peer_with_startup": whole / (seconds + startup),
    }


def render(rows: list[Row]) -> str:
    """Return the table, and below it what failed and how dynabatch was run."""
    found = summarize(rows)
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in found)]
    notes = [f"{row['arm']}: {row['ran']}" for row in found if "ran" in row]
    failed = [line(row) for row in rows if "error" in row]
    return "\n".join([markdown(found, columns), "", *notes, *failed])


def prepare(options: argparse.Namespace) -> None:
    from _quality.preparing import prepare_pairs

    if options.data is None:
        raise SystemExit("--prepare needs --data, the file to write")
    corpus = prepare_pairs(options.prepare, first_batch=FIRST_BATCH)
    corpus.save(options.data)
    print(
        f"{len(corpus.lengths):,} pairs, {corpus.num_held_out} held out, {options.data.stat().st_size / 2**20:.1f} MiB"
    )


def main() -> None:
    started = time.perf_counter()
    options = parse()
    if options.prepare is not None:
        prepare(options)
        return
    if options.report is not None:
        print(render(read_report(options.report)["rows"]))
        return
    check_data(options.data, smoke=options.smoke)
    corpus = drawn_corpus() if options.data is None else Corpus.load(options.data)
    # A trial run does not count live tensors: that would take most of its time.
    device = Device(options.cap_gib * GIB, smoke=options.smoke, cudnn_attention=options.default_attention)
    print(render(run_all(device, corpus, options, started)))


if __name__ == "__main__":
    main()
