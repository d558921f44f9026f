"""What a scheduling decision costs, by the number of requests that wait.

    python benchmarks/serving_cost.py

The milliseconds of a decision are the least of many repeats: what it takes when nothing else uses the processor. The
microseconds of the batcher's moves are medians, with a queue that keeps its length: to take a request in (`add`), to
decide and start a batch (`take`), and to take in its outcome (`complete`).
"""

from __future__ import annotations

import json
import math
import random
import time
import timeit

import numpy as np
from serving_load import DEADLINE_MS, poisson, stub_seconds

from batchwright.serve import LatencyModel, Settings
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.policies import pick
from batchwright.serve._engine.request import Request

WAITING = (1, 8, 32, 64, 128, 192, 256, 1000)
NUM_QUEUES = 5
# The queue in front of a core: at the first depth one to five requests wait, and all of them run.
DEPTHS = (0, 50, 1000, 40_000)
NUM_CYCLES = 300
GAP_SECONDS = 2e-4


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


class Drive:
    """A core on a fake clock with a queue that keeps its length, and how long its moves take.

    Args:
        depth: how many requests wait.
        deadline_seconds: of each request; so many that none is refused.
    """

    def __init__(self, depth: int, deadline_seconds: float) -> None:
        self._depth, self._deadline, self._now = depth, deadline_seconds, 100.0
        self._rng = random.Random(depth)
        num = depth + 64 * (NUM_CYCLES + 1)
        self._lengths = iter(poisson(1000, num / 1000, seed=0).lengths.tolist())
        self._core = Core(Settings(max_queue=10**6), LatencyModel())
        for num_items, length in [(n, length) for n in (1, 8) for length in (8, 16, 32, 64, 128)] * 4:
            self._core.model.observe(num_items, length, stub_seconds(num_items, length))
        self._add(depth)
        self.seconds: dict[str, list[float]] = {"add": [], "take": [], "complete": []}

    def _add(self, num: int) -> float:
        requests = []
        for _ in range(num):
            self._now += GAP_SECONDS
            requests.append(Request(None, next(self._lengths), self._now, self._now + self._deadline))
        start = time.perf_counter()
        for request in requests:
            self._core.add(request)
        return (time.perf_counter() - start) / max(1, num)

    def cycle(self) -> None:
        """Add what has left, take a batch, and complete it."""
        missing = self._depth - self._core.num_waiting
        self.seconds["add"].append(self._add(missing if self._depth else self._rng.randint(1, 5)))
        start = time.perf_counter()
        call = self._core.take(self._now).call
        self.seconds["take"].append(time.perf_counter() - start)
        assert call is not None, "requests wait"
        seconds = stub_seconds(len(call.requests), max(request.length for request in call.requests))
        self._now += 0 if self._depth else seconds
        outcome = Outcome(values=[0] * len(call.requests))
        start = time.perf_counter()
        self._core.complete(call, outcome, self._now, seconds * self._rng.uniform(1, 1.04))
        self.seconds["complete"].append(time.perf_counter() - start)


def microseconds(depth: int, deadline_seconds: float) -> dict[str, float]:
    drive = Drive(depth, deadline_seconds)
    for _ in range(NUM_CYCLES):
        drive.cycle()
    # The first cycle finds nothing to add.
    return {move: round(1e6 * float(np.median(seconds[1:])), 2) for move, seconds in drive.seconds.items()}


def main() -> None:
    for policy in ("adaptive", "greedy", "window"):
        costs = {num_waiting: round(milliseconds(policy, num_waiting), 4) for num_waiting in WAITING}
        print(json.dumps({"policy": policy, "milliseconds_by_waiting": costs}), flush=True)
    for deadline_seconds in (math.inf, 1000.0):
        for depth in DEPTHS:
            row = {"has_deadline": deadline_seconds < math.inf, "waiting": depth or "1-5"}
            print(json.dumps(row | {"microseconds": microseconds(depth, deadline_seconds)}), flush=True)


if __name__ == "__main__":
    main()
