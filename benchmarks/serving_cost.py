"""What a scheduling decision costs, by the number of requests that wait.

    python benchmarks/serving_cost.py

Each figure is the least of many repeats: what the decision takes when nothing else uses the processor.
"""

from __future__ import annotations

import json
import timeit

import numpy as np
from serving_load import DEADLINE_MS, poisson, stub_seconds

from batchwright.serve import LatencyModel, Settings
from batchwright.serve._engine.policies import pick
from batchwright.serve._engine.request import Request

WAITING = (1, 8, 32, 64, 128, 192, 256, 1000)
NUM_QUEUES = 5


def make_queue(num_waiting: int, seed: int) -> list[Request]:
    """Requests that came within the last 30 ms."""
    lengths = poisson(1000, 2 * num_waiting / 1000, seed).lengths[:num_waiting].tolist()
    arrivals = np.linspace(0, 0.03, num_waiting).tolist()
    return [
        Request(index, length, at, at + DEADLINE_MS / 1e3)
        for index, (length, at) in enumerate(zip(lengths, arrivals, strict=True))
    ]


def milliseconds(policy: str, num_waiting: int) -> float:
    constant = stub_seconds(0, 1)
    model, settings = LatencyModel.fixed(constant, stub_seconds(1, 1) - constant), Settings(policy=policy)
    least = []
    for seed in range(NUM_QUEUES):
        queue = make_queue(num_waiting, seed)
        least.append(min(timeit.repeat(lambda queue=queue: pick(queue, 0.03, model, settings), number=1, repeat=300)))
    return 1e3 * float(np.median(least))


def main() -> None:
    for policy in ("adaptive", "greedy", "window"):
        costs = {num_waiting: round(milliseconds(policy, num_waiting), 4) for num_waiting in WAITING}
        print(json.dumps({"policy": policy, "milliseconds_by_waiting": costs}), flush=True)


if __name__ == "__main__":
    main()
