"""What `Stepper` costs over the loop one would write by hand: same model, same batches, steps of about 20 ms.

    python benchmarks/stepping.py

Arms take turns step by step, so that both see the same state of the machine; medians of processor seconds.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from torch import nn

from batchwright.step import Stepper

NUM_STEPS = 200


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple, num_parts: int) -> None:
    x, y = batch
    for part_x, part_y in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
        ((model(part_x) - part_y).square().sum() / len(x)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def seconds(function: object, *arguments: object) -> float:
    start = time.process_time()
    function(*arguments)  # type: ignore[operator]
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    batch = (torch.randn(128, 256), torch.randn(128, 256))
    rows = []
    for num_parts, noise in ((1, False), (4, False), (4, True)):
        models = [make_model(), make_model()]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
        stepper = Stepper(models[1], optimizers[1], loss_fn, micro_batch=128 // num_parts, measure_noise=noise)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(NUM_STEPS):
            times[0].append(seconds(by_hand, models[0], optimizers[0], batch, num_parts))
            times[1].append(seconds(stepper.step, batch))
        hand, ours = (statistics.median(values[10:]) for values in times)
        rows.append(
            {"micro_batches": num_parts, "noise": noise, "hand_ms": 1e3 * hand, "stepper_ms": 1e3 * ours,
             "overhead": ours / hand - 1}
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
