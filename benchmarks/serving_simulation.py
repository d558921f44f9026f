"""The serving benchmark in simulated time: only the decisions, exact to the digit on any machine.

    python benchmarks/serving_simulation.py
    python benchmarks/serving_simulation.py --new-shape-ms 75 --deadline-ms 326 --rates 250 500

The state machine of the batcher runs on a fake clock, with the loads of serving.py and a device that takes up to 4 %
longer than the stub's formula and 0.2 ms between batches. `--new-shape-ms` adds to the first call of every shape, as
cuDNN attention does. No thread, no event loop, no other process is in these
figures; serving.py has them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from serving import Row, markdown, summary
from serving_arms import ARMS
from serving_load import DEADLINE_MS, WARM_UP_SECONDS, Answers, Load, Stub, poisson, stub_seconds, summarise

from batchwright.serve import DeadlineExceeded, LatencyModel, QueueFull, Settings
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.request import Request, State

OVERHEAD_SECONDS = 0.0002


def make_device(seed: int, new_shape_seconds: float) -> Callable[[int, int], float]:
    """Return what gives the seconds of a call, by its items and padded length."""
    rng, seen = random.Random(seed), set[tuple[int, int]]()

    def seconds(num: int, length: int) -> float:
        is_new = (num, length) not in seen
        seen.add((num, length))
        return stub_seconds(num, length) * rng.uniform(1, 1.04) + is_new * new_shape_seconds

    return seconds


def simulate(core: Core, load: Load, stub: Stub, device: Callable[[int, int], float], deadline_ms: float) -> Answers:
    """Serve a load with one worker, after single texts of a few lengths, twice each."""
    for length in (8, 16, 32, 64, 128) * 2:
        core.model.observe(1, length, device(1, length))
    requests = [
        Request(index, length, arrival, arrival + deadline_ms / 1e3)
        for index, (arrival, length) in enumerate(zip(load.arrivals.tolist(), load.lengths.tolist(), strict=True))
    ]
    answers = Answers([None] * len(requests), Counter())
    now, upcoming = 0.0, 0

    def arrive(until: float) -> None:
        """Hand in what arrives until then, each request at its time: also while a batch runs."""
        nonlocal upcoming
        while upcoming < len(requests) and requests[upcoming].arrival <= until:
            try:
                core.add(requests[upcoming])
            except (DeadlineExceeded, QueueFull) as error:
                answers.refusals.append(0.0)
                answers.errors[type(error).__name__] += 1
            upcoming += 1

    while upcoming < len(requests) or core.num_waiting:
        arrive(now)
        next_arrival = requests[upcoming].arrival if upcoming < len(requests) else math.inf
        turn = core.take(now)
        answers.refusals += [now - request.arrival for request in turn.ended]
        if turn.call is None:
            wake = math.inf if turn.wake_seconds is None else now + turn.wake_seconds + 1e-9
            now = min(next_arrival, wake) if core.num_waiting or next_arrival < math.inf else now
            continue
        batch = turn.call.requests
        stub.batches.append(len(batch))
        seconds = device(len(batch), max(request.length for request in batch))
        now += seconds + OVERHEAD_SECONDS
        arrive(now)
        for request in core.complete(turn.call, Outcome(values=batch), now, seconds).ended:
            if request.state is State.ANSWERED:
                answers.seconds[request.item] = now - request.arrival
    return answers


def core_for(arm: str, deadline_ms: float) -> Core:
    policy = arm if arm in ("greedy", "window") else "adaptive"
    factor = {"ours-slow": 1.3, "ours-fast": 0.7}.get(arm)
    constant = stub_seconds(0, 1)
    per_token = stub_seconds(1, 1) - constant
    model = LatencyModel() if factor is None else LatencyModel.fixed(factor * constant, factor * per_token)
    return Core(Settings(policy=policy, deadline_ms=deadline_ms), model)


def measure(arm: str, rate: int, seed: int, options: argparse.Namespace) -> Row:
    load = poisson(rate, options.seconds, seed, constant=ARMS[arm].distribution == "constant")
    stub, device = Stub(), make_device(seed, options.new_shape_ms / 1e3)
    row: dict[str, Any] = {"arm": arm, "load": load.name, "rate": rate, "pass": seed}
    policy_arm = arm.removesuffix("-constant")
    answers = simulate(core_for(policy_arm, options.deadline_ms), load, stub, device, options.deadline_ms)
    return row | summarise(load, answers, stub.batches, deadline_ms=options.deadline_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=int, default=[200, 500, 1000, 2000, 3000, 5000])
    parser.add_argument("--seconds", type=float, default=5 + WARM_UP_SECONDS)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--deadline-ms", type=float, default=DEADLINE_MS)
    parser.add_argument("--new-shape-ms", type=float, default=0.0, help="what the first call of a shape takes longer")
    options = parser.parse_args()
    arms = ("ours", "greedy", "window", "ours-constant", "greedy-constant", "ours-slow", "ours-fast")
    points = [(arm, rate, seed) for arm in arms for rate in options.rates for seed in range(options.passes)]
    print(markdown(summary([measure(arm, rate, seed, options) for arm, rate, seed in points])))


if __name__ == "__main__":
    main()
