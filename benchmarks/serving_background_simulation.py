"""Offline work beside live requests in simulated time: what it adds to the misses, over loads, noise, sizes, deadlines.

    python benchmarks/serving_background_simulation.py --output benchmarks/results/serving_background_simulated.json
    python benchmarks/serving_background_simulation.py --smoke

The state machine of the batcher runs on a simulated clock. The device takes the seconds of a BERT of 6 layers on one
CPU thread, and the machine is slower at some times than at others: the factor of every 25 ms is drawn from quantiles of
real over fitted seconds, measured while other programs used its two cores (`MEASURED`). Half of its variation lasts
0.1 s and half 3 s, as measured. Other noises are none; calm (5 %); heavy, the slow times to the power of 1.7; and calm
with pauses of 0.1 to 0.5 s, one in 20 s.

The machine is a function of the time alone. Both arms of a pair, with and without offline work, see the same arrivals,
the same lengths and the same machine, and `added_points` counts the requests that miss their deadline in one arm and
not in the other. `standard_error_points` is over the seeds.

`share` is the offline throughput divided by that of a dedicated loop on the same machine times (1 - busy), where busy
is the share of the time that the requests keep the device without offline work. `--label` names the version of the
code: rows of other labels that the output holds already stay, so that two versions stand side by side. It may be above
1: requests that wait for offline work share batches, and take less time than alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from serving_load import poisson

from batchwright.serve import DeadlineExceeded, LatencyModel, QueueFull, Settings
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.neighbours import Job
from batchwright.serve._engine.request import Request, State
from batchwright.serve._engine.units import Units, _read_unit
from batchwright.serve._engine.work import Work

SLOT_SECONDS = 0.025
OVERHEAD_SECONDS = 0.0005  # between two calls
# The seconds of a call: constant, per padded token, per item and squared length. Fitted to 2,398 calls of the encoder
# of serving_background.py, requests and offline parts.
CONSTANT, PER_TOKEN, PER_SQUARE = 8.9e-3, 2.5e-4, 1.9e-7
# Real over fitted seconds of the same calls, while other programs used the machine too.
LEVELS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1)
MEASURED = (0.8, 0.848, 0.878, 0.894, 0.921, 0.971, 1.1, 1.428, 1.685, 2.021, 2.13, 2.228, 2.578, 4.072)
# How long the slow times of a machine last, in seconds; each has half of the variation.
LASTING = (0.1, 3.0)
WARM_UP_SECONDS = 10.0
MAX_AHEAD = 16


@dataclass(frozen=True)
class Case:
    """What is simulated: one pair of arms per seed."""

    load: float = 0.3
    noise: str = "measured"
    num_items: int = 32
    deadline: float = 10.0  # times the mean seconds of one request alone
    seconds: float = 400.0


NOISES = ("none", "calm", "measured", "heavy", "pauses")
CASES = [
    *(Case(load=load, noise=noise) for load in (0.1, 0.3, 0.6) for noise in NOISES),
    *(Case(num_items=num) for num in (1, 8, 128)),
    *(Case(deadline=deadline) for deadline in (5.0, 20.0, 40.0)),
    Case(load=0.6, deadline=20.0),
    Case(load=0.1, deadline=5.0),
]


def call_seconds(num_items: int, length: int) -> float:
    return CONSTANT + num_items * length * (PER_TOKEN + PER_SQUARE * length)


@cache
def mean_alone() -> float:
    """Return the mean seconds of one request alone."""
    return statistics.fmean(call_seconds(1, length) for length in poisson(100, 400.0, 0).lengths.tolist())


class Machine:
    """How slow a machine is at every moment: the same for both arms."""

    def __init__(self, noise: str, seconds: float, seed: int) -> None:
        rng = np.random.default_rng([seed, NOISES.index(noise)])
        num = int(seconds / SLOT_SECONDS) + 4000
        normal = sum(_lasting(rng, num, lasting) for lasting in LASTING) / math.sqrt(len(LASTING))
        self._factors = _factors(normal, noise, rng).tolist()

    def end(self, start: float, seconds: float) -> float:
        """Return when a call ends that would take so long on a machine that nothing disturbs."""
        place = int(start / SLOT_SECONDS)
        now = start
        while True:
            factor = self._factors[min(place, len(self._factors) - 1)]
            place += 1
            left = place * SLOT_SECONDS - now
            if seconds * factor <= left:
                return now + seconds * factor
            seconds -= left / factor
            now = place * SLOT_SECONDS


def _lasting(rng: np.random.Generator, num: int, seconds: float) -> np.ndarray:
    """Return normal numbers of variance 1 whose correlation falls to 1/e in so many seconds."""
    keep = math.exp(-SLOT_SECONDS / seconds)
    drawn, value, values = rng.normal(size=num) * math.sqrt(1 - keep * keep), float(rng.normal()), []
    for step in drawn.tolist():
        value = keep * value + step
        values.append(value)
    return np.array(values)


def _factors(normal: np.ndarray, noise: str, rng: np.random.Generator) -> np.ndarray:
    if noise == "none":
        return np.ones(len(normal))
    if noise == "calm":
        return np.exp(0.05 * normal)
    if noise == "pauses":  # every 20 s nothing runs for 0.1 to 0.5 s, as after a collection of garbage
        factors = np.exp(0.05 * normal)
        for start in rng.integers(0, len(normal), int(len(normal) * SLOT_SECONDS / 20)):
            factors[start : start + int(rng.integers(4, 20))] = 1e3
        return factors
    ranks = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in normal.tolist()])
    factors = np.interp(ranks, LEVELS, MEASURED)
    return factors if noise == "measured" else np.where(factors > 1, factors**1.7, factors)


@dataclass
class Arm:
    """What became of the requests, and of the offline work beside them."""

    missed: np.ndarray
    p99_ms: float
    busy: float
    tokens_per_s: float
    num_failed: int
    waits: dict[str, Any]


def offline_lengths(num_items: int, seed: int) -> Iterator[list[int]]:
    """Batches of similar length without end, in random order, from texts whose lengths are those of the requests."""
    rng = np.random.default_rng(seed)
    while True:
        lengths = np.sort(poisson(1.0, 2048, int(rng.integers(2**31))).lengths).tolist()
        batches = [lengths[start : start + num_items] for start in range(0, len(lengths), num_items)]
        for place in rng.permutation(len(batches)).tolist():
            yield batches[place]


def dedicated(case: Case, machine: Machine, seed: int) -> float:
    """Return the tokens per second of a loop over the offline batches with nothing beside it."""
    now, tokens = 0.0, 0
    for batch in offline_lengths(case.num_items, seed):
        now = machine.end(now, call_seconds(len(batch), max(batch))) + OVERHEAD_SECONDS
        tokens += sum(batch)
        if now >= case.seconds:
            return tokens / now
    raise AssertionError("the batches have no end")


class Simulation:
    """A batcher on a simulated clock."""

    def __init__(self, case: Case, machine: Machine, seed: int, *, offline: bool) -> None:
        load = poisson(case.load / mean_alone(), case.seconds, seed)
        allowed = case.deadline * mean_alone()
        self.machine = machine
        self.requests = [
            Request(length, length, at, at + allowed)
            for at, length in zip(load.arrivals.tolist(), load.lengths.tolist(), strict=True)
        ]
        self.ends: dict[Request, float] = {}
        self.now = self.busy = 0.0
        self.tokens = self.upcoming = 0
        self.batches = enumerate(offline_lengths(case.num_items, seed)) if offline else iter(())
        self.units = Units([], max_ahead=MAX_AHEAD)
        core = Core(Settings(deadline_ms=1e3 * allowed, max_queue=100_000), LatencyModel())
        for num, length in [*itertools.product((1, 2, 4, 8, 16), (8, 16, 32, 64, 128))] * 2:
            core.model.observe(num, length, call_seconds(num, length))
        self.work = Work(core, device=None, background=self.units)

    def run(self) -> None:
        while self.upcoming < len(self.requests) or self.work.core.num_waiting:
            self._arrive(self.now)
            self._read()
            turn, part = self.work.take(self.now)
            job: Job | None = turn.call or part
            if job is None:
                self.now = self._wake(turn.wake_seconds)
            elif part is not None:
                self._call(part)
                self.tokens += sum(part.items)
            while job is not None and part is None:
                job = self._call(job)

    def _read(self) -> None:
        """Do what the thread that reads ahead does, and whoever takes the results."""
        units = self.units._units
        while units and units[0].is_done:
            units.popleft()
        for index, lengths in itertools.islice(self.batches, MAX_AHEAD - len(units)):
            units.append(_read_unit(index, lengths, int, is_estimate=False))

    def _wake(self, seconds: float | None) -> float:
        wake = math.inf if seconds is None else self.now + seconds + 1e-9
        arrival = self.requests[self.upcoming].arrival if self.upcoming < len(self.requests) else math.inf
        return min(wake, arrival) if min(wake, arrival) < math.inf else self.now

    def _call(self, job: Job) -> Job | None:
        end = self.machine.end(self.now, call_seconds(len(job.items), max(job.items)))
        self._arrive(end)
        self.busy += end - self.now
        following, ended = self.work.complete(job, Outcome(values=job.items), end, end - self.now)
        self.ends.update((request, end) for request in ended if request.state is State.ANSWERED)
        self.now = end + OVERHEAD_SECONDS
        return following

    def _arrive(self, until: float) -> None:
        """Hand in what arrives until then, each request at its time."""
        while self.upcoming < len(self.requests) and self.requests[self.upcoming].arrival <= until:
            try:
                self.work.add(self.requests[self.upcoming])
            except (DeadlineExceeded, QueueFull):
                pass
            self.upcoming += 1

    def arm(self) -> Arm:
        counted = [request for request in self.requests if request.arrival >= WARM_UP_SECONDS]
        missed = np.array([self.ends.get(request, math.inf) > request.deadline for request in counted])
        taken = [self.ends[request] - request.arrival for request in counted if request in self.ends]
        waits = getattr(self.work, "background_stats", dict)()
        p99 = 1e3 * float(np.percentile(taken, 99))
        return Arm(missed, p99, self.busy / self.now, self.tokens / self.now, self.units.num_failed, waits)


def measure(case: Case, seed: int) -> dict[str, Any]:
    machine = Machine(case.noise, case.seconds, seed)
    arms = []
    for offline in (False, True):
        simulation = Simulation(case, machine, seed, offline=offline)
        simulation.run()
        arms.append(simulation.arm())
    alone, both = arms
    num = len(alone.missed)
    return {
        "num_requests": num,
        "busy": alone.busy,
        "share": both.tokens_per_s / (dedicated(case, machine, seed) * (1 - alone.busy)),
        "missed_points": [100 * float(arm.missed.mean()) for arm in arms],
        "only_beside": int((both.missed & ~alone.missed).sum()),
        "only_alone": int((alone.missed & ~both.missed).sum()),
        "added_points": 100 * float(both.missed.mean() - alone.missed.mean()),
        "p99_ms": [alone.p99_ms, both.p99_ms],
        "num_failed": both.num_failed,
        "waits": both.waits,
    }


def summary(case: Case, label: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    added = [row["added_points"] for row in rounds]
    error = statistics.stdev(added) / math.sqrt(len(added)) if len(added) > 1 else None
    means = {key: statistics.fmean(row[key] for row in rounds) for key in ("busy", "share", "added_points")}
    return {"label": label, **dataclasses.asdict(case), **means, "standard_error_points": error, "rounds": rounds}


def line(row: dict[str, Any]) -> str:
    keys = (row["label"], f"{row['load']:.0%}", row["noise"], row["num_items"], f"{row['deadline']:g}")
    missed = [statistics.fmean(one["missed_points"][arm] for one in row["rounds"]) for arm in (0, 1)]
    p99 = [statistics.fmean(one["p99_ms"][arm] for one in row["rounds"]) for arm in (0, 1)]
    error = "" if row["standard_error_points"] is None else f" ± {row['standard_error_points']:.3f}"
    figures = (
        f"{row['busy']:.3f}",
        f"{row['share']:.3f}",
        *(f"{value:.0f}" for value in p99),
        *(f"{value:.3f}" for value in missed),
        f"{row['added_points']:+.3f}{error}",
    )
    return "| " + " | ".join(map(str, (*keys, *figures))) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now", help="names the version of the code in the output")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=400.0, help="of simulated time, of each arm")
    parser.add_argument("--cases", nargs="*", type=int, help="only these, by their place from 0")
    parser.add_argument("--smoke", action="store_true", help="one short case")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases = CASES if options.cases is None else [CASES[place] for place in options.cases]
    if options.smoke:
        cases, options.seeds, options.seconds = [Case()], 1, 40.0
    head = "code load noise items deadline busy share p99_alone p99_beside missed_alone missed_beside added".split()
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    rows: list[dict[str, Any]] = []
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for case in (dataclasses.replace(case, seconds=options.seconds) for case in cases):
        rows.append(summary(case, options.label, [measure(case, seed) for seed in seeds]))
        print(line(rows[-1]), flush=True)
        if options.output:
            write(rows, options)


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    earlier = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    kept = [row for row in earlier if row["label"] != options.label]
    device = {"constant": CONSTANT, "per_token": PER_TOKEN, "per_square": PER_SQUARE}
    noise = {"levels": LEVELS, "real_over_fitted": MEASURED, "lasting_seconds": LASTING}
    command = (
        f"python benchmarks/serving_background_simulation.py --seeds {options.seeds} --seconds {options.seconds:g}"
    )
    said = {"command": command, "device_seconds": device, "mean_alone_ms": 1e3 * mean_alone(), "measured_noise": noise}
    options.output.write_text(json.dumps({**said, "rows": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
