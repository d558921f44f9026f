"""The device, the requests and the clock of the serving benchmark."""

from __future__ import annotations

import asyncio
import csv
import datetime
import gzip
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

DEADLINE_MS = 50.0
WARM_UP_SECONDS = 1.0
# What is still open so long after the last arrival has missed its deadline in any case.
GRACE_SECONDS = 3.0
MEDIAN_LENGTH, MAX_LENGTH = 32, 512
# The control without mixed lengths: the mean of the lognormal ones.
CONSTANT_LENGTH = 43

Ask = Callable[[int], Awaitable[int]]


class Stub:
    """A model that takes 4 ms and 0.25 ms per item of 64 padded tokens; it sleeps, so only waiting is measured."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, lengths: Sequence[int]) -> list[int]:
        self.batches.append(len(lengths))
        time.sleep(stub_seconds(len(lengths), max(lengths)))
        return list(lengths)


def stub_seconds(num_items: int, length: float) -> float:
    return 0.004 + 0.00025 * num_items * length / 64


@dataclass(frozen=True)
class Load:
    """When requests are meant to arrive, in seconds, and how long each is."""

    name: str
    arrivals: np.ndarray
    lengths: np.ndarray


def poisson(rate: float, seconds: float, seed: int, *, constant: bool = False) -> Load:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    drawn = np.exp(rng.normal(np.log(MEDIAN_LENGTH), 0.8, len(arrivals)))
    lengths = np.full(len(arrivals), CONSTANT_LENGTH) if constant else np.clip(np.round(drawn), 1, MAX_LENGTH)
    return Load("constant" if constant else "lognormal", arrivals, lengths.astype(int))


def trace(path: Path, rate: float, seconds: float, seed: int) -> Load:
    """Real arrivals, sped up to a rate; lengths scaled to the same median as the drawn ones."""
    times, lengths = read_trace(path)
    count = min(int(rate * seconds), len(times))
    start = np.random.default_rng(seed).integers(0, len(times) - count + 1)
    chosen = times[start : start + count] - times[start]
    scaled = np.clip(np.round(lengths * MEDIAN_LENGTH / np.median(lengths)), 1, MAX_LENGTH).astype(int)
    arrivals = chosen * (count / rate) / max(chosen[-1], 1e-9)
    return Load(path.name.split(".")[0], arrivals, scaled[start : start + count])


def read_trace(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # Seven digits of a second are one more than Python reads.
    stamps = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return np.array(stamps), np.array([int(row["ContextTokens"]) for row in rows], dtype=float)


@dataclass
class Answers:
    """Seconds from the intended arrival to the answer, None where there was none, and to the refusal, and its kind."""

    seconds: list[float | None]
    errors: Counter[str]
    lag_seconds: float = 0.0
    refusals: list[float] = field(default_factory=list)


async def drive(ask: Ask, load: Load) -> Answers:
    """Submit every request when it is due, whatever became of the earlier ones."""
    answers = Answers([None] * len(load.arrivals), Counter())
    lags = []
    loop = asyncio.get_running_loop()
    start = loop.time() + 0.05

    async def one(index: int, due: float, length: int) -> None:
        try:
            result = await ask(length)
        except Exception as error:  # shed, refused or failed: it has missed its deadline
            answers.errors[type(error).__name__] += 1
            answers.refusals.append(loop.time() - due)
            return
        assert result == length, "an answer went to the wrong caller"
        answers.seconds[index] = loop.time() - due

    tasks = set()
    for index, (arrival, length) in enumerate(zip(load.arrivals.tolist(), load.lengths.tolist(), strict=True)):
        due = start + arrival
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        lags.append(loop.time() - due)
        task = loop.create_task(one(index, due, length))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)
    answers.errors["unfinished"] += len(tasks)
    for task in list(tasks):
        task.cancel()
    answers.lag_seconds = float(np.quantile(lags, 0.99))
    return answers


def summarise(
    load: Load, answers: Answers, batches: Sequence[int], *, deadline_ms: float = DEADLINE_MS
) -> dict[str, Any]:
    """Figures over the requests that arrived after the warm-up."""
    counted = [value for value, at in zip(answers.seconds, load.arrivals, strict=True) if at >= WARM_UP_SECONDS]
    seconds = float(load.arrivals[-1]) - WARM_UP_SECONDS
    done = np.array([value for value in counted if value is not None])
    in_time = int((done <= deadline_ms / 1e3).sum())
    return {
        "p50_ms": float(np.percentile(done, 50) * 1e3) if len(done) else None,
        "p99_ms": float(np.percentile(done, 99) * 1e3) if len(done) else None,
        "throughput": len(done) / seconds,
        "goodput": in_time / seconds,
        "missed": 1 - in_time / len(counted),
        "refusal_p50_ms": float(np.percentile(answers.refusals, 50) * 1e3) if answers.refusals else None,
        "mean_batch": float(np.mean(batches)) if batches else 0.0,
        "load_lag_p99_ms": answers.lag_seconds * 1e3,
        "errors": {name: count for name, count in answers.errors.items() if count},
    }
