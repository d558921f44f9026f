"""An encoder over new lengths: eager and as CUDA graphs of a few shapes, alone and behind a batcher.

    python benchmarks/gpu_encoder.py --output benchmarks/results/gpu_encoder.json
    python benchmarks/gpu_encoder.py --smoke

A BERT of the base shape in half precision with random weights and torch's default attention, in one process. The eager
arm pads a batch to its longest text; the graphed arm is ``batchwright.step.Encoder``, whose shapes are all captured
before the first request. Three phases, each for both arms:

- visits: the first call of a number of texts and a length, and the median of five later ones, host to host;
- load: open-loop requests at ``--rate``, with lognormal lengths (median 32), a deadline, and the adaptive policy; an
  answer after the deadline is missed, the first second is not counted;
- closed: ``--callers`` that each submit the next text when they have the answer to the last one.

Vectors of both arms are compared too. Rows that the output file holds already are not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _resuming import check_alike, read_report
from serving_load import drive, poisson, summarise

Row = dict[str, Any]
ARMS = ("eager", "graphed")
PHASES = ("visits", "load", "closed")
# (texts, length): new to both arms when they come.
VISITS = (
    (1, 19),
    (1, 77),
    (2, 45),
    (4, 23),
    (4, 131),
    (8, 61),
    (12, 37),
    (16, 90),
    (24, 29),
    (31, 118),
    (48, 53),
    (64, 70),
)


def tokens(length: int) -> list[int]:
    return [1000 + place % 20_000 for place in range(length)]


class Eager:
    """Token ids to unit vectors, padded to the longest text of the batch."""

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model, device
        self.batches: list[int] = []

    def __call__(self, texts: list[list[int]]) -> list[Any]:
        import torch

        self.batches.append(len(texts))
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        ids = ids.to(self._device)
        mask = ids > 0
        with torch.inference_mode():
            hidden = self._model(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return list(torch.nn.functional.normalize(mean, dim=-1).cpu().numpy())


class Graphed:
    """The same, by the library."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        from batchwright.step import Encoder

        self.batches: list[int] = []
        self.encoder = Encoder(
            model, None, normalize=True, max_length=options.max_length, max_items=options.max_items, graphs="auto"
        )
        start = time.perf_counter()
        self.summary = self.encoder.warm_up()
        self.warm_up_seconds = time.perf_counter() - start

    def __call__(self, texts: list[list[int]]) -> list[Any]:
        self.batches.append(len(texts))
        return self.encoder(texts)


def make_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import BertConfig, BertModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(**small if options.smoke else {})).eval()
    return model if options.smoke else model.half().cuda()


def visits(run: Callable[[list[list[int]]], Any], options: argparse.Namespace) -> Row:
    """Time calls of sizes that never came before, and the same again."""
    for length in (8, 16):  # the first calls of a process load kernels
        run([tokens(length)])
    rows = []
    for num, length in VISITS[: 3 if options.smoke else None]:
        length = min(length, options.max_length)
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            run([tokens(length)] * num)
            seconds.append(time.perf_counter() - start)
        rows.append(
            {
                "texts": num,
                "length": length,
                "first_ms": 1e3 * seconds[0],
                "later_ms": 1e3 * statistics.median(seconds[1:]),
            }
        )
    return {
        "first_ms": statistics.median(row["first_ms"] for row in rows),
        "worst_first_ms": max(row["first_ms"] for row in rows),
        "later_ms": statistics.median(row["later_ms"] for row in rows),
        "sizes": rows,
    }


def make_batcher(arm: Any, options: argparse.Namespace, deadline_ms: float | None) -> Any:
    from batchwright.serve import Batcher

    shared = {"deadline_ms": deadline_ms, "max_queue": 100_000}
    if isinstance(arm, Eager):
        return Batcher(arm, length_of=len, max_items=options.max_items, **shared)
    return arm.encoder.batcher(**shared)


async def load(arm: Any, options: argparse.Namespace) -> Row:
    """Ask at a fixed rate, whatever became of the earlier requests."""
    requests = poisson(options.rate, options.seconds, seed=1)
    async with make_batcher(arm, options, options.deadline_ms) as batcher:

        async def ask(length: int) -> int:
            await batcher.submit(tokens(min(length, options.max_length)))
            return length

        for length in (8, 16, 32, 64, 128) * 2:  # the first calls of a process are slow for every arm
            try:
                await ask(length)
            except Exception as error:
                print(f"warm-up: {error!r}")
        answers = await drive(ask, requests)
        stats = batcher.stats()
    row = summarise(requests, answers, [], deadline_ms=options.deadline_ms)
    return {**row, "rate": options.rate, "deadline_ms": options.deadline_ms, "mean_batch": stats.mean_items}


