"""How short Adam's second moment may be: the same training with other beta2, at 8 times the size that the rate is for.

    python benchmarks/beta2.py

Two tasks of ``quality.py``: characters (one transformer block, 64 examples per update) and the teacher (a perceptron,
128 examples). AdamW at the task's rate as ``"sqrt"`` scales it, and at three times that, 300 updates, gradients clipped
at 1, three seeds. ``beta2_rule="half_life"`` makes 0.992 of 0.999 there. Tables have the validation loss of each seed.
A command can be ended at any time, and the next one goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from _cpu_quality.strategies import PARTS, decay
from _cpu_quality.tasks import LOSS, TASKS, validation_loss
from _gpu import Row, markdown, write

RESULT = Path(__file__).parent / "results" / "beta2.json"
BETA2S = (0.999, 0.992, 0.98, 0.95)
RATES = (1.0, 3.0)
TIMES = 8


def train(task_name: str, rate_factor: float, beta2: float, *, seed: int, updates: int) -> float:
    """Return the validation loss after some updates."""
    task = TASKS[task_name]
    data, rng, size = task.load(), np.random.default_rng(seed), TIMES * task.base_size
    torch.manual_seed(seed)
    model = task.make()
    rate = rate_factor * task.lr * TIMES**0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, beta2))
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = rate * decay(PARTS * (update + 1) // (updates + 1))
        loss_sum, weight = LOSS(model, data.batch(rng.integers(0, len(data.train[0]), size)))[:2]
        optimizer.zero_grad()
        (loss_sum / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return validation_loss(model, data)


def tables(rows: list[Row]) -> str:
    """Return a table per task and rate: the losses by beta2."""
    found = []
    for task, rate in dict.fromkeys((row["task"], row["rate"]) for row in rows):
        some = [row for row in rows if (row["task"], row["rate"]) == (task, rate)]
        table = [
            {"beta2": beta2, "mean": statistics.fmean(losses), **{str(seed): loss for seed, loss in enumerate(losses)}}
            for beta2 in dict.fromkeys(row["beta2"] for row in some)
            if (losses := [row["loss"] for row in some if row["beta2"] == beta2])
        ]
        seeds = sorted({row["seed"] for row in some})
        columns = [
            ("beta2", "beta2", "g"),
            ("mean", "mean", ".4f"),
            *((f"seed {one}", str(one), ".4f") for one in seeds),
        ]
        found.append(f"{task}, {rate:g} times the rate\n\n{markdown(table, columns)}")
    return "\n\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="teacher,characters", help="(default: %(default)s)")
    parser.add_argument("--updates", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made_with = {"updates": options.updates, "times": TIMES, "torch": torch.__version__}
    results: Row = json.loads(options.output.read_text()) if options.output.exists() else {**made_with, "rows": []}
    if any(results.get(name) != value for name, value in made_with.items()):
        raise SystemExit(f"{options.output} was made with other settings; name another --output")
    rows: list[Row] = results["rows"]
    for task in options.tasks.split(","):
        for seed in range(options.seeds):
            for rate in RATES:
                for beta2 in BETA2S:
                    key: Row = {"task": task, "rate": rate, "beta2": beta2, "seed": seed}
                    if any(key.items() <= row.items() for row in rows):
                        continue
                    rows.append({**key, "loss": train(task, rate, beta2, seed=seed, updates=options.updates)})
                    write(options.output, results)
                    print(rows[-1], flush=True)
    print(tables(rows))


if __name__ == "__main__":
    main()
