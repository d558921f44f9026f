"""Training throughput on a GPU: fixed sizes, dynabatch's own batches, a token budget, a calibrated memory budget.

    python benchmarks/gpu_training.py --output benchmarks/results/gpu_training.json
    python benchmarks/gpu_training.py --default-attention --output benchmarks/results/gpu_training_default.json
    python benchmarks/gpu_training.py --arms "WindowSort;halves;Buckets" --large-epoch-seconds 12   # static shapes
    python benchmarks/gpu_training.py --smoke

One model (the shape of NLLB-600M, random weights), one corpus of pairs (lengths drawn from a lognormal distribution, or
real ones with `--lengths`), one loop for every arm: bf16 autocast, fused
AdamW, gradients clipped at 1, batches padded to their longest and masked. The allocator is capped at 32 GiB to stand
for a smaller card. cuDNN attention is off for every arm, as it plans anew for every shape; `--default-attention` leaves
it on and runs fewer pairs, since the first visit of a shape then takes half a second.

Every arm runs an epoch twice, batches in random order; in the second, `steady`, every shape was seen. An epoch ends
after `--epoch-seconds` (`--large-epoch-seconds` on the large corpus), and its second run takes the same batches. Only
examples that an update was made from count as trained. dynabatch falls back as its Trainer does (`split_retry`). Its
batches are planned beforehand by the package:

    python benchmarks/gpu_training.py --write-peer-plan        # where dynabatch is installed; needs no GPU

One plan of 32 static shapes runs eagerly and by replay of CUDA graphs; short batches are filled up with rows without
labels. The pool of the graphs is compared with what the calibrated memory model says.

The limit is a corpus without padding, at the best of some dense shapes that fill memory.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _gpu import GIB, Device, Row, make_parser, markdown, write
from _pairs import IntArray, Pairs, digest, make_lengths, read_lengths
from _peer_plan import read_peer_plan, write_peer_plan
from _training import Arm, Loop, Through, dense_limit, run_arm, split_retry, whole

import batchwright as bw
from batchwright.plan.models.memory import MaxBytes
from batchwright.step import calibrate_huggingface

RESULTS = Path(__file__).parent / "results"
SIZE = 10
SMOKE_CAP_GIB = 0.016
WIDE, HALVES = "calibrated, WindowSort()", "the same batches in halves"
COLUMNS = (
    ("arm", "arm", ""), ("pairs", "pairs", ",d"), ("batches", "batches", ",d"), ("shapes", "shapes", ",d"),
    ("padding", "padding", ".1%"), ("first /s", "first_per_second", ",.0f"), ("steady /s", "steady_per_second", ",.0f"),
    ("÷ fixed", "to_fixed", ".2f"), ("÷ dynabatch", "to_peer", ".2f"), ("÷ limit", "to_limit", ".2f"),
    ("tokens ÷ limit", "tokens_to_limit", ".2f"),
    ("OOMs", "ooms", "d"), ("lost", "lost", "d"), ("peak/cap", "peak_of_cap", ".1%"),
    ("reserved GiB", "reserved_gib", ".1f"), ("capture s", "capture_seconds", ".1f"), ("replayed", "hit_rate", ".1%"),
    ("pool GiB", "pool_gib", ".2f"), ("pool ÷ predicted", "pool_to_predicted", ".3f"),
    ("÷ the same eager", "to_eager", ".2f"), ("÷ calibrated", "to_calibrated", ".2f"),
    ("÷ its halves", "to_halves", ".2f"),
)  # fmt: skip


def calibrated_budget(loop: Loop, lengths: IntArray, max_bytes: float) -> tuple[bw.Budget, Row]:
    """Measure a few shapes and return the budget of ``max_bytes``, with what was measured.

    One batch is one update here, so gradients do not lie beside the activations of the next (``accumulate=False``).
    """
    start = time.perf_counter()
    found = calibrate_huggingface(
        loop.model, optimizer=loop.optimizer, lengths=lengths, autocast=torch.bfloat16, max_bytes=max_bytes,
        accumulate=False, monitor=loop.device.monitor, progress=False, repeats=1 if loop.device.is_cpu else 2,
    )  # fmt: skip
    assert found.memory is not None
    return found.memory.budget(max_bytes), {
        "seconds": time.perf_counter() - start,
        "probes": len(found.shapes),
        "memory": json.loads(found.memory.to_json()),
        "time": found.time.coefficients,
        "launch_seconds": found.time.launch_seconds,
        "first_visit_seconds": found.time.first_visit_seconds,
    }


def in_parts(order: IntArray) -> list[IntArray]:
    return np.array_split(order, max(1, len(order) // SIZE))


def planned(lengths: IntArray, budget: bw.Budget, grouping: bw.Grouping) -> list[IntArray]:
    """Return our batches; on one device no ranks need balance, so that the order is wholly random."""
    return [np.asarray(batch) for batch in bw.plan_batches(lengths, budget, grouping=grouping, balance_over=1)]


def make_arms(loop: Loop, few: Pairs, many: Pairs, budget: bw.Budget, options: argparse.Namespace) -> list[Arm]:
    alone, tokens = partial(whole, loop), 512 if options.smoke else 8_192
    short, long = options.epoch_seconds, options.large_epoch_seconds
    shuffled = np.random.default_rng(0).permutation(len(few.lengths))
    by_length = np.lexsort((few.lengths[:, 1], few.lengths[:, 0]))
    peer = read_peer_plan(options.peer_plan, few.lengths[:, 0])
    in_sorted = bw.Sorted()
    wide = planned(many.lengths, budget, bw.WindowSort())
    return [
        Arm(f"fixed {SIZE}, shuffled", few, in_parts(shuffled), alone, short),
        Arm(f"fixed {SIZE}, sorted", few, in_parts(by_length), alone, short),
        *([] if peer is None else [Arm("dynabatch, range 5", few, peer, partial(split_retry, loop, SIZE), short)]),
        Arm(f"MaxTokens({tokens})", few, planned(few.lengths, bw.MaxTokens(tokens), in_sorted), alone, short),
        Arm("calibrated, Sorted()", few, planned(few.lengths, budget, in_sorted), alone, short),
        Arm("the same through Stepper", few, planned(few.lengths, budget, in_sorted), Through(loop), short),
        Arm("calibrated, Sorted()", many, planned(many.lengths, budget, in_sorted), alone, long),
        Arm(WIDE, many, wide, alone, long),
        Arm(HALVES, many, [half for batch in wide for half in halves(batch)], alone, long),
        *static_arms(loop, many, options),
    ]


def halves(batch: IntArray) -> list[IntArray]:
    return [half for half in np.array_split(batch, 2) if len(half)]


def static_arms(loop: Loop, pairs: Pairs, options: argparse.Namespace) -> list[Arm]:
    """Return one plan of static shapes, run eagerly and by replay."""
    num_shapes, tokens = (2, 256) if options.smoke else (32, options.static_tokens)
    plan = bw.plan_batches(pairs.lengths, bw.MaxTokens(tokens), grouping=bw.Buckets(num_shapes), balance_over=1)
    batches, name = [np.asarray(batch) for batch in plan], f"Buckets({num_shapes}) of {tokens:,} tokens"
    shapes = plan.shapes.astype(np.int64)
    return [
        Arm(f"{name}, {how}", pairs, batches, train, options.large_epoch_seconds, shapes)
        for how, train in (("eager", Through(loop)), ("graphed", Through(loop, shapes)))
    ]


def add_pool(row: Row, arm: Arm, budget: bw.Budget, resident_bytes: int) -> None:
    """Add what the memory model says about the pool: the peak of the largest shape without what is always there."""
    if row.get("pool_bytes") and isinstance(budget, MaxBytes) and arm.shapes is not None:
        predicted = float(budget.model.predict(arm.shapes).max()) - resident_bytes
        row |= {"model_pool_bytes": predicted, "pool_to_predicted": row["pool_bytes"] / predicted}
        row["pool_gib"] = row["pool_bytes"] / GIB


def is_wanted(name: str, options: argparse.Namespace) -> bool:
    return options.arms is None or any(word in name for word in options.arms.split(";"))


def dense_shapes(budget: bw.Budget, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return shapes without padding that fill the budget, and half of it."""
    most = budget.max_items(np.array([(length, length) for length in lengths]))
    return [
        (max(1, int(n) // part), length, length) for n, length in zip(most, lengths, strict=True) for part in (1, 2)
    ]


def add_ratios(rows: list[Row]) -> None:
    """Add what each arm is to the fixed size, to dynabatch and to the limit, in steady examples per second."""
    speeds = {row["arm"]: row["steady_per_second"] for row in reversed(rows)}
    against = {
        "to_fixed": speeds.get(f"fixed {SIZE}, shuffled"),
        "to_peer": speeds.get("dynabatch, range 5"),
        "to_limit": next((speed for arm, speed in speeds.items() if arm.startswith("limit")), None),
    }
    static = {
        "to_eager": next((speed for arm, speed in speeds.items() if arm.endswith("tokens, eager")), None),
        "to_calibrated": speeds.get(WIDE),
        "to_halves": speeds.get(HALVES),
    }
    limit = next((row.get("tokens_per_second") for row in rows if row["arm"].startswith("limit")), None)
    for row in rows:
        chosen = against | (static if row["arm"].endswith("graphed") else {})
        row.update({key: row["steady_per_second"] / speed for key, speed in chosen.items() if speed})
        if limit is not None:
            row["tokens_to_limit"] = row["tokens_per_second"] / limit


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, cap_gib=32.0)
    parser.add_argument("--num", type=int, default=None, help="pairs of the large corpus (default: 40,000; 10,000)")
    parser.add_argument("--num-slow", type=int, default=4_000, help="pairs of the small corpus (default: 4,000)")
    parser.add_argument("--lengths", type=Path, default=None, help="a .npy file of real lengths (N, 2)")
    parser.add_argument("--fill", type=float, default=0.95, help="share of the cap to plan for (default: 0.95)")
    parser.add_argument("--epoch-seconds", type=float, default=None, help="an epoch ends after this (default: 20; 12)")
    parser.add_argument("--large-epoch-seconds", type=float, default=60.0, help="of the large corpus (default: 60)")
    parser.add_argument("--arms", help="only arms with one of these words in their name, separated by ;")
    parser.add_argument("--static-tokens", type=int, default=6_144, help="of the static shapes (default: 6,144)")
    parser.add_argument("--default-attention", action="store_true", help="leave cuDNN attention on")
    parser.add_argument("--write-peer-plan", action="store_true", help="plan with dynabatch, write the file, stop")
    options = parser.parse_args()
    options.peer_plan = RESULTS / ("dynabatch_plan_drawn.json" if options.lengths is None else "dynabatch_plan.json")
    if options.num is None:
        options.num = 10_000 if options.default_attention else 40_000
    if options.epoch_seconds is None:
        options.epoch_seconds = 12.0 if options.default_attention else 20.0
    if options.smoke:
        options.num, options.num_slow, options.cap_gib, options.epoch_seconds = 300, 100, SMOKE_CAP_GIB, 0.2
        options.large_epoch_seconds = 0.2
    return options


def run(device: Device, options: argparse.Namespace, few: IntArray, many: IntArray) -> list[Row]:
    """Calibrate, run every arm and the limit, and return the rows."""
    loop = Loop(device, small=options.smoke)
    small, large = Pairs(few, loop.vocabulary), Pairs(many, loop.vocabulary)
    budget, calibration = calibrated_budget(loop, few, options.fill * device.cap_bytes)
    print(json.dumps(calibration), flush=True)
    loop.step(loop.send(small.collate(np.arange(2))))  # allocates the optimizer's state, which every arm has
    rows: list[Row] = []
    report = {
        **device.describe(),
        "lengths": digest(few),
        "fill": options.fill,
        "calibration": calibration,
        "rows": rows,
    }
    loop.free()
    resident = device.used_bytes  # the weights and the optimizer's state
    for arm in make_arms(loop, small, large, budget, options):
        if is_wanted(arm.name, options):
            rows.append(run_arm(loop, arm))
            add_pool(rows[-1], arm, budget, resident)
            write(options.output, report)
    if is_wanted("limit", options):
        shapes = dense_shapes(budget, (16, 32) if options.smoke else (16, 32, 64, 128))
        rows.append(dense_limit(loop, shapes, float(many.sum(axis=1).mean())))
    add_ratios(rows)
    write(options.output, report)
    return rows


def main() -> None:
    options = parse()

    def corpus(num: int) -> IntArray:
        if options.lengths is not None:
            return read_lengths(options.lengths, num)
        return make_lengths(num, longest=40 if options.smoke else 512)

    if options.write_peer_plan:
        write_peer_plan(options.peer_plan, corpus(options.num_slow)[:, 0], batch_size=SIZE, max_batch_range=5.0)
        return
    with Device(options.cap_gib * GIB, smoke=options.smoke, cudnn_attention=options.default_attention) as device:
        rows = run(device, options, corpus(options.num_slow), corpus(options.num))
    print(markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
