"""Bring the end of a request back to its caller, in the event loop or thread that waits for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from ..._oom import text_of
from .request import Request

AnyFuture: TypeAlias = "asyncio.Future[Any] | concurrent.futures.Future[Any]"


@final
@dataclass(frozen=True, slots=True)
class Waiter:
    """Where an answer goes.

    Args:
        loop: the event loop of the caller; None for a thread that waits.
        future: a future of that loop, or of ``concurrent.futures`` for a thread.
    """

    loop: asyncio.AbstractEventLoop | None
    future: AnyFuture

    def abandon(self) -> None:
        """Note that nobody waits any more, so that an error that has arrived is not reported as unseen."""
        if self.future.done():
            if not self.future.cancelled():
                self.future.exception()
            return
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self.future.cancel()


def waiter_for_loop() -> Waiter:
    """Return a waiter for a coroutine in the running loop."""
    loop = asyncio.get_running_loop()
    return Waiter(loop, loop.create_future())


def waiter_for_thread() -> Waiter:
    """Return a waiter for a thread."""
    return Waiter(None, concurrent.futures.Future())


def has_running_loop() -> bool:
    """Say whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def deliver(ended: Iterable[Request]) -> None:
    """Hand requests that ended to their callers, with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = {}
    for request in ended:
        loop = request.waiter.loop
        if loop is None:
            _settle([request])
        else:
            by_loop.setdefault(loop, []).append(request)
    for loop, requests in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, requests)
        except RuntimeError:
            continue  # the loop was closed, and its callers with it


def tell(futures: list[concurrent.futures.Future[None]]) -> None:
    """Tell those that wait for something to happen that it has."""
    while futures:
        future = futures.pop()
        if future.set_running_or_notify_cancel():
            future.set_result(None)


def _settle(requests: list[Request]) -> None:
    for request in requests:
        future: AnyFuture = request.waiter.future
        # A caller may have given up in the meantime; the others must still get their answers.
        with contextlib.suppress(asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
            if request.error is None:
                future.set_result(request.result)
            else:
                future.set_exception(_raisable(request.error))


def _raisable(error: BaseException) -> BaseException:
    """Return an error that a future accepts and that ends only the request."""
    kind = type(error)
    if issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        return error
    wrapped = RuntimeError(f"the batched function raised {kind.__name__}: {text_of(error)}")
    wrapped.__cause__ = error
    return wrapped
