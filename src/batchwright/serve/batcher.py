"""Batcher: single requests in, batches to the function, single answers out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import inspect
import math
import threading
import time
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, final

from .._checks import as_flag, as_number, as_whole, check_choice, shared_options
from ..errors import ArgumentError
from ._engine.child import may_be_named_later, pack_function
from ._engine.core import Core
from ._engine.processes import ProcessRunner
from ._engine.request import Request
from ._engine.runners import Runner, ThreadRunner
from ._engine.waiters import Waiter, has_running_loop, waiter_for_loop, waiter_for_thread
from ._engine.workers import Workers
from .background import Background, as_background
from .device import Device
from .latency import LatencyModel
from .lengths import AUTO, Guess, measure_for
from .mapping import Mapped
from .settings import Settings, as_deadline, as_priority
from .stats import Stats

WORKERS = ("thread", "process")

Item = TypeVar("Item")
Result = TypeVar("Result")


@final
class Batcher(Generic[Item, Result]):
    """Collects single requests into batches for a function that takes a list and returns a list.

    A plain function runs in its own thread, a coroutine function in the event loop of its callers. Requests may come
    from any number of loops and threads. A batch closes when a worker is free to run it; ``policy`` decides which
    requests it holds:

    - "adaptive": requests of similar length, the most urgent first, as many as a learned time model says will finish in
      time;
    - "greedy": all requests that wait, in order;
    - "window": all requests that arrive within ``max_wait_ms`` of the first one, in order.

    An item that makes the function raise fails alone, and the other items are run again without it. The function must
    therefore accept the same item twice; if it cannot, use ``on_error="raise"``. It may also return an exception object
    in place of a result.

    Args:
        run: takes a list of items, returns one result per item, in order.
        policy: "adaptive", "greedy" or "window".
        max_items: the most requests in a batch.
        max_wait_ms: the window of policy "window"; the other policies never wait on purpose.
        deadline_ms: the time a request may take from submission to answer; None: no limit. A request that could not
            meet it even alone ends with ``DeadlineExceeded`` and is not run.
        length_of: returns the length of an item, called in the caller's thread; None: all items have the same length.
            "auto" estimates it: the characters of texts, the number of token ids, the first axis of arrays and tensors.
            An estimate refuses nothing: an item that is over ``max_tokens`` by it runs alone.
        tokenizer: counts the tokens of texts, in place of ``length_of``: a tokenizer of transformers or tokenizers, or
            a function from str to a number or a sequence of tokens.
        max_tokens: the most ``num_items × longest`` in a batch; None: no limit.
        max_queue: the most requests that wait; further requests are refused with ``QueueFull``.
        num_workers: how many batches may run at once.
        worker: "thread", or "process": each worker calls the function in a process of its own, which is started anew
            when it ends. The function, items and results must be picklable.
        run_timeout_ms: the time that one call of the function may take; None: no limit. A call that takes longer ends
            with ``RunTimeout``, and requests that still run at their deadline end with ``DeadlineExceeded``.
        device: a ``Device`` that this batcher shares with others: one batch of all of them runs at a time.
        background: batches of offline work, or a ``Background`` of them, that run while no request can; with
            worker="process" from the first request on, or the first loop over them.
        on_error: "bisect" finds the bad item and answers the others; "raise" fails the whole batch.
        on_oom: "split" runs a batch that ran out of memory in halves; "raise" treats it like any other error.
        time_model: a ``LatencyModel`` from an earlier run; None: a new one.
        clock: returns seconds that never go back.

    >>> batcher = Batcher(lambda texts: [text.upper() for text in texts], length_of=len)
    >>> batcher.submit_sync("one")
    'ONE'
    >>> list(batcher.map(["two", "three"]))
    ['TWO', 'THREE']
    >>> batcher.close_sync()
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Any],
        *,
        policy: str = "adaptive",
        max_items: int = 64,
        max_wait_ms: float = 10.0,
        deadline_ms: float | None = None,
        length_of: Callable[[Item], int] | str | None = AUTO,
        tokenizer: Any = None,
        max_tokens: int | None = None,
        max_queue: int = 1000,
        num_workers: int = 1,
        worker: str = "thread",
        run_timeout_ms: float | None = None,
        device: Device | None = None,
        background: Background[Item, Result] | Iterable[Sequence[Item]] | None = None,
        on_error: str = "bisect",
        on_oom: str = "split",
        time_model: LatencyModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = Settings(**shared_options(Settings, locals()))
        if not callable(run):
            raise ArgumentError(f"run must be a function of a list of items, got {run!r}")
        self._name = getattr(run, "__qualname__", type(run).__qualname__)
        self._num_workers = as_whole("num_workers", num_workers, least=1)
        self._measure = measure_for(length_of, tokenizer, name=self._name)
        self._is_coroutine = worker == "thread" and _is_coroutine_function(run)
        self._time_model = LatencyModel() if time_model is None else time_model
        if device is not None and not isinstance(device, Device):
            raise ArgumentError(f"device must be a Device that batchers share, or None, got {device!r}")
        timeout = None if run_timeout_ms is None else as_number("run_timeout_ms", run_timeout_ms, above=0) / 1e3
        self._background = as_background(background)
        self._workers = Workers(
            Core(self._settings, self._time_model, num_workers=self._num_workers),
            _runner_maker(run, worker, timeout),
            num_workers=self._num_workers,
            clock=clock,
            timeout_seconds=timeout,
            device=None if device is None else device._turns,
            background=None if self._background is None else self._background._units,
        )
        weakref.finalize(self, self._workers.abandon)
        if self._background is not None:
            self._background._blocks_its_loop = self._is_coroutine
            is_estimate = isinstance(self._measure, Guess)
            self._background._units.attach(self._measure, self._workers.wake, is_estimate=is_estimate)
            # A process imports the module of the function, and must not begin the work of the batchers that it finds
            # there; also, a function under a decorator is not in its module yet. So a loop or a request begins it.
            if worker == "thread":
                self._workers.wake()

    @property
    def settings(self) -> Settings:
        """Return the current settings."""
        return self._settings

    @property
    def is_open(self) -> bool:
        """Say whether requests are taken; False once a drain or close has begun."""
        return self._workers.is_open

    @property
    def time_model(self) -> LatencyModel:
        """Return what was learned about the time of a batch; ``to_json`` keeps it for the next process."""
        return self._time_model

    @property
    def background(self) -> Background[Item, Result] | None:
        """Return the offline work; loop over it for the results."""
        return self._background

    def __repr__(self) -> str:
        shown = ("policy", "max_items")
        options = [item for item in dataclasses.fields(Settings) if getattr(self._settings, item.name) != item.default]
        names = dict.fromkeys((*shown, *(item.name for item in options)))
        parts = [f"{name}={getattr(self._settings, name)!r}" for name in names]
        return f"Batcher({', '.join([self._name, *parts, *([] if self.is_open else ['closed'])])})"

    async def submit(self, item: Item, *, deadline_ms: float | None = None, priority: float = 0) -> Result:
        """Return the answer to one item.

        Cancel it like any coroutine: an item that still waits is then never run.

        Args:
            item: one element of the list that the function takes.
            deadline_ms: the time this request may take; None: the batcher's deadline, ``math.inf``: no limit.
            priority: from -10 to 10; each step up halves the time during which later requests may overtake this one.
        """
        waiter = waiter_for_loop()
        request = self._enter(item, waiter, deadline_ms, priority)
        timer = self._set_timer(request)
        try:
            result: Result = await waiter.future  # type: ignore[misc]
            return result
        finally:
            if timer is not None:
                timer.cancel()
            self._forget(request)

    def submit_sync(self, item: Item, *, deadline_ms: float | None = None, priority: float = 0) -> Result:
        """Return the answer to one item, from a thread without an event loop; options as in ``submit``."""
        self._check_thread("submit_sync", "await submit(item), or call a batched function and await that")
        waiter = waiter_for_thread()
        request = self._enter(item, waiter, deadline_ms, priority)
        try:
            self._wait_in_thread(request)
            result: Result = waiter.future.result()
            return result
        finally:
            self._forget(request)

    def map(
        self,
        items: Iterable[Item] | AsyncIterable[Item],
        *,
        deadline_ms: float | None = None,
        priority: float = 0,
        max_in_flight: int | None = None,
    ) -> Mapped[Result]:
        """Return the answers to many items, in order, with a bounded number in flight.

        ``await`` it for a list, or loop over it with ``async for``, or with ``for`` in a thread. The first error ends
        it. While the queue is full it waits.

        Args:
            items: are read only as fast as they are answered.
            deadline_ms: the time each item may take; None: no limit, even if the batcher has one.
            priority: as in ``submit``.
            max_in_flight: how many are submitted at once; None: twice what the workers hold, within ``max_queue``.
        """
        if max_in_flight is None:
            settings = self._settings
            max_in_flight = min(2 * self._num_workers * settings.max_items, settings.max_queue)
        max_in_flight = as_whole("max_in_flight", max_in_flight, least=1)
        allowed = math.inf if deadline_ms is None else deadline_ms

        def enter(item: Any, waiter: Waiter) -> Request:
            request = self._enter(item, waiter, allowed, priority)
            timer = self._set_timer(request)
            if timer is not None:
                waiter.future.add_done_callback(lambda future: timer.cancel())
            return request

        return Mapped(items, enter, self._forget, self._wait_in_thread, max_in_flight)

    def configure(self, **changes: Any) -> None:
        """Change settings while it runs: policy, max_items, max_wait_ms, deadline_ms, max_tokens, max_queue, …

        They hold from the next decision on, ``deadline_ms`` from the next request on.

        >>> batcher = Batcher(list)
        >>> batcher.configure(max_items=32)
        >>> batcher.settings.max_items
        32
        """
        allowed = {field.name for field in dataclasses.fields(Settings)}
        unknown = sorted(changes.keys() - allowed)
        if unknown:
            raise ArgumentError(
                f"configure() cannot change {', '.join(unknown)}; it can change {', '.join(sorted(allowed))}"
            )
        self._settings = dataclasses.replace(self._settings, **changes)
        self._workers.configure(self._settings)

    def stats(self) -> Stats:
        """Return the figures so far."""
        return self._workers.stats()

    async def drain(self) -> None:
        """Take no more requests and wait until those that were taken have ended; ``submit`` then raises ``Closed``."""
        self._workers.stop(drop=False)
        await asyncio.wrap_future(self._workers.when_idle())

    async def close(self, *, drain: bool = True, timeout_seconds: float | None = None) -> None:
        """Take no more requests and end the workers.

        Args:
            drain: run the requests that wait; False ends them with ``Closed``. Batches that run finish either way.
            timeout_seconds: wait no longer than this; requests that still wait then end with ``Closed``.
        """
        timeout = _as_timeout(timeout_seconds)
        self._workers.stop(drop=not as_flag("drain", drain))
        idle = asyncio.wrap_future(self._workers.when_idle())
        await asyncio.wait([idle], timeout=timeout)
        self._workers.stop(drop=True)
        idle.cancel()

    def close_sync(self, *, drain: bool = True, timeout_seconds: float | None = None) -> None:
        """Do the same as ``close``, from a thread without an event loop."""
        timeout = _as_timeout(timeout_seconds)
        if timeout is None and not self._workers.when_idle().done():
            self._check_thread("close_sync", "await close()")
            if any(worker.thread is threading.current_thread() for worker in self._workers._workers):
                raise ArgumentError(
                    "the batched function closes its own batcher and would wait for itself forever; close it elsewhere"
                )
        self._workers.stop(drop=not as_flag("drain", drain))
        concurrent.futures.wait([self._workers.when_idle()], timeout=timeout)
        self._workers.stop(drop=True)

    async def __aenter__(self) -> Batcher[Item, Result]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        await self.close(drain=kind is None)

    def __enter__(self) -> Batcher[Item, Result]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close_sync(drain=kind is None)

    def _enter(self, item: Any, waiter: Waiter, deadline_ms: float | None, priority: float) -> Request:
        """Measure and queue an item; what is wrong with it is raised here, only to its caller."""
        length = self._measure(item)
        allowed = self._settings.deadline_ms if deadline_ms is None else as_deadline(deadline_ms)
        priority = as_priority(priority)
        now = self._workers.clock()
        deadline = math.inf if allowed is None else now + allowed / 1e3
        request = Request(item, length, now, deadline, priority, waiter, is_estimate=isinstance(self._measure, Guess))
        self._workers.add(request)
        return request

    def _set_timer(self, request: Request) -> asyncio.TimerHandle | None:
        """Give up a request at its deadline even while every worker is busy."""
        loop: asyncio.AbstractEventLoop | None = request.waiter.loop
        if loop is None or request.deadline == math.inf:
            return None
        return loop.call_later(request.allowance, self._workers.expire, request)

    def _check_thread(self, name: str, instead: str) -> None:
        """Refuse to wait in the thread of the event loop that the function may run in: nothing would run there."""
        if self._is_coroutine and has_running_loop():
            raise ArgumentError(f"{name} would block the event loop that runs the function; {instead}")

    def _wait_in_thread(self, request: Request) -> None:
        self._check_thread("a for loop", "write async for")
        future = request.waiter.future
        left = None if request.deadline == math.inf else max(0.0, request.deadline - self._workers.clock())
        if not concurrent.futures.wait([future], timeout=left).done:
            self._workers.expire(request)
            concurrent.futures.wait([future])

    def _forget(self, request: Request) -> None:
        """Cancel a request that nobody waits for; a request that has ended stays as it is."""
        if request.is_live:
            self._workers.cancel(request)
        request.waiter.abandon()


def _runner_maker(
    run: Callable[[list[Any]], Any], worker: str, timeout: float | None
) -> Callable[[Callable[[], bool]], Runner]:
    """Return what makes the runner of a worker, given what says that nothing is left to run."""
    check_choice("worker", worker, WORKERS)
    if worker == "thread":
        return lambda is_over: ThreadRunner(run, timeout_seconds=timeout)
    packed = functools.cache(functools.partial(pack_function, run))
    if not may_be_named_later(run):  # a function under a decorator is not in its module yet
        packed()
    return lambda is_over: ProcessRunner(packed(), timeout_seconds=timeout, is_over=is_over)


def _is_coroutine_function(run: Any) -> bool:
    """Say whether a call of ``run`` must be awaited: a function, a method, or an object with such a ``__call__``."""
    unwrapped = inspect.unwrap(run)
    return inspect.iscoroutinefunction(unwrapped) or inspect.iscoroutinefunction(type(unwrapped).__call__)


def _as_timeout(seconds: float | None) -> float | None:
    """Return a time to wait, at most what a thread can wait for; a time that has passed already is 0."""
    if seconds is None:
        return None
    return min(max(0.0, as_number("timeout_seconds", seconds, infinite=True)), threading.TIMEOUT_MAX)
