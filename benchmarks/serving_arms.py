"""The batchers that the serving benchmark compares: ours and, where they are installed, others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from serving_load import DEADLINE_MS, Ask, Stub, stub_seconds

from batchwright.serve import Batcher, LatencyModel

MAX_ITEMS, WINDOW_MS = 64, 10.0


@dataclass(frozen=True)
class Arm:
    """A batcher to measure; ``make`` is an async context that gives a function of one request."""

    title: str
    make: Callable[[Stub], Any]
    distribution: str | None = None


def _ours(**options: Any) -> Callable[[Stub], Any]:
    @asynccontextmanager
    async def make(stub: Stub) -> Any:
        batcher: Batcher[int, int] = Batcher(stub, length_of=int, deadline_ms=DEADLINE_MS, **options)
        yield batcher.submit
        await batcher.close(drain=False)

    return make


def _texts(**options: Any) -> Callable[[Stub], Any]:
    """Texts as they come, without ``length_of``: about four characters per token, by 20 % more or less."""

    @asynccontextmanager
    async def make(stub: Stub) -> Any:
        rng = random.Random(0)

        def run(texts: list[str]) -> list[int]:
            return stub([int(text.partition(" ")[0]) for text in texts])

        batcher: Batcher[str, int] = Batcher(run, deadline_ms=DEADLINE_MS, **options)
        yield lambda length: batcher.submit(f"{length} ".ljust(round(4 * length * rng.lognormvariate(0, 0.2)), "x"))
        await batcher.close(drain=False)

    return make


def _wrong(factor: float) -> Callable[[Stub], Any]:
    constant = stub_seconds(0, 1)
    per_token = stub_seconds(1, 1) - constant
    return _ours(time_model=LatencyModel.fixed(factor * constant, factor * per_token))


def _padded(lengths: list[int]) -> int:
    return len(lengths) * max(lengths)


def _in_thread(stub: Stub) -> tuple[Callable[[Any], Awaitable[list[int]]], concurrent.futures.Executor]:
    """A coroutine function over the stub, which blocks a thread of its own."""
    executor = concurrent.futures.ThreadPoolExecutor(1)

    async def run(items: Any) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(executor, stub, list(items))

    return run, executor


def _pretend_to_be_a_replica() -> None:
    """Ray's queue asks its replica for names and a limit to warn about; it needs nothing else of one."""
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve._private.config import DeploymentConfig
    from ray.serve.context import _set_internal_replica_context
    from ray.serve.schema import ReplicaRank

    _set_internal_replica_context(
        replica_id=ReplicaID("replica", DeploymentID("deployment", "app")),
        servable_object=None,
        _deployment_config=DeploymentConfig(max_ongoing_requests=1_000_000),
        rank=ReplicaRank(rank=0, node_rank=0, local_rank=0),
        world_size=1,
    )


def _ray(**options: Any) -> Callable[[Stub], Any]:
    @asynccontextmanager
    async def make(stub: Stub) -> Any:
        from ray import serve

        _pretend_to_be_a_replica()
        run, executor = _in_thread(stub)
        yield serve.batch(batch_wait_timeout_s=WINDOW_MS / 1e3, **options)(run)
        executor.shutdown(wait=False)

    return make


@asynccontextmanager
async def _bentoml(stub: Stub) -> Any:
    from bentoml._internal.marshal.dispatcher import CorkDispatcher

    run, executor = _in_thread(stub)
    dispatcher = CorkDispatcher(
        max_latency_in_ms=int(DEADLINE_MS),
        max_batch_size=MAX_ITEMS,
        fallback=lambda: None,
        get_batch_size=lambda item: 1,
    )
    call = dispatcher(run)

    async def ask(item: int) -> int:
        answer = await call(item)
        if answer is None:
            raise TimeoutError("shed")
        return answer

    yield ask
    dispatcher.shutdown()
    executor.shutdown(wait=False)


@asynccontextmanager
async def _batched(stub: Stub) -> Any:
    from batched import aio

    run, executor = _in_thread(stub)
    yield aio.dynamically(run, batch_size=MAX_ITEMS, timeout_ms=WINDOW_MS)
    executor.shutdown(wait=False)


@asynccontextmanager
async def _async_batcher(stub: Stub) -> Any:
    from async_batcher.batcher import AsyncBatcher

    run, executor = _in_thread(stub)

    class Peer(AsyncBatcher):  # type: ignore[misc]
        async def process_batch(self, batch: list[int]) -> list[int]:
            return await run(batch)

    peer = Peer(max_batch_size=MAX_ITEMS, max_queue_time=WINDOW_MS / 1e3)
    yield peer.process
    await peer.stop(force=True)
    executor.shutdown(wait=False)


@asynccontextmanager
async def _none(stub: Stub) -> Any:
    run, executor = _in_thread(stub)

    async def ask(item: int) -> int:
        return (await run([item]))[0]

    yield ask
    executor.shutdown(wait=False, cancel_futures=True)


ARMS: dict[str, Arm] = {
    "ours": Arm("batchwright (defaults)", _ours()),
    "greedy": Arm("batchwright, policy greedy", _ours(policy="greedy")),
    "window": Arm("batchwright, policy window", _ours(policy="window")),
    "ours-texts": Arm("batchwright, texts, length by characters", _texts()),
    "ours-unmeasured": Arm("batchwright, texts, length_of=None", _texts(length_of=None)),
    "ours-constant": Arm("batchwright, constant length", _ours(), distribution="constant"),
    "greedy-constant": Arm("policy greedy, constant length", _ours(policy="greedy"), distribution="constant"),
    "ours-slow": Arm("batchwright, time model 30 % too high", _wrong(1.3)),
    "ours-fast": Arm("batchwright, time model 30 % too low", _wrong(0.7)),
    "none": Arm("no batching", _none),
    "ray": Arm("Ray @serve.batch", _ray(max_batch_size=MAX_ITEMS)),
    "ray-tokens": Arm("Ray, 4,096 padded tokens", _ray(max_batch_size=4096, batch_size_fn=_padded)),
    "bentoml": Arm("BentoML dispatcher, 50 ms", _bentoml),
    "batched": Arm("batched, aio", _batched),
    "async-batcher": Arm("async-batcher", _async_batcher),
}

__all__ = ["ARMS", "Arm", "Ask"]
