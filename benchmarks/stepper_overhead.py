"""What `Stepper` costs over the loop one would write by hand: same model, same batches, steps of about 20 ms.

    python benchmarks/stepper_overhead.py [--steps 400] [--against ../before/src] [--noise]

Two models: a small transformer and a wide MLP, which has the most parameters to touch for its arithmetic, so most to
lose; each with as many rows as take 20 ms by hand on this machine. Weights count examples; the rows marked "tokens"
return the weight as a tensor that is not the number of examples, so that gradients are multiplied once at the end.
accelerate is measured where it is installed, and the loop by hand twice: what the second differs by is noise. Arms take
turns of eight steps, in random order, after one step that is not counted: in training the step before was one of the
same loop too. Medians of the ratios of processor seconds, turn by turn. ``--against`` measures the Stepper of another
checkout (``git worktree add ../before <commit>``) in the same run. ``--noise`` measures only the arms of noise, in one
and in four micro-batches: every update, every fourth and every eighth, from vectors or from the whole gradient. Every
row has the standard error of its median, and what it is over the Stepper without noise, also turn by turn. Vectors
measure the whole gradient too in one of 64 measured updates, in 3 of the first 64. A median of turns does not show
that, and a mean shows every burst of a busy machine, so the columns "first" and "later" add it: the part 3/64 or 1/64
of what the arm "noise", which measures the whole gradient at every update, takes over "vectors".
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchwright.step import Stepper

RESULT = Path(__file__).parent / "results" / "stepper_overhead.json"
RESULT_AGAINST = RESULT.with_name("stepper_overhead_against.json")
RESULT_NOISE = RESULT.with_name("stepper_overhead_noise.json")
STEP_SECONDS = 0.020
MAX_ROWS = 512
STEPS_A_TURN = 8  # "noise/4" measures in two of them, "noise/8" in one
INTERVALS = (1, 4, 8)
NUM_FIRST_TURNS = 2
Batch = tuple[torch.Tensor, torch.Tensor]


class Transformer(nn.Module):
    """A causal language model of 2 layers."""

    def __init__(self, vocabulary: int = 256, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)))


def make_transformer(num_rows: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (num_rows, 33))
    return Transformer(), (tokens[:, :-1], tokens[:, 1:])


def make_mlp(num_rows: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))
    return model, (torch.randn(num_rows, 256), torch.randint(0, 256, (num_rows,)))


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")


def by_example(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return loss_sum(model, batch), len(batch[0])


def by_token(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return loss_sum(model, batch), (batch[1] >= 0).sum() * 0.75


def hand_arm(model: nn.Module, batch: Batch, num_parts: int) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = batch

    def step() -> float:
        total = 0.0
        for part in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            loss = loss_sum(model, part) / len(x)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step


def other_stepper(source: Path) -> Any:
    """Return the Stepper of another checkout, imported under another name beside ours."""
    folder = source / "batchwright"
    spec = importlib.util.spec_from_file_location(
        "batchwright_before", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["batchwright_before"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return importlib.import_module("batchwright_before.step").Stepper


def stepper_arm(
    model: nn.Module, batch: Batch, num_parts: int, make: Any = Stepper, **options: object
) -> Callable[[], object]:
    loss_fn = options.pop("loss_fn", by_example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stepper = make(model, optimizer, loss_fn, micro_batch=len(batch[0]) // num_parts, **options)
    return lambda: stepper.step(batch).loss


def accelerate_arm(model: nn.Module, batch: Batch, num_parts: int) -> Callable[[], object] | None:
    try:
        from accelerate import Accelerator
    except ImportError:
        return None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_parts)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    x, y = batch

    def step() -> float:
        total = 0.0
        for part in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            with accelerator.accumulate(model):
                loss = loss_sum(model, part) / len(part[0])
                accelerator.backward(loss)
                total += loss.detach()
                optimizer.step()
                optimizer.zero_grad()
        return float(total)

    return step


def seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def rows_of(make: Callable[[int], tuple[nn.Module, Batch]], num_parts: int) -> int:
    """Return how many rows take about 20 ms by hand, a multiple of the micro-batches."""
    num_rows, took = 2, 0.0
    while num_rows < MAX_ROWS:
        step = hand_arm(*make(num_rows * num_parts), num_parts)
        took = statistics.median(seconds(step) for _ in range(20))
        if took >= 0.9 * STEP_SECONDS:
            break
        num_rows = min(MAX_ROWS, max(num_rows + 1, round(num_rows * min(2.0, STEP_SECONDS / took))))
    return num_parts * num_rows


def measure(arms: dict[str, Callable[[], object]], num_steps: int) -> list[dict[str, object]]:
    """Return the milliseconds of each arm, and the medians of its ratios to other arms, turn by turn."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    rng = random.Random(0)
    for _ in range(NUM_FIRST_TURNS + num_steps // STEPS_A_TURN):
        for name in rng.sample(list(arms), len(arms)):
            arms[name]()  # brings its own model and code into the caches, as every step before does in training
            times[name].append(sum(seconds(arms[name]) for _ in range(STEPS_A_TURN)))
    return [_row(name, times) for name in times]


def _row(name: str, times: dict[str, list[float]]) -> dict[str, object]:
    turns, hand, plain = (times[arm][NUM_FIRST_TURNS:] for arm in (name, "hand", "stepper"))
    ratios = [turn / base for turn, base in zip(turns, hand, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "arm": name,
        "ms": 1000 * statistics.median(turns) / STEPS_A_TURN,
        "over_hand": statistics.median(ratios) - 1,
        # 1.349 standard deviations of a normal distribution lie between its quartiles; a median spreads 1.253 of them.
        "error": 1.253 * (high - low) / 1.349 / len(ratios) ** 0.5,
        "over_stepper": statistics.median(turn / base for turn, base in zip(turns, plain, strict=True)) - 1,
        "sum_over_hand": sum(turns) / sum(hand) - 1,
    }


def add_rare(rows: list[dict[str, object]]) -> None:
    """Add what updates from vectors cost that measure the whole gradient too, over the Stepper without noise."""
    costs: Any = {row["arm"]: row["over_stepper"] for row in rows}
    rare = costs["stepper, noise"] - costs["stepper, vectors"]
    for row in rows:
        for interval in INTERVALS:
            if row["arm"] == _name("vectors", interval):
                cost = costs[row["arm"]]
                row |= {"first": cost + rare * 3 / 64 / interval, "later": cost + rare / 64 / interval}


def _name(kind: str, interval: int) -> str:
    return f"stepper, {kind}" + ("" if interval == 1 else f"/{interval}")


def noise_arms(make: Callable[[int], tuple[nn.Module, Batch]], num_rows: int, num_parts: int) -> dict[str, Any]:
    """Return the arms that measure gradient noise; one micro-batch is cut in two where the whole gradient is read."""
    arms = {}
    for kind, options in (("noise", {}), ("vectors", {"noise_from": "vectors"})):
        for interval in INTERVALS:
            arm = stepper_arm(*make(num_rows), num_parts, measure_noise=interval, **options)
            arms[_name(kind, interval)] = arm
    return arms


def shown(row: dict[str, Any]) -> str:
    text = "{model:12} {rows:4} {micro_batches:3} {arm:18} {ms:8.2f} ms {over_hand:+8.1%} ±{error:5.1%}"
    return (text + " {over_stepper:+8.1%}" + (" {first:+8.1%} {later:+8.1%}" if "first" in row else "")).format(**row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="counted steps of every arm")
    parser.add_argument("--noise", action="store_true", help="only the arms of gradient noise")
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    arguments = parser.parse_args()
    num_steps = arguments.steps
    before = None if arguments.against is None else other_stepper(arguments.against)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    result = RESULT_NOISE if arguments.noise else RESULT if before is None else RESULT_AGAINST
    print("model, rows, micro-batches, arm, ms, over the loop by hand (error), over Stepper, first 64 measured, later")
    for model_name, make in (("transformer", make_transformer), ("mlp", make_mlp)):
        for num_parts in (1, 4) if arguments.noise else (1, 2, 4):
            num_rows = rows_of(make, num_parts)
            arms: dict[str, Callable[[], object] | None] = {
                "hand": hand_arm(*make(num_rows), num_parts),
                "hand again": hand_arm(*make(num_rows), num_parts),
                "stepper": stepper_arm(*make(num_rows), num_parts),
                **noise_arms(make, num_rows, num_parts),
            }
            if not arguments.noise:
                arms["stepper, tokens"] = stepper_arm(*make(num_rows), num_parts, loss_fn=by_token)
                arms["accelerate"] = accelerate_arm(*make(num_rows), num_parts)
            if before is not None:
                arms["before"] = stepper_arm(*make(num_rows), num_parts, before)
                arms["before, tokens"] = stepper_arm(*make(num_rows), num_parts, before, loss_fn=by_token)
            found = {name: arm for name, arm in arms.items() if arm is not None}
            measured = measure(found, num_steps)
            add_rare(measured)
            for row in measured:
                rows.append({"model": model_name, "rows": num_rows, "micro_batches": num_parts, **row})
                print(shown(rows[-1]), flush=True)
            found_so_far = {"machine": machine, "num_steps": num_steps, "load": os.getloadavg(), "rows": rows}
            result.write_text(json.dumps(found_so_far, indent=1) + "\n")


if __name__ == "__main__":
    main()
