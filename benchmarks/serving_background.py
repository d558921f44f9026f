"""Offline work beside live requests on one encoder: live only, offline only, and both at once.

    python benchmarks/serving_background.py --output benchmarks/results/serving_background.json
    python benchmarks/serving_background.py --encoder stub --output benchmarks/results/serving_background_stub.json
    python benchmarks/serving_background.py --smoke

The encoder is that of `serving_encoder.py` on the CPU, a BERT of 6 layers with random weights (`--model` names the
folder of another); or the NumPy encoder of `batchwright serve --demo`; or the stub of `serving.py`, which sleeps as
long as a model would take, so that other work on the machine disturbs it less. `serving_background_simulation.py` has
the same on a simulated clock. Everything runs in one process with one thread for the encoder. Requests arrive at random
(Poisson) with lognormal lengths; `--load` is the share of the time that the encoder would need for them one at a time.
Offline batches hold 32 texts of similar length, as a plan makes them. The BERT calls `give_way` before every attention
and every feed-forward block, one line of a hook, so that requests run in the middle of an offline batch; with `--whole`
it does not, and parts of the work must be short enough for the requests. Each round measures the three arms one after
the other, every second round in the other order, and all ratios are taken within a round:

- offline only: the same batches in a plain loop; nothing else runs. This is what a dedicated process would do.
- live only: the batcher without background work.
- both: the batcher with the offline batches as its background.

`busy` is the share of the time that the encoder ran in "live only". `share` is the offline throughput of "both" in
tokens per second, divided by that of "offline only" times (1 - busy): 1 would mean that every free moment is used as
well as a dedicated process uses it. `added` is the share of requests that missed their deadline in "both" less that in
"live only", in percentage points. The requests of both arms are the same, at the same times: its standard error is that
of pairs, from the requests that missed in one arm and not in the other. `slow` is real over predicted seconds of all
calls in "both", 95 % and 99 %: how quiet the machine was. The first 10 s of each arm do not count for misses.

The defaults take 15 minutes and are meant for a machine on which nothing else runs. `--resume` adds rounds to those of
an output, with its rate and deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from serving_encoder import Encoder, tokens
from serving_load import Load, Stub, drive, poisson, stub_seconds, summarise

from batchwright.serve import Background, Batcher, LatencyModel, give_way
from batchwright.serve.demo import DemoEncoder

Row = dict[str, Any]
OFFLINE_ITEMS = 32
# A batcher that has just begun knows nothing of its requests.
WARM_UP_SECONDS = 10.0
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
    "slow",
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
        self.inner_seconds = 0.0
        self.offline_tokens = 0
        self.calls: list[tuple[int, int, float]] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        start, before = time.perf_counter(), self.inner_seconds
        self.inner_seconds = 0.0
        results = self._encode(items)
        whole = time.perf_counter() - start
        taken = whole - self.inner_seconds  # requests that ran in the middle are calls of their own
        self.inner_seconds = before + whole
        self.seconds += taken
        self.calls.append((len(items), max(map(self.length_of, items)), taken))
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

        encode.calls.clear()
        seconds, offline, start = encode.seconds, encode.offline_tokens, time.perf_counter()
        answers = await drive(ask, load)
        taken = time.perf_counter() - start
        busy = (encode.seconds - seconds) / taken
        beside = (encode.offline_tokens - offline) / taken
        stats = batcher.stats()
    row = summarise(load, answers, [], deadline_ms=deadline_ms)
    late = [value is None or value > deadline_ms / 1e3 for value in answers.seconds]
    ratios = [took / model.predict(num, length) for num, length, took in encode.calls]
    slow = dict(zip(("p50", "p95", "p99"), np.percentile(ratios, [50, 95, 99]).tolist(), strict=True))
    said = {"background": stats.background, "real_over_predicted": slow}
    return {"busy": busy, "offline_tokens_per_s": beside, "seconds": taken, **row, **said, "late": late}


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
    alone = offline_only(encode, options.offline_seconds, seed)
    arms: dict[str, Row] = {}
    for name in ("live only", "both") if seed % 2 else ("both", "live only"):
        model = LatencyModel.from_json(model_text)  # both arms begin with what the warm-up taught
        offline_seed = seed if name == "both" else None
        arms[name] = asyncio.run(live(encode, load, model, options.deadline_ms, offline_seed))
    return {"offline_alone": alone, **compare(load, arms, alone)}


def compare(load: Load, arms: dict[str, Row], alone: float) -> Row:
    """Return the figures of a round; misses are counted request by request."""
    counted = load.arrivals >= WARM_UP_SECONDS
    without, beside = (np.array(arms[name].pop("late"))[counted] for name in ("live only", "both"))
    busy, tokens_per_s = arms["live only"]["busy"], arms["both"]["offline_tokens_per_s"]
    return {
        "busy": busy,
        "offline_beside": tokens_per_s,
        "share": tokens_per_s / (alone * (1 - busy)),
        "p99_ms": [arms["live only"]["p99_ms"], arms["both"]["p99_ms"]],
        "missed": [float(without.mean()), float(beside.mean())],
        "added_points": 100 * float(beside.mean() - without.mean()),
        "only_beside": int((beside & ~without).sum()),
        "only_alone": int((without & ~beside).sum()),
        "num_requests": len(without),
        "arms": arms,
    }


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
    parser.add_argument("--model", help="folder of a sentence encoder; else random weights of its shape")
    parser.add_argument("--whole", action="store_true", help="no requests in the middle of a batch of the BERT")
    parser.add_argument("--load", type=float, default=0.3, help="share of the time that requests need one at a time")
    parser.add_argument("--seconds", type=float, default=140.0, help="of each arm")
    parser.add_argument("--offline-seconds", type=float, default=12.0, help='of the arm "offline only"')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one short round of the stub")
    parser.add_argument("--resume", action="store_true", help="add rounds to those of the output")
    parser.add_argument("--deadline-ms", type=float, help="default: 10 times the mean time of one text")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.encoder, options.seconds, options.offline_seconds, options.rounds = "stub", 12.0, 1.0, 1
    return options


def main() -> None:
    options = parse()
    encoders = {"bert": lambda: gives_way(Encoder("cpu", options.model)), "demo": DemoEncoder, "stub": Stub}
    if options.whole:
        encoders["bert"] = lambda: Encoder("cpu", options.model)
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
    options.time_model = warm_up(encode)
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
        "encoder": options.encoder,
        "model": options.model or "random, 6 layers of 384",
        "gives_way": options.encoder == "bert" and not options.whole,
    }
    said |= {"device": platform.machine(), "one_alone_ms": alone * 1e3, "deadline_ms": options.deadline_ms}
    said |= {"rate": options.rate, "load": options.load, "seconds": options.seconds}
    medians = {key: statistics.median(row[key] for row in rows) for key in ("busy", "share", "added_points")}
    added, error = _pooled_added(rows)
    summary = {"medians": medians, "added_points_over_all": added, "standard_error_points": error}
    options.output.write_text(json.dumps({**said, **summary, "rounds": rows}, indent=1) + "\n")


def _pooled_added(rows: list[Row]) -> tuple[float, float]:
    """Return the added misses over all rounds in points, and their standard error."""
    total, more, fewer = (sum(row[key] for row in rows) for key in ("num_requests", "only_beside", "only_alone"))
    # Of pairs: each request adds 1, 0 or -1. None at all is taken for one, since it cannot be told from one.
    error = math.sqrt(max(more + fewer, 1) - (more - fewer) ** 2 / total) / total
    return 100 * (more - fewer) / total, 100 * error


def gives_way(encoder: Encoder) -> Encoder:
    """Have a BERT look for requests before every attention and every feed-forward block."""
    for layer in encoder.model.encoder.layer:
        for block in (layer, layer.intermediate):
            block.register_forward_pre_hook(lambda *_: give_way())
    return encoder


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
        "{p95:.2f}, {p99:.2f}".format(**row["arms"]["both"]["real_over_predicted"]),
    ]
    return " | ".join(figures)


if __name__ == "__main__":
    main()
