"""Demo: one encoder, three policies, and the same load on each, which the server makes itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, final

import numpy as np

from ..._optional import is_installed, require
from ...errors import BatchwrightError
from ..batcher import Batcher
from ..http.app import answering_routes
from ..http.limits import Limits
from .encoder import MAX_LENGTH, DemoEncoder, length_of

if is_installed("starlette") and is_installed("prometheus_client"):  # otherwise Demo says what to install
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from ..http._answering import read_body
    from ..http._errors import Refused, error_response
    from ..http._guards import guarded_app
    from ..http._page import figures_of, page_routes

POLICIES = ("window", "greedy", "adaptive")
# The load pauses if nobody has looked at the page for this long.
REST_SECONDS = 5.0
# Latencies count from this long after the load has begun: the page is drawn first, on the same processor.
SETTLE_SECONDS = 2.0
# Percentiles are taken over the answers of this many latest seconds.
RECENT_SECONDS = 5.0
# The size of the batch that measures how fast this machine is.
_PROBE_ITEMS = 16
# How many times each policy answers such a batch, and its parts, before anybody looks; its time model is then in use.
_WARM_UP_ROUNDS = 4
# A rate has few digits.
_MAX_RATE_BYTES = 64


@final
class Arm:
    """One policy: its batcher, and the latency of its answers, measured from when each request was due.

    Args:
        policy: the policy of the batcher.
        encode: the function that all arms run.
        options: options of the batcher.
    """

    def __init__(self, policy: str, encode: Callable[[list[str]], list[Any]], options: dict[str, Any]) -> None:
        self.name = policy
        self.batcher: Batcher[str, Any] = Batcher(encode, policy=policy, length_of=length_of, **options)
        self._latencies: deque[tuple[float, float]] = deque()

    async def ask(self, text: str, due: float, *, is_settled: bool = True) -> None:
        """Submit a request that was due at ``due``; only a load that has settled counts for the latency."""
        with contextlib.suppress(BatchwrightError):  # shed or refused: the batcher counts it
            await self.batcher.submit(text)
            now = time.monotonic()
            if is_settled:
                self._latencies.append((now, now - due))

    def figures(self) -> dict[str, Any]:
        """Return the figures that the page draws."""
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
        encoder: the function that is served.
        deadline_ms: the deadline of all requests; None: three times what a batch of 16 takes here, from 50 to 250.
        seed: seed of the arrivals and texts.
        options: options of the batchers.
    """

    def __init__(
        self, encoder: DemoEncoder, *, deadline_ms: float | None = None, seed: int = 0, **options: Any
    ) -> None:
        for package in ("starlette", "prometheus_client"):
            require(package, extra="serve")
        self._rng = np.random.default_rng(seed)
        self.capacity, batch_seconds = _measure(encoder, [self.text() for _ in range(_PROBE_ITEMS)])
        self.deadline_ms = deadline_ms or min(250.0, max(50.0, 10.0 * math.ceil(300 * batch_seconds)))
        self.max_rate = _round(4 * self.capacity)
        self.rate = _round(0.5 * self.capacity)
        self.arms = [Arm(policy, encoder, {"deadline_ms": self.deadline_ms, **options}) for policy in POLICIES]
        self._looked = -math.inf
        self._changed = asyncio.Event()

    def text(self) -> str:
        """Return a text to encode; most are short, a few are long."""
        return "x" * int(np.clip(self._rng.lognormal(3.7, 0.8), 4, MAX_LENGTH))

    def figures(self) -> dict[str, Any]:
        """Return the figures of ``/live``, and note that somebody looks."""
        self._looked = time.monotonic()
        self._changed.set()
        return {
            "arms": [arm.figures() for arm in self.arms],
            "deadline_ms": self.deadline_ms,
            "load": {
                "rate": self.rate,
                "max_rate": self.max_rate,
                "max_items": self.arms[0].batcher.settings.max_items,
            },
        }

    def set_rate(self, rate: float) -> None:
        """Change the number of requests per second that each arm gets."""
        self.rate = rate
        self._changed.set()

    async def warm_up(self) -> None:
        """Answer requests on every arm, so that the plots do not begin with what only first calls take."""
        for num_items in [1, 2, 4, 8, _PROBE_ITEMS] * _WARM_UP_ROUNDS:
            texts = [self.text() for _ in range(num_items)]
            asked = [arm.batcher.submit(text, deadline_ms=math.inf) for arm in self.arms for text in texts]
            await asyncio.gather(*asked)

    async def drive(self) -> None:
        """Send the same requests to all arms at random moments, whether or not answers come (an open loop)."""
        asked: set[asyncio.Task[None]] = set()
        begun = due = time.monotonic()
        while True:
            if not self.rate or time.monotonic() - self._looked > REST_SECONDS:
                self._changed.clear()
                await self._changed.wait()
                begun = due = time.monotonic()
                continue
            due = max(due + self._rng.exponential(1 / self.rate), time.monotonic() - 1)
            await self._sleep_until(due)
            text = self.text()
            for arm in self.arms:
                task = asyncio.create_task(arm.ask(text, due, is_settled=due - begun >= SETTLE_SECONDS))
                asked.add(task)
                task.add_done_callback(asked.discard)

    async def _sleep_until(self, due: float) -> None:
        """Sleep, but only until the rate changes: at a low rate the next arrival may be far away."""
        rate = self.rate
        await asyncio.sleep(0)  # a load that cannot keep up must still let the answers and the page through
        while (left := due - time.monotonic()) > 0 and self.rate == rate:
            await asyncio.sleep(min(left, 0.25))

    async def close(self) -> None:
        """Close every batcher."""
        await asyncio.gather(*(arm.batcher.close(drain=False, timeout_seconds=5) for arm in self.arms))


