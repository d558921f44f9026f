"""The threads that drive a core: they take batches, call the user's function and hand the answers out."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextvars
import gc
import inspect
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, final

from ..._oom import is_out_of_memory
from ...errors import ArgumentError, Closed, ResultError
from ..settings import Settings
from ..stats import Stats
from .calls import Call, Outcome
from .core import Core, Turn
from .request import Request
from .waiters import deliver

# The workers whose function runs in this context: a function that waits for its own batcher would wait forever.
_inside: contextvars.ContextVar[Workers | None] = contextvars.ContextVar("_inside", default=None)

_started: weakref.WeakSet[Workers] = weakref.WeakSet()
# How long the end of the interpreter waits for batches that still run.
EXIT_SECONDS = 5.0
# A worker wakes at least this often: one whose batcher was forgotten in a bad moment ends then.
MAX_SLEEP_SECONDS = 60.0
# How often a worker checks that the event loop it waits for still runs, and how long a loop may stand still.
POLL_SECONDS = 0.1
STANDSTILL_SECONDS = 1.0


@final
class Workers:
    """Threads that take batches from a core and run them.

    They start with the first request and end once the core is closed and empty. A batch is taken only by a thread that
    is free to run it.

    Args:
        core: the state machine; only the workers move it, with a lock around every move.
        run: the function that is given the batches.
        num_workers: how many batches may run at once.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        core: Core,
        run: Callable[[list[Any]], Any],
        *,
        num_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._run = run
        self._num_workers = num_workers
        self.clock = clock
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._idle_futures: list[concurrent.futures.Future[None]] = []

    @property
    def is_open(self) -> bool:
        """Say whether requests are taken."""
        return self._core.is_open

    def add(self, request: Request) -> None:
        """Take a request in and wake a worker."""
        if _inside.get() is self:
            raise ArgumentError("the batched function submits to its own batcher and would wait for itself forever")
        if self._threads and os.getpid() != self._pid:
            raise Closed(f"the batcher was started in process {self._pid} before a fork; make one in each process")
        with self._changed:
            self._start_threads()
            self._core.add(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Drop a request; a request that has ended stays as it is."""
        with self._changed:
            self._core.cancel(request, self.clock())
            self._tell_if_idle()

    def expire(self, request: Request) -> None:
        """Give up a request whose deadline has come, if it still waits."""
        with self._changed:
            ended = self._core.expire(request, self.clock())
            self._tell_if_idle()
        deliver(ended)

    def configure(self, settings: Settings) -> None:
        """Change the settings from the next decision on."""
        with self._changed:
            ended = self._core.configure(settings, self.clock())
            self._changed.notify_all()
        deliver(ended)

    def stats(self) -> Stats:
        """Return the figures so far."""
        with self._changed:
            return self._core.stats()

    def stop(self, *, drop: bool) -> None:
        """Take no more requests, and end those that wait if ``drop``."""
        with self._changed:
            self._core.stop()
            ended = self._core.drop(self.clock()) if drop else []
            self._tell_if_idle()
            self._changed.notify_all()
        deliver(ended)

    def when_idle(self) -> concurrent.futures.Future[None]:
        """Return a future that is done once nothing waits and nothing runs."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._changed:
            self._idle_futures.append(future)
            self._tell_if_idle()
        return future

    def abandon(self) -> None:
        """Let the threads of a forgotten batcher end; safe wherever the garbage collector may call it."""
        self._core.stop()
        if self._changed.acquire(blocking=False):
            self._changed.notify_all()
            self._changed.release()

    def join(self, end_seconds: float) -> None:
        """End everything, and wait for the threads until ``time.monotonic()`` reaches ``end_seconds``."""
        if os.getpid() == self._pid:
            self.stop(drop=True)
            for thread in self._threads:
                thread.join(max(0.0, end_seconds - time.monotonic()))

    def _start_threads(self) -> None:
        if not self._threads:
            self._pid = os.getpid()
            # Daemons: a function that never returns must not keep the interpreter from ending.
            self._threads = [
                threading.Thread(target=self._work, name=f"batchwright-serve-{index}", daemon=True)
                for index in range(self._num_workers)
            ]
            for thread in self._threads:
                thread.start()
            _started.add(self)

    def _work(self) -> None:
        _inside.set(self)
        runner = Runner(self._run)
        try:
            while (call := self._next()) is not None:
                self._run_batch(call, runner)
        except BaseException as error:  # callers must hear of it, whatever it is
            with self._changed:
                ended = self._core.crash(error, self.clock())
                self._tell_if_idle()
                self._changed.notify_all()
            deliver(ended)
            raise
        finally:
            runner.close()

    def _next(self) -> Call | None:
        """Wait for a batch; return None once there will be no more."""
        while True:
            with self._changed:
                turn = self._core.take(self.clock()) if self._core.num_waiting else Turn()
                if turn.call is None and not turn.ended:
                    if not self._core.is_open:
                        return None
                    self._changed.wait(MAX_SLEEP_SECONDS if turn.wake_seconds is None else turn.wake_seconds)
                    continue
                self._tell_if_idle()
                if self._core.num_waiting:
                    self._changed.notify()  # more waits than one worker can take
            deliver(turn.ended)
            if turn.call is not None:
                return turn.call

    def _run_batch(self, call: Call, runner: Runner) -> None:
        """Run a batch, and the parts of it that must run again after a failure."""
        following: Call | None = call
        while following is not None:
            start = self.clock()
            outcome = runner(following)
            now = self.clock()
            with self._changed:
                turn = self._core.complete(following, outcome, now, now - start)
                self._tell_if_idle()
            deliver(turn.ended)
            following = turn.call
            if outcome.is_oom:
                del outcome, turn
                gc.collect()

    def _tell_if_idle(self) -> None:
        if self._idle_futures and self._core.is_idle:
            for future in self._idle_futures:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
            self._idle_futures.clear()


@atexit.register
def _end_all() -> None:
    """Leave no thread in the middle of a batch when the interpreter ends."""
    end = time.monotonic() + EXIT_SECONDS
    for workers in list(_started):
        workers.join(end)


@final
class Runner:
    """Calls a function with the items of a batch; each worker thread has its own.

    A plain function runs in the thread. A coroutine runs in the event loop of one of its callers, so that it may use
    what lives there. If all callers are threads, or that loop went away, it runs in a loop of the worker's own.

    Args:
        run: takes a list of items, returns one result per item; a plain function or a coroutine function.
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
        """Return the loop used before, else the loop of another caller, else None; only a caller's loop will stay."""
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


@final
class LoopLost(Exception):
    """The event loop went away while a batch ran in it."""


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
    batchwright.errors.ResultError: the batched function returned 1 results for 2 items; return one result per item
    """
    try:
        count = None if isinstance(values, str | bytes | dict | set | frozenset) else len(values)
    except TypeError:
        count = None
    if count is None:
        kind = type(values).__name__
        raise ResultError(f"the batched function must return a list with one result per item, got {kind}")
    if count != num_items:
        raise ResultError(
            f"the batched function returned {count} results for {num_items} items; return one result per item"
        )
    return list(values)
