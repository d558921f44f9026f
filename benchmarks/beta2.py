"""How short Adam's second moment may be: the same training with other beta2, at 8 times the size that the rate is for.

    python benchmarks/beta2.py

The task of characters of ``quality.py``: one transformer block, AdamW, 64 examples per update, the rate as ``"sqrt"``
scales it, 300 updates, gradients clipped at 1, three seeds. The table has the validation loss of each seed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
import torch
from _cpu_quality.strategies import PARTS, decay
from _cpu_quality.tasks import LOSS, TASKS, validation_loss
from _gpu import Row, markdown, write

RESULT = Path(__file__).parent / "results" / "beta2.json"
BETA2S = (0.999, 0.992, 0.98, 0.96, 0.95, 0.94, 0.92, 0.85)
SIZE = 64


def train(beta2: float, *, seed: int, updates: int) -> float:
    """Return the validation loss after some updates."""
    task = TASKS["characters"]
    data, rng = task.load(), np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = task.make()
    rate = task.lr * (SIZE / task.base_size) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, beta2))
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = rate * decay(PARTS * (update + 1) // (updates + 1))
        loss_sum, weight = LOSS(model, data.batch(rng.integers(0, len(data.train[0]), SIZE)))[:2]
        optimizer.zero_grad()
        (loss_sum / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return validation_loss(model, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="(default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for beta2 in BETA2S:
        losses = [train(beta2, seed=seed, updates=options.updates) for seed in range(options.seeds)]
        rows.append({"beta2": beta2, "mean": statistics.fmean(losses), "losses": losses})
        print(f"{beta2}: {losses}", flush=True)
    write(options.output, {"updates": options.updates, "size": SIZE, "torch": torch.__version__, "rows": rows})
    columns = [("seed " + str(seed), str(seed), ".4f") for seed in range(options.seeds)]
    table = [{**row, **{str(seed): loss for seed, loss in enumerate(row["losses"])}} for row in rows]
    print(markdown(table, [("beta2", "beta2", "g"), ("mean", "mean", ".4f"), *columns]))


if __name__ == "__main__":
    main()
