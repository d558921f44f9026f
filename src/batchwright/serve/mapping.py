"""Mapped: the answers to many items, in order, with a bounded number in flight."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar, final

from ..errors import ArgumentError, QueueFull
from ._engine.request import Request
from ._engine.waiters import Waiter, waiter_for_loop, waiter_for_thread

Result = TypeVar("Result")

# How long to wait before trying again, if other callers have filled the queue.
RETRY_SECONDS = 0.001


@final
class Mapped(Generic[Result]):
    """What ``Batcher.map`` returns: await it for a list, or loop over it with ``async for`` or ``for``.

    Args:
        items: what to submit.
        enter: queues an item for a waiter.
        forget: cancels a request that nobody waits for.
        wait: blocks a thread until a request has ended.
        max_in_flight: the most requests submitted and not yet handed out.
    """

    def __init__(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        enter: Callable[[Any, Waiter], Request],
        forget: Callable[[Request], None],
        wait: Callable[[Request], None],
        max_in_flight: int,
    ) -> None:
        self._items = items
        self._enter = enter
        self._forget = forget
        self._wait = wait
        self._max_in_flight = max_in_flight
        self._kept: Any = None

    def __await__(self) -> Generator[Any, None, list[Result]]:
        return self._collect().__await__()

    def __aiter__(self) -> AsyncIterator[Result]:
        return self._stream()

    def __iter__(self) -> Iterator[Result]:
        if not isinstance(self._items, Iterable):
            raise ArgumentError("items is an async iterable; use `async for` or await it instead of `for`")
        flight: deque[Request] = deque()
        try:
            for item in self._items:
                while len(flight) >= self._max_in_flight:
                    yield self._answer_in_thread(flight)
                while (request := self._try_enter(item, waiter_for_thread())) is None:
                    if flight:
                        yield self._answer_in_thread(flight)
                    else:
                        time.sleep(RETRY_SECONDS)
                flight.append(request)
            while flight:
                yield self._answer_in_thread(flight)
        finally:
            self._forget_all(flight)

    async def _collect(self) -> list[Result]:
        return [result async for result in self._stream()]

    async def _stream(self) -> AsyncGenerator[Result, None]:
        flight: deque[Request] = deque()
        try:
            async for item in _as_async(self._items):
                while len(flight) >= self._max_in_flight:
                    yield await self._answer(flight)
                while (request := self._try_enter(item, waiter_for_loop())) is None:
                    if flight:
                        yield await self._answer(flight)
                    else:
                        await asyncio.sleep(RETRY_SECONDS)
                flight.append(request)
            while flight:
                yield await self._answer(flight)
        finally:
            self._forget_all(flight)

    def _try_enter(self, item: Any, waiter: Waiter) -> Request | None:
        try:
            return self._enter(item, waiter)
        except QueueFull:
            return None

    async def _answer(self, flight: deque[Request]) -> Result:
        # It stays in the queue until it is answered: a caller that is cancelled before must find it there.
        result: Result = await flight[0].waiter.future
        flight.popleft()
        return result

    def _answer_in_thread(self, flight: deque[Request]) -> Result:
        self._wait(flight[0])
        result: Result = flight[0].waiter.future.result()
        flight.popleft()
        return result

    def _forget_all(self, flight: Iterable[Request]) -> None:
        for request in flight:
            self._forget(request)


async def _as_async(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
