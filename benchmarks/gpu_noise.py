"""What an update costs on a GPU that measures its gradient noise, and what ``goodput`` adds: the same batches for all.

    python benchmarks/gpu_noise.py --data decoder.npz --texts 64 --output benchmarks/results/gpu_noise_decoder.json
    python benchmarks/gpu_noise.py --smoke

Data are those of ``gpu_quality.py``, and so are the models, bf16 under autocast, clipped gradients and fused AdamW. All
arms take turns of ``--updates`` updates, each with a model of its own, on the same batches of texts of about the same
length. A turn begins and ends with an idle device. The loop by hand runs twice: what the second differs by is the noise
of the machine. Figures are medians of the ratio to the first loop, turn by turn.

``vectors/4`` measures noise in the vectors of norm layers at every fourth update, as trainers with
``controller="auto"`` do, ``all/8`` in the whole gradient at every eighth, in two micro-batches. ``goodput`` is
``vectors/4`` with a learning rate and a β₂ that follow the size, and a policy that observes every update; its size is
held. The whole gradient that ``vectors`` measures now and then to check itself is inside the turns of its first
updates, and stands beside them as ``first turns``.

Results are written after every turn. A command stops before a turn that would not end within ``--budget-seconds``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _gpu import GIB, Device, Row, make_parser, markdown, write
from _quality.arms import Arm, updates_of
from _quality.corpus import Corpus, Made
from _quality.tasks import make_model, sums
from _quality.training import BETAS, CLIP_NORM, Loop, Pace, pin
from gpu_quality import drawn_corpus

import batchwright as bw
from batchwright import size
from batchwright.step import Stepper, StepReport

Train = Callable[[Made], None]
VECTORS: Row = {"noise_from": "vectors"}
COUPLED: Row = {"lr_rule": "sqrt", "beta2_rule": "half_life"}
ARMS: dict[str, Row | None] = {
    "loop": None,
    "loop again": None,
    "Stepper": {},
    "vectors/1": {"measure_noise": True, **VECTORS},
    "vectors/4": {"measure_noise": 4, **VECTORS},
    "all/8": {"measure_noise": 8},
    "goodput": {"measure_noise": 4, **VECTORS, **COUPLED},
}
NUM_FIRST_TURNS = 4  # in which vectors are checked often


def make(name: str, corpus: Corpus, device: Device, num_texts: int, *, small: bool) -> Train:
    """Return what runs an update of an arm."""
    model = make_model(corpus.task, corpus.vocabulary, device.name, seed=0, small=small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=BETAS, fused=True)
    options = ARMS[name]
    if options is None:
        loop = Loop(model, optimizer, device)
        return lambda made: loop([made])
    if name == "goodput":
        columns = ("input_ids", "labels")[: len(corpus.columns)]
        count = {"tokens_of": lambda batch: sum(batch[column].numel() for column in columns)}
        options = {**options, **count, "base_size": num_texts}
    stepper = Stepper(model, optimizer, sums, clip_norm=CLIP_NORM, autocast=torch.bfloat16, **options)
    watch = _observer(num_texts) if name == "goodput" else None

    def train(made: Made) -> None:
        batch = {key: tensor.to(device.name, non_blocking=True) for key, tensor in made.batch.items()}
        report = stepper.step(batch)
        if watch is not None:
            watch(report)

    return train


def _observer(num_texts: int) -> Callable[[StepReport], None]:
    """Return a function that lets a policy observe the update before, whose size never changes."""
    limits = {"min_size": num_texts, "max_size": num_texts, "initial": num_texts}
    controller = bw.BatchSizeController(size.goodput(), **limits)
    before: list[StepReport] = []

    def watch(report: StepReport) -> None:
        if before:
            controller.observe(**before.pop().observation())
        before.append(report)

    return watch


def turn(train: Train, batches: Sequence[Made], device: Device) -> float:
    """Return the seconds of a turn."""
    pace = Pace(device)
    device.synchronize()
    start = time.perf_counter()
    for made in batches:
        train(made)
        pace.wait()
    device.synchronize()
    return time.perf_counter() - start


def measure(options: Any, corpus: Corpus, device: Device, started: float) -> Iterator[Row]:
    """Yield the seconds of every arm, turn after turn, as long as the command's time suffices."""
    limit = options.updates * options.turns
    updates = updates_of(Arm.parse(f"grouped-{options.texts}"), corpus, seed=0, limit=limit)
    batches = pin([corpus.make(part) for (part,) in updates], device)
    arms = {name: make(name, corpus, device, options.texts, small=options.smoke) for name in ARMS}
    for train in arms.values():
        turn(train, batches[:2], device)
    longest = 0.0
    for number in range(options.turns):
        begun = time.perf_counter()
        if begun - started + longest > options.budget_seconds:
            print(f"{options.turns - number} turns do not fit into --budget-seconds", flush=True)
            return
        some = batches[number * options.updates : (number + 1) * options.updates]
        names = [*arms][number % len(arms) :] + [*arms][: number % len(arms)]  # nobody is always first
        yield {name: turn(arms[name], some, device) for name in names}
        longest = max(longest, time.perf_counter() - begun)


def summarize(turns: list[Row], updates: int) -> list[Row]:
    """Return a row per arm: milliseconds of an update, and how much more than the loop, later and at first."""
    first, later = turns[:NUM_FIRST_TURNS], turns[NUM_FIRST_TURNS:] or turns
    return [
        {
            "arm": name,
            "ms": 1e3 * statistics.median(row[name] for row in later) / updates,
            "over": statistics.median(row[name] / row["loop"] for row in later) - 1,
            "first": sum(row[name] for row in first) / sum(row["loop"] for row in first) - 1,
        }
        for name in ARMS
    ]


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, cap_gib=120.0)
    parser.add_argument("--data", type=Path, help="the file that gpu_quality.py --prepare wrote")
    parser.add_argument("--texts", type=int, default=64, help="of an update (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=16, help="of a turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=560.0, help="of the command (default: %(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.texts, options.updates, options.turns = 8, 4, 6
    if options.data is None and not options.smoke:
        raise SystemExit("--data must name the file that gpu_quality.py --prepare wrote; --smoke runs a tiny corpus")
    return options


def main() -> None:
    started = time.perf_counter()
    options = parse()
    corpus = drawn_corpus("translation", with_peers=False) if options.data is None else Corpus.load(options.data)
    device = Device(options.cap_gib * GIB, smoke=options.smoke)
    facts = {"task": corpus.task, "texts": options.texts, "updates_a_turn": options.updates, **device.describe()}
    turns: list[Row] = []
    rows: list[Row] = []
    for each in measure(options, corpus, device, started):
        turns.append(each)
        rows = summarize(turns, options.updates)
        write(options.output, {**facts, "rows": rows, "turns": turns})
    print(f"{corpus.task}, {options.texts} texts an update, {len(turns)} turns of {options.updates} updates")
    columns = (("arm", "arm", ""), ("ms per update", "ms", ".2f"), ("over the loop", "over", "+.1%"))
    print(markdown(rows, (*columns, ("over it in first turns", "first", "+.1%"))))


if __name__ == "__main__":
    main()