async def closed(arm: Any, options: argparse.Namespace) -> Row:
    """Let callers ask again and again, and count the answers of the time after the first second."""
    lengths = poisson(1000, 60, seed=2).lengths.clip(max=options.max_length).tolist()
    done: list[float] = []
    async with make_batcher(arm, options, None) as batcher:
        end = time.perf_counter() + 1 + options.closed_seconds

        async def caller(place: int) -> None:
            while time.perf_counter() < end:
                await batcher.submit(tokens(lengths[place % len(lengths)]))
                done.append(time.perf_counter())
                place += options.callers

        await asyncio.gather(*(caller(place) for place in range(options.callers)))
        stats = batcher.stats()
    counted = [at for at in done if end - options.closed_seconds <= at <= end]
    return {
        "callers": options.callers,
        "throughput": len(counted) / options.closed_seconds,
        "mean_batch": stats.mean_items,
    }


def difference(eager: Any, graphed: Any, options: argparse.Namespace) -> Row:
    """Return how far the vectors of both arms are apart, each text once alone and once in a batch."""
    lengths = np.random.default_rng(3).integers(1, options.max_length + 1, 64).tolist()
    texts = [tokens(length) for length in lengths]
    alone = np.stack([eager([text])[0] for text in texts])
    return {
        "eager_batch": float(np.abs(np.stack(eager(texts)) - alone).max()),
        "graphed_batch": float(np.abs(np.stack(graphed(texts)) - alone).max()),
        "graphed_alone": float(np.abs(np.stack([graphed([text])[0] for text in texts]) - alone).max()),
    }


def measure(phase: str, arm: Any, options: argparse.Namespace) -> Row:
    if phase == "visits":
        return visits(arm, options)
    return asyncio.run((load if phase == "load" else closed)(arm, options))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, where nothing is captured")
    parser.add_argument("--rate", type=float, default=486.0, help="requests per second of the open loop")
    parser.add_argument("--deadline-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=9.0, help="of load, the first not counted")
    parser.add_argument("--closed-seconds", type=float, default=5.0)
    parser.add_argument("--callers", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--max-items", type=int, default=64)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.rate, options.seconds, options.closed_seconds = 60.0, 1.6, 0.5
        options.callers, options.max_length, options.max_items = 8, 64, 8
    return options


def main() -> None:
    options = parse()
    import torch
    import transformers

    if not options.smoke and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --smoke runs a tiny model on the CPU")
    about = {
        "device": "cpu" if options.smoke else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(options, name) for name in ("max_length", "max_items", "rate", "deadline_ms", "callers")},
    }
    report = read_report(options.output)
    check_alike(report, about, list(about))
    report["commands"].append(about)
    model = make_model(options)
    arms = {"eager": Eager(model, "cpu" if options.smoke else "cuda")}
    done = {(row["phase"], row["arm"]) for row in report["rows"]}

    def add(row: Row) -> None:
        report["rows"].append(row)
        short = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
        print({name: value for name, value in short.items() if name not in ("sizes", "summary")}, flush=True)
        if options.output:
            options.output.write_text(json.dumps(report, indent=1) + "\n")

    for arm in ARMS:
        if arm == "graphed":
            arms[arm] = made = Graphed(model, options)
            if ("warm_up", arm) not in done:
                summary = made.summary.to_dict()
                figures = {name: summary[name] for name in ("num_captures", "pool_bytes", "capture_seconds", "reasons")}
                add(
                    {
                        "phase": "warm_up",
                        "arm": arm,
                        "seconds": made.warm_up_seconds,
                        "shapes": len(made.encoder.shapes),
                        **figures,
                    }
                )
        for phase in PHASES:
            if (phase, arm) not in done:
                add({"phase": phase, "arm": arm, **measure(phase, arms[arm], options)})
    if ("difference", "both") not in done:
        add({"phase": "difference", "arm": "both", **difference(arms["eager"], arms["graphed"], options)})
    print(arms["graphed"].encoder.summary())


if __name__ == "__main__":
    main()
