"""How many good items of a batch are answered in time if some of its items are bad, in simulated time.

    python benchmarks/serving_bad_items.py
    python benchmarks/serving_bad_items.py --deadline-ms 100 --bad 1 8

Batches of 64 items of length 32 on the device of serving.py: all 64 take 12 ms, one takes 4.1 ms. Items are bad at
random places, and a call that holds one fails. The limit is what a batcher could answer that knew how many are bad, but
not which: groups of the best size, one after the other, each clean by chance.
"""

from __future__ import annotations

import argparse
import random
import statistics

from serving_load import stub_seconds

from batchwright.serve import LatencyModel, Settings
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.request import Request, State

NUM_ITEMS, LENGTH = 64, 32


def serve(num_bad: int, deadline: float, seed: int) -> tuple[int, int]:
    """Return how many good items of one batch were answered in time, and the calls that were made."""
    bad = set(random.Random(seed).sample(range(NUM_ITEMS), num_bad))
    constant = stub_seconds(0, 1)
    core = Core(Settings(), LatencyModel.fixed(constant, stub_seconds(1, 1) - constant))
    for number in range(NUM_ITEMS):
        core.add(Request(number, LENGTH, 0.0, deadline))
    now, num_good, num_calls, turn = 0.0, 0, 0, core.take(0.0)
    while turn.call is not None:
        group = turn.call.requests
        seconds = stub_seconds(len(group), LENGTH)
        now, num_calls = now + seconds, num_calls + 1
        is_bad = any(request.item in bad for request in group)
        outcome = Outcome(error=ValueError("bad")) if is_bad else Outcome(values=group)
        turn = core.complete(turn.call, outcome, now, seconds)
        num_good += sum(request.state is State.ANSWERED and now <= deadline for request in turn.ended)
    return num_good, num_calls


def limit(num_bad: int, deadline: float) -> float:
    """Return the good items that groups of the best size answer in the time that the failed batch leaves."""
    left = deadline - stub_seconds(NUM_ITEMS, LENGTH)
    good = 1 - num_bad / NUM_ITEMS
    rates = (size * good**size / stub_seconds(size, LENGTH) for size in range(1, NUM_ITEMS + 1))
    return min(NUM_ITEMS - num_bad, max(0.0, left) * max(rates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bad", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--deadline-ms", type=float, default=50.0)
    parser.add_argument("--batches", type=int, default=1000)
    options = parser.parse_args()
    print("| bad of 64 | good answered in time | limit | calls |\n|---:|---:|---:|---:|")
    for num_bad in options.bad:
        served = [serve(num_bad, options.deadline_ms / 1e3, seed) for seed in range(options.batches)]
        good, calls = (statistics.mean(figure) for figure in zip(*served, strict=True))
        most = limit(num_bad, options.deadline_ms / 1e3)
        print(f"| {num_bad} | {good:.1f} of {NUM_ITEMS - num_bad} | {most:.1f} | {calls:.1f} |")


if __name__ == "__main__":
    main()
