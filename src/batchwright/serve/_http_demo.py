"""The demo: one encoder behind three policies, under the same load that the server makes by itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, final

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from ..errors import BatchwrightError
from ._http_encoder import MAX_LENGTH, DemoEncoder, length_of
from ._http_page import figures_of, page_routes
from .batcher import Batcher
from .http import make_app

POLICIES = ("window", "greedy", "adaptive")
# The load rests when nobody has looked at the page for so long.
REST_SECONDS = 5.0
# Percentiles are taken over the answers of the latest seconds.
RECENT_SECONDS = 5.0
_PROBE_ITEMS = 16


@final
class Arm:
    """One policy: its batcher, and the latency of its answers from the moment they were due to be asked for.

    Args:
        policy: of the batcher.
        encode: what all arms run.
        options: of the batcher.
    """

    def __init__(self, policy: str, encode: Callable[[list[str]], list[Any]], options: dict[str, Any]) -> None:
        self.name = policy
        self.batcher: Batcher[str, Any] = Batcher(encode, policy=policy, length_of=length_of, **options)
        self._latencies: deque[tuple[float, float]] = deque()

    async def ask(self, text: str, due: float) -> None:
        """Ask for an answer that was due to be asked for at ``due``."""
        with contextlib.suppress(BatchwrightError):  # given up or refused: the batcher counts it
            await self.batcher.submit(text)
            now = time.monotonic()
            self._latencies.append((now, now - due))

    def figures(self) -> dict[str, Any]:
        """Return what the page draws."""
        oldest = time.monotonic() - RECENT_SECONDS
        while self._latencies and self._latencies[0][0] < oldest:
            self._latencies.popleft()
        figures = figures_of(self.name, self.batcher.stats())
        seconds = [latency for _, latency in self._latencies]
        p50, p99 = np.percentile(seconds, [50, 99]).tolist() if seconds else (None, None)
        return figures | {"p50_ms": p50 and p50 * 1e3, "p99_ms": p99 and p99 * 1e3}


@final
class Demo:
    """Three arms and the load on them.

    Args:
        encoder: what is served.
        deadline_ms: None: three times what a batch of 16 takes here, from 50 to 250.
        seed: of arrivals and texts.
        options: of the batchers.
    """

    def __init__(
        self, encoder: DemoEncoder, *, deadline_ms: float | None = None, seed: int = 0, **options: Any
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self.capacity, batch_seconds = _measure(encoder, [self.text() for _ in range(_PROBE_ITEMS)])
        self.deadline_ms = deadline_ms or min(250.0, max(50.0, 10.0 * math.ceil(300 * batch_seconds)))
        self.max_rate = _round(4 * self.capacity)
        self.rate = _round(0.5 * self.capacity)
        self.encoder = encoder
        self.arms = [Arm(policy, encoder, {"deadline_ms": self.deadline_ms, **options}) for policy in POLICIES]
        self._looked = -math.inf
        self._changed = asyncio.Event()

    def text(self) -> str:
        """Return a text to encode: most are short, a few are long."""
        return "x" * int(np.clip(self._rng.lognormal(3.7, 0.8), 4, MAX_LENGTH))

    def figures(self) -> dict[str, Any]:
        """Return what ``/live`` says, and note that somebody looks."""
        self._looked = time.monotonic()
        self._changed.set()
        return {
            "arms": [arm.figures() for arm in self.arms],
            "deadline_ms": self.deadline_ms,
            "load": {
                "rate": self.rate,
                "max_rate": self.max_rate,
                "max_items": self.arms[0].batcher.settings.max_items,
                "encoder": self.encoder.name,
            },
        }

    def set_rate(self, rate: float) -> None:
        """Change the requests a second that each arm gets."""
        self.rate = rate
        self._changed.set()

    async def drive(self) -> None:
        """Ask all arms the same, at random moments: open loop, whether or not answers come."""
        asked: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while True:
            if not self.rate or time.monotonic() - self._looked > REST_SECONDS:
                self._changed.clear()
                await self._changed.wait()
                due = time.monotonic()
                continue
            due = max(due + self._rng.exponential(1 / self.rate), time.monotonic() - 1)
            await self._sleep_until(due)
            text = self.text()
            for arm in self.arms:
                task = asyncio.create_task(arm.ask(text, due))
                asked.add(task)
                task.add_done_callback(asked.discard)

    async def _sleep_until(self, due: float) -> None:
        """Sleep, but no longer than until the rate changes: at a low one the next arrival may be far away."""
        rate = self.rate
        while (left := due - time.monotonic()) > 0 and self.rate == rate:
            await asyncio.sleep(min(left, 0.25))

    async def close(self) -> None:
        """Close every batcher."""
        await asyncio.gather(*(arm.batcher.close(drain=False, timeout_seconds=5) for arm in self.arms))


def make_demo_app(demo: Demo) -> Starlette:
    """Return the app of the demo: the page with its slider; ``POST /`` goes to the adaptive arm."""

    async def set_load(request: Request) -> Response:
        # A form of another site cannot send this type, so only the page itself moves the slider.
        if request.headers.get("Content-Type") != "application/json":
            return JSONResponse({"message": "send application/json"}, 415)
        rate = _read_rate(await request.body(), demo.max_rate)
        if rate is None:
            return JSONResponse({"message": f"rate must be a number from 0 to {demo.max_rate:g}"}, 400)
        demo.set_rate(rate)
        return JSONResponse({"rate": rate})

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        driver = asyncio.create_task(demo.drive())
        yield
        driver.cancel()
        await demo.close()

    served = make_app(demo.arms[-1].batcher, page=False)
    routes = [*page_routes(demo.figures), Route("/load", set_load, methods=["POST"]), Mount("/", served)]
    return Starlette(routes=routes, lifespan=lifespan)


def _read_rate(body: bytes, max_rate: float) -> float | None:
    try:
        rate = float(body)
    except ValueError:
        return None
    return rate if 0 <= rate <= max_rate else None


def _measure(encoder: DemoEncoder, texts: list[str]) -> tuple[float, float]:
    """Return items a second of each arm when all are busy at once, and the seconds of a batch then."""

    def run_for(seconds: float) -> int:
        encoder(texts)
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            encoder(texts)
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(len(POLICIES)) as pool:
        start = time.monotonic()
        counts = list(pool.map(run_for, [0.6] * len(POLICIES)))
        seconds = time.monotonic() - start
    num_batches = max(1, sum(counts)) / len(POLICIES)
    return num_batches * len(texts) / seconds, seconds / num_batches


def _round(rate: float) -> float:
    """Return a rate with two digits.

    >>> _round(1234.5), _round(87.4)
    (1200.0, 87.0)
    """
    step = 10 ** max(0, math.floor(math.log10(rate)) - 1)
    return float(max(1, round(rate / step)) * step)
