"""The serving benchmark in simulated time: the decisions alone, exact to the digit on any machine.

    python benchmarks/serving_simulation.py

The state machine of the batcher runs on a fake clock, with the loads of serving.py and a device that takes up to 4 %
longer than the stub's formula and 0.2 ms between batches. No thread, no event loop, no other process is in these
figures; serving.py has them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from typing import Any

from serving import Row, markdown, summary
from serving_arms import ARMS
from serving_load import DEADLINE_MS, WARM_UP_SECONDS, Answers, Load, Stub, poisson, stub_seconds, summarise

from batchwright.serve import LatencyModel, Settings
from batchwright.serve._core import Core
from batchwright.serve._request import Outcome, Request, State

OVERHEAD_SECONDS = 0.0002


def simulate(core: Core, load: Load, stub: Stub, seed: int) -> Answers:
    """Serve a load with one worker."""
    rng = random.Random(seed)
    requests = [
        Request(index, length, arrival, arrival + DEADLINE_MS / 1e3)
        for index, (arrival, length) in enumerate(zip(load.arrivals.tolist(), load.lengths.tolist(), strict=True))
    ]
    answers = Answers([None] * len(requests), Counter())
    now, upcoming = 0.0, 0
    while upcoming < len(requests) or core.num_waiting:
        while upcoming < len(requests) and requests[upcoming].arrival <= now:
            core.add(requests[upcoming])
            upcoming += 1
        next_arrival = requests[upcoming].arrival if upcoming < len(requests) else math.inf
        turn = core.take(now)
        if turn.call is None:
            wake = math.inf if turn.wake_seconds is None else now + turn.wake_seconds + 1e-9
            now = min(next_arrival, wake) if core.num_waiting or next_arrival < math.inf else now
            continue
        batch = turn.call.requests
        stub.batches.append(len(batch))
        seconds = stub_seconds(len(batch), max(request.length for request in batch)) * rng.uniform(1, 1.04)
        now += seconds + OVERHEAD_SECONDS
        for request in core.complete(turn.call, Outcome(values=batch), now, seconds).ended:
            if request.state is State.ANSWERED:
                answers.seconds[request.item] = now - request.arrival
    return answers


def core_for(arm: str) -> Core:
    policy = arm if arm in ("greedy", "window") else "adaptive"
    factor = {"ours-slow": 1.3, "ours-fast": 0.7}.get(arm)
    constant = stub_seconds(0, 1)
    per_token = stub_seconds(1, 1) - constant
    model = LatencyModel() if factor is None else LatencyModel.fixed(factor * constant, factor * per_token)
    return Core(Settings(policy=policy, deadline_ms=DEADLINE_MS), model)


def measure(arm: str, rate: int, seconds: float, seed: int) -> Row:
    load = poisson(rate, seconds, seed, constant=ARMS[arm].distribution == "constant")
    stub = Stub()
    row: dict[str, Any] = {"arm": arm, "load": load.name, "rate": rate, "pass": seed}
    policy_arm = arm.removesuffix("-constant")
    return row | summarise(load, simulate(core_for(policy_arm), load, stub, seed), stub.batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=int, default=[200, 500, 1000, 2000, 3000, 5000])
    parser.add_argument("--seconds", type=float, default=5 + WARM_UP_SECONDS)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    arms = ("ours", "greedy", "window", "ours-constant", "greedy-constant", "ours-slow", "ours-fast")
    points = [(arm, rate, seed) for arm in arms for rate in options.rates for seed in range(options.passes)]
    print(markdown(summary([measure(arm, rate, options.seconds, seed) for arm, rate, seed in points])))


if __name__ == "__main__":
    main()
