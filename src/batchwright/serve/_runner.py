"""Calling the user's function: a plain one in the worker's thread, a coroutine in an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, final

from ._core import Call
from ._errors import Closed, ResultError
from ._oom import is_out_of_memory
from ._request import Outcome, Request

# How often a worker looks whether the loop it waits for is still there, and how long a loop may stand still.
POLL_SECONDS = 0.1
STANDSTILL_SECONDS = 1.0


@final
class LoopLost(Exception):
    """The event loop went away while a batch ran in it."""


@final
class Runner:
    """Calls a function with the items of a batch; one for each worker thread.

    A coroutine runs in the event loop of one of its callers, so that it may use what lives there. Where all of them are
    threads, or that loop went away, it runs in a loop of the worker's own.

    Args:
        run: takes a list of items, returns one result for each; a plain function or a coroutine function.
    """

    def __init__(self, run: Callable[[list[Any]], Any]) -> None:
        self._run = run
        self._home: asyncio.AbstractEventLoop | None = None
        self._own: asyncio.AbstractEventLoop | None = None
        self._lost: frozenset[Request] = frozenset()

    def __call__(self, call: Call) -> Outcome:
        try:
            values = self._run(call.items)
            if inspect.isawaitable(values):
                values = self._wait(_await(values), self._choose_loop(call.requests))
            return Outcome(values=as_results(values, len(call.requests)))
        except LoopLost as error:
            self._lost = frozenset(call.requests)
            return Outcome(error=Closed(str(error)), is_lost=True)
        except BaseException as error:  # a worker must survive whatever the function raises
            return Outcome(error=error, is_oom=is_out_of_memory(error), is_final=not isinstance(error, Exception))

    def close(self) -> None:
        """Close the loop of the worker's own, if there is one."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def _choose_loop(self, requests: Sequence[Request]) -> asyncio.AbstractEventLoop | None:
        """Return the loop used before, else that of another caller, else None; only a caller's loop will stay."""
        if not self._lost.isdisjoint(requests):
            return None
        loops = [request.waiter.loop for request in requests if request.waiter.loop is not None]
        running = [loop for loop in loops if loop.is_running()]
        if self._home not in running:
            self._home = running[0] if running else None
        return self._home

    def _wait(self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop | None) -> Any:
        if loop is None:
            self._own = self._own or asyncio.new_event_loop()
            return self._own.run_until_complete(coroutine)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:
            coroutine.close()
            raise LoopLost("the event loop that was to run the batch is closed") from error
        return _result(future, loop)


async def _await(values: Awaitable[Any]) -> Any:
    return await values


def _result(future: concurrent.futures.Future[Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Wait for a coroutine in another thread's loop, but not for a loop that is gone."""
    last_seen_running = time.monotonic()
    while not concurrent.futures.wait([future], timeout=POLL_SECONDS).done:
        if loop.is_running():
            last_seen_running = time.monotonic()
        elif loop.is_closed() or time.monotonic() - last_seen_running > STANDSTILL_SECONDS:
            raise LoopLost("the event loop that ran the batch has stopped")
    if future.cancelled():  # a loop that ends cancels what runs in it
        raise LoopLost("the event loop that ran the batch cancelled it")
    return future.result()


def as_results(values: Any, num_items: int) -> list[Any]:
    """Return the results as a list, or say what is wrong with them.

    >>> as_results((1, 2), 2)
    [1, 2]
    >>> as_results([1], 2)
    Traceback (most recent call last):
        ...
    batchwright.errors.ResultError: the batched function returned 1 results for 2 items; return one an item
    """
    try:
        count = None if isinstance(values, str | bytes | dict | set | frozenset) else len(values)
    except TypeError:
        count = None
    if count is None:
        kind = type(values).__name__
        raise ResultError(f"the batched function must return a list, one result an item, got {kind}")
    if count != num_items:
        raise ResultError(f"the batched function returned {count} results for {num_items} items; return one an item")
    return list(values)