def make_demo_app(
    demo: Demo,
    *,
    limits: Limits | None = None,
    allow_hosts: Iterable[str] | None = None,
    allow_origins: Iterable[str] = (),
) -> Starlette:
    """Return the app of the demo: the page with its slider; ``POST /`` is answered by the adaptive arm.

    Args:
        demo: the arms and their load.
        limits: as in ``make_app``, like the other options.
        allow_hosts: host names to answer to.
        allow_origins: other sites whose pages may send requests.
    """

    async def set_load(request: Request) -> Response:
        # A form on another site cannot send this type, so only the page itself moves the slider.
        if request.headers.get("Content-Type") != "application/json":
            return error_response(Refused(415, "send application/json"))
        try:
            rate = _read_rate(await read_body(request, _MAX_RATE_BYTES), demo.max_rate)
        except Refused as error:
            return error_response(error)
        demo.set_rate(rate)
        return JSONResponse({"rate": rate})

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        await demo.warm_up()
        driver = asyncio.create_task(demo.drive())
        yield
        driver.cancel()
        await demo.close()

    limits = Limits() if limits is None else limits
    answering = answering_routes({"": demo.arms[-1].batcher}, limits=limits)
    routes = [*page_routes(demo.figures), Route("/load", set_load, methods=["POST"]), *answering]
    return guarded_app(routes, lifespan, limits, allow_hosts=allow_hosts, allow_origins=allow_origins)


def _read_rate(body: bytes, max_rate: float) -> float:
    with contextlib.suppress(ValueError):
        rate = float(body)
        if 0 <= rate <= max_rate:
            return rate
    raise Refused(400, f"rate must be a number from 0 to {max_rate:g}")


def _measure(encoder: DemoEncoder, texts: list[str]) -> tuple[float, float]:
    """Return the items per second of each arm while all are busy, and the seconds of a batch then."""

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
    """Return a rate as a whole number of at most two digits and zeros.

    >>> _round(1234.5), _round(87.4)
    (1200.0, 87.0)
    """
    return float(max(1, round(float(f"{rate:.2g}"))))
