"""Offline work beside live requests on one encoder: live only, offline only, and both at once.

    python benchmarks/serving_background.py --output benchmarks/results/serving_background.json
    python benchmarks/serving_background.py --encoder stub --output benchmarks/results/serving_background_stub.json
    python benchmarks/serving_background.py --simulate --output benchmarks/results/serving_background_simulated.json

The encoder is that of `serving_encoder.py` on the CPU, a BERT of 6 layers with random weights (`--model` names the
folder of another); or the NumPy encoder of `batchwright serve --demo`; or the stub of `serving.py`, which sleeps as
long as a model would take, so that other work on the machine disturbs it less. `--simulate` has no clock but a
simulated one: the decisions of the batcher with the seconds of the stub, each varied by a lognormal factor of 15 %, so
that it shows the rule without the machine. Everything runs in one process with
one thread for the encoder. Requests arrive at random (Poisson) with lognormal lengths; `--load` is the share of the
time that the encoder would need for them one at a time. Offline batches hold 32 texts of similar length, as a plan
makes them. Each round measures the three arms one after the other, and all ratios are taken within a round:

- offline only: the same batches in a plain loop; nothing else runs. This is what a dedicated process would do.
- live only: the batcher without background work.
- both: the batcher with the offline batches as its background.

`busy` is the share of the time that the encoder ran in "live only". `share` is the offline throughput of "both" in
tokens per second, divided by that of "offline only" times (1 - busy): 1 would mean that every free moment is used as
well as a dedicated process uses it. `added` is the share of requests that missed their deadline in "both" less that in
"live only", in percentage points; its standard error takes the misses of both arms for independent.

`--resume` adds rounds to those of an output, with its rate and deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import platform
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from serving_encoder import Encoder, tokens
from serving_load import Answers, Load, Stub, drive, poisson, stub_seconds, summarise

from batchwright.serve import Background, Batcher, LatencyModel, Settings
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.request import Request
from batchwright.serve._engine.units import Units
from batchwright.serve._engine.work import Job, Work
from batchwright.serve.demo import DemoEncoder

Row = dict[str, Any]
OFFLINE_ITEMS = 32
COLUMNS = (
    "busy",
    "offline tokens/s alone",
    "beside",
    "share",
    "p99 ms alone",
    "beside",
    "missed alone",
    "beside",
    "added",
)


class OfflineTokens(list[int]):
    """Token ids of the offline work, so that the encoder can count them apart from requests."""


class OfflineText(str):
    """A text of the offline work."""


class OfflineLength(int):
    """A length of the offline work, which is all that the stub needs."""


OFFLINE = (OfflineTokens, OfflineText, OfflineLength)
# What makes an item of a length: for requests, and for the offline work.
Maker = Callable[[int], Any]
MAKERS: dict[str, tuple[Maker, Maker, Callable[[Any], int]]] = {
    "bert": (tokens, lambda length: OfflineTokens(tokens(length)), len),
    "demo": (lambda length: "x" * length, lambda length: OfflineText("x" * length), len),
    "stub": (int, OfflineLength, int),
}


class Timed:
    """An encoder that notes how long it ran, and how much offline work it did."""

    def __init__(self, name: str, encode: Callable[[list[Any]], list[Any]]) -> None:
        self._encode = encode
        self.live, self.offline, self.length_of = MAKERS[name]
        self.seconds = 0.0
        self.offline_tokens = 0

    def __call__(self, items: list[Any]) -> list[Any]:
        start = time.perf_counter()
        results = self._encode(items)
        self.seconds += time.perf_counter() - start
        self.offline_tokens += sum(self.length_of(item) for item in items if isinstance(item, OFFLINE))
        return results


def offline_batches(make: Maker, seed: int) -> Iterator[list[Any]]:
    """Batches of similar length without end, in random order, from texts whose lengths are those of the requests."""
    rng = np.random.default_rng(seed)
    while True:
        lengths = np.sort(poisson(1.0, 64 * OFFLINE_ITEMS, int(rng.integers(2**31))).lengths)
        for place in rng.permutation(64):
            yield [make(int(length)) for length in lengths[place * OFFLINE_ITEMS : (place + 1) * OFFLINE_ITEMS]]


def offline_only(encode: Timed, seconds: float, seed: int) -> float:
    """Return the tokens per second of a plain loop."""
    before, start = encode.offline_tokens, time.perf_counter()
    for batch in offline_batches(encode.offline, seed):
        encode(batch)
        if time.perf_counter() - start >= seconds:
            break
    return (encode.offline_tokens - before) / (time.perf_counter() - start)


async def live(encode: Timed, load: Load, model: LatencyModel, deadline_ms: float, seed: int | None) -> Row:
    """Serve a load, with offline work beside it if there is a seed for that."""
    work: Background[Any, Any] | None = None if seed is None else Background(offline_batches(encode.offline, seed))
    async with Batcher(
        encode,
        background=work,
        deadline_ms=deadline_ms,
        length_of=encode.length_of,
        max_queue=100_000,
        time_model=model,
    ) as batcher:
        if work is not None:
            threading.Thread(target=_drain, args=(work,), daemon=True).start()

        async def ask(length: int) -> int:
            await batcher.submit(encode.live(length))
            return length

        seconds, offline, start = encode.seconds, encode.offline_tokens, time.perf_counter()
        answers = await drive(ask, load)
        taken = time.perf_counter() - start
        busy = (encode.seconds - seconds) / taken
        beside = (encode.offline_tokens - offline) / taken
    row = summarise(load, answers, [], deadline_ms=deadline_ms)
    return {"busy": busy, "offline_tokens_per_s": beside, "seconds": taken, **row}


def simulate(load: Load, model: LatencyModel, deadline_ms: float, seed: int, *, offline: bool) -> Row:
    """Do what ``live`` does with a clock that only calls and arrivals move."""
    units = Units(itertools.islice(offline_batches(int, seed), 20_000 if offline else 0), max_ahead=20_000)
    units.read(int, lambda: None)
    work = Work(Core(Settings(deadline_ms=deadline_ms, max_queue=100_000), model), device=None, background=units)
    rng = np.random.default_rng(seed)
    now = busy = 0.0
    tokens_done, ends = 0, dict[Request, float]()
    waiting = [
        Request(length, length, at, at + deadline_ms / 1e3)
        for at, length in zip(load.arrivals.tolist(), load.lengths.tolist(), strict=True)
    ][::-1]
    requests = waiting[::-1]
    while waiting or work.core.num_waiting:
        while waiting and waiting[-1].arrival <= now:
            work.add(waiting.pop())
        turn, part = work.take(now)
        job: Job | None = turn.call or part
        if job is None:
            now = waiting[-1].arrival if waiting else now
            continue
        while job is not None:
            lengths = [int(item) for item in job.items]
            seconds = stub_seconds(len(lengths), max(lengths)) * float(rng.lognormal(0, 0.15))
            now, busy = now + seconds, busy + seconds
            tokens_done += sum(lengths) if job is part else 0
            job, ended = work.complete(job, Outcome(values=lengths), now, seconds)
            ends |= dict.fromkeys((request for request in ended if request.error is None), now)
    answers = Answers([ends[one] - one.arrival if one in ends else None for one in requests], Counter())
    row = summarise(load, answers, [], deadline_ms=deadline_ms)
    return {"busy": busy / now, "offline_tokens_per_s": tokens_done / now, "seconds": now, **row}


def _drain(work: Background[Any, Any]) -> None:
    try:
        for batch in work:
            if batch.error is not None:
                print(f"offline batch {batch.index}: {batch.error!r}")
    except RuntimeError:  # closed at the end of the arm
        return


def measure_round(encode: Timed, options: argparse.Namespace, seed: int) -> Row:
    load = poisson(options.rate, options.seconds, seed)
    model_text = options.time_model.to_json()
    alone = stub_rate(seed) if options.simulate else offline_only(encode, options.offline_seconds, seed)
    arms: dict[str, Row] = {}
    for name in ("live only", "both") if seed % 2 else ("both", "live only"):
        model = LatencyModel.from_json(model_text)  # both arms begin with what the warm-up taught
        if options.simulate:
            arms[name] = simulate(load, model, options.deadline_ms, seed, offline=name == "both")
            continue
        offline_seed = seed if name == "both" else None
        arms[name] = asyncio.run(live(encode, load, model, options.deadline_ms, offline_seed))
    beside = arms["both"]["offline_tokens_per_s"]
    busy = arms["live only"]["busy"]
    return {
        "busy": busy,
        "offline_alone": alone,
        "offline_beside": beside,
        "share": beside / (alone * (1 - busy)),
        "p99_ms": [arms["live only"]["p99_ms"], arms["both"]["p99_ms"]],
        "missed": [arms["live only"]["missed"], arms["both"]["missed"]],
        "added_points": 100 * (arms["both"]["missed"] - arms["live only"]["missed"]),
        "num_requests": len(load.arrivals),
        "arms": arms,
    }


def stub_rate(seed: int) -> float:
    """Return the tokens per second of the stub on offline batches, without the machine."""
    batches = list(itertools.islice(offline_batches(int, seed), 1000))
    return sum(map(sum, batches)) / sum(stub_seconds(len(batch), max(batch)) for batch in batches)


def warm_up(encode: Timed) -> LatencyModel:
    """Return a time model that has seen batches of all sizes."""
    model = LatencyModel()
    rng = np.random.default_rng(5)
    with Batcher(encode, length_of=encode.length_of, time_model=model) as batcher:
        for _ in range(60):
            length = int(rng.choice([8, 16, 32, 64, 128]))
            list(batcher.map([encode.live(length)] * int(rng.integers(1, 17))))
    return model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", choices=tuple(MAKERS), default="bert")
    parser.add_argument("--simulate", action="store_true", help="the decisions only, on a simulated clock")
    parser.add_argument("--model", help="folder of a sentence encoder; else random weights of its shape")
    parser.add_argument("--load", type=float, default=0.3, help="share of the time that requests need one at a time")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm")
    parser.add_argument("--offline-seconds", type=float, help='of the arm "offline only"; default: --seconds')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--resume", action="store_true", help="add rounds to those of the output")
    parser.add_argument("--deadline-ms", type=float, help="default: 10 times the mean time of one text")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.offline_seconds = options.offline_seconds or options.seconds
    return options


def main() -> None:
    options = parse()
    options.encoder = "stub" if options.simulate else options.encoder
    encoders = {"bert": lambda: Encoder("cpu", options.model), "demo": DemoEncoder, "stub": Stub}
    encode = Timed(options.encoder, encoders[options.encoder]())
    alone = _seconds_alone(encode, poisson(100, 2.0, 0).lengths)
    if options.encoder == "stub":  # what it is meant to take: sleeping takes longer on a busy machine
        alone = statistics.fmean(stub_seconds(1, length) for length in poisson(100, 100.0, 0).lengths.tolist())
    options.rate = options.load / alone
    options.deadline_ms = options.deadline_ms or 10e3 * alone
    rows: list[Row] = []
    if options.resume and options.output.exists():
        earlier = json.loads(options.output.read_text())
        rows, options.rate, options.deadline_ms = earlier["rounds"], earlier["rate"], earlier["deadline_ms"]
        alone = earlier["one_alone_ms"] / 1e3
    options.time_model = LatencyModel() if options.simulate else warm_up(encode)
    print(
        f"one text alone {alone * 1e3:.1f} ms, {options.rate:.0f} requests/s, deadline {options.deadline_ms:.0f} ms\n"
    )
    print("| round | " + " | ".join(COLUMNS) + " |\n|" + " --- |" * (1 + len(COLUMNS)))
    for _ in range(options.rounds):
        rows.append(measure_round(encode, options, seed=len(rows) + 1))
        print(f"| {len(rows)} | {_cells(rows[-1])} |", flush=True)
        if options.output:
            report(rows, alone, options)
    share, (added, error) = statistics.median(row["share"] for row in rows), _pooled_added(rows)
    print(
        f"\nmedian share {share:.3f}, added misses {added:.3f} points, standard error {error:.3f}, {len(rows)} rounds"
    )


def report(rows: list[Row], alone: float, options: argparse.Namespace) -> None:
    """Write what was measured so far."""
    said = {
        "encoder": "simulated stub" if options.simulate else options.encoder,
        "model": options.model or "random, 6 layers of 384",
    }
    said |= {"device": platform.machine(), "one_alone_ms": alone * 1e3, "deadline_ms": options.deadline_ms}
    said |= {"rate": options.rate, "load": options.load, "seconds": options.seconds}
    medians = {key: statistics.median(row[key] for row in rows) for key in ("busy", "share", "added_points")}
    added, error = _pooled_added(rows)
    summary = {"medians": medians, "added_points_over_all": added, "standard_error_points": error}
    options.output.write_text(json.dumps({**said, **summary, "rounds": rows}, indent=1) + "\n")


def _pooled_added(rows: list[Row]) -> tuple[float, float]:
    """Return the added misses over all rounds in points, and their standard error."""
    total = sum(row["num_requests"] for row in rows)
    alone, beside = (sum(row["missed"][arm] * row["num_requests"] for row in rows) / total for arm in (0, 1))
    error = math.sqrt((alone * (1 - alone) + beside * (1 - beside)) / total)
    return 100 * (beside - alone), 100 * error


def _seconds_alone(encode: Timed, lengths: np.ndarray) -> float:
    """Return the mean seconds of a text alone, over texts as they will come."""
    times = []
    for length in lengths[:120].tolist():
        start = time.perf_counter()
        encode([encode.live(length)])
        times.append(time.perf_counter() - start)
    return statistics.fmean(times[20:])


def _cells(row: Row) -> str:
    figures = [
        f"{row['busy']:.3f}",
        f"{row['offline_alone']:.0f}",
        f"{row['offline_beside']:.0f}",
        f"{row['share']:.3f}",
        *(f"{value:.1f}" for value in row["p99_ms"]),
        *(f"{100 * value:.2f} %" for value in row["missed"]),
        f"{row['added_points']:+.2f}",
    ]
    return " | ".join(figures)


if __name__ == "__main__":
    main()
