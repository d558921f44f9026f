"""Runners: one call of the user's function, in the thread of a worker or in the event loop of a caller."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dis
import functools
import inspect
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, TracebackType
from typing import Any, final

from ..._oom import is_out_of_memory, text_of
from ...errors import Closed, RunInterrupted, RunTimeout
from .calls import Outcome
from .request import Request
from .results import as_results
from .turns import Claim

# How often a worker checks that the event loop it waits for still runs, and how long a loop may stand still.
POLL_SECONDS = 0.1
STANDSTILL_SECONDS = 1.0


class Runner(ABC):
    """Calls a function with the items of a batch; each worker has its own.

    Attributes:
        is_process: calls run in a process that this one started, and are given up by killing it.
        num_starts: how many processes were started.
        is_awaiting: the latest call is a coroutine, which the runner itself gives up.
        problem: why the latest start of a process failed; None: it did not.
    """

    is_process = False
    num_starts = 0
    is_awaiting = False
    problem: BaseException | None = None

    @abstractmethod
    def __call__(self, items: list[Any], requests: Sequence[Request] = ()) -> Outcome:
        """Return what the function gave, whatever that is.

        Args:
            items: what the function is called with.
            requests: those that the items belong to; none for background work.
        """

    @property
    def needs_start(self) -> bool:
        """Say whether ``prepare`` has to start something, which takes time."""
        return False

    def prepare(self) -> bool:
        """Get ready for a call; say whether that worked. A worker takes a batch only after this."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; the worker that owns it is done."""

    def kill(self) -> None:  # noqa: B027 - most runners have nothing that could be killed
        """End what runs now, at the end of the interpreter."""

    def forget(self) -> None:  # noqa: B027
        """Let go of what belongs to the parent, in the child of a fork."""


@final
@dataclass(eq=False)
class Worker:
    """A thread, its runner, and what it runs.

    Args:
        runner: calls the function.
        claim: what it waits for the device with.
        current: what it runs, and since when by ``time.monotonic()``; one field, so that a look at both needs no lock.
        paused: the part of background work that gives way to what it runs.
        is_ready: its runner can run a batch; None: not known yet.
        is_abandoned: its call took too long, and another worker has its place.
        has_ended: its thread is over, and its runner closed.
    """

    runner: Runner
    claim: Claim
    thread: threading.Thread = field(default_factory=threading.Thread)
    current: tuple[Any, float] | None = None
    paused: Any = None
    is_ready: bool | None = None
    is_abandoned: bool = False
    has_ended: bool = False

    def is_late(self, timeout: float) -> bool:
        """Say whether the call that runs now has taken too long; a coroutine has a moment more to be cancelled."""
        current, grace = self.current, STANDSTILL_SECONDS if self.runner.is_awaiting else 0.0
        return current is not None and time.monotonic() - current[1] >= timeout + grace

    @property
    def has_process(self) -> bool:
        """Say whether a process may still live."""
        return self.runner.is_process and not self.has_ended


def why_none_is_ready(workers: Sequence[Worker]) -> str | None:
    """Say why no worker can run anything at the moment; None if one can, or has not tried yet."""
    if not workers or any(worker.is_ready is not False for worker in workers):
        return None
    return next((text_of(worker.runner.problem) for worker in workers if worker.runner.problem is not None), None)


@final
class ThreadRunner(Runner):
    """Calls a function in the thread of its worker.

    A plain function runs in the thread. A coroutine runs in the event loop of one of its callers, so that it may use
    what lives there. If all callers are threads, or that loop went away, it runs in a loop of the worker's own.

    Args:
        run: takes a list of items, returns one result per item; a plain function or a coroutine function.
        timeout_seconds: a coroutine is cancelled after this time. A plain function cannot be ended from outside.
    """

    def __init__(self, run: Callable[[list[Any]], Any], *, timeout_seconds: float | None = None) -> None:
        self._run = run
        self._timeout = timeout_seconds
        self._home: asyncio.AbstractEventLoop | None = None
        self._own: asyncio.AbstractEventLoop | None = None
        self._lost: frozenset[Request] = frozenset()

    def __call__(self, items: list[Any], requests: Sequence[Request] = ()) -> Outcome:
        """Return what the function gave, whatever that is."""
        # Not reset at the end: until its worker has noted that the call is over, a coroutine keeps its moment more.
        self.is_awaiting = False
        num_items = len(items)  # now: the list is the function's, which may empty it
        try:
            values = self._run(items)
            if inspect.isawaitable(values):
                self.is_awaiting = True
                values = self._wait(_await(values), self._choose_loop(requests))
            return Outcome(values=as_results(values, num_items))
        except LoopLost as error:
            self._lost, self._home = frozenset(requests), None
            return Outcome(error=Closed(str(error)), is_lost=True)
        except TimeUp:
            return Outcome(error=timed_out(self._timeout), is_cut=True)
        except BaseException as error:  # a worker must survive whatever the function raises
            return Outcome(error=as_ordinary(error), is_oom=is_out_of_memory(error))

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
        if not requests and self._home is not None:
            loops = [self._home]
        running = [loop for loop in loops if loop.is_running()]
        if self._home not in running:
            self._home = running[0] if running else None
        return self._home

    def _wait(self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop | None) -> Any:
        if loop is None:
            self._own = self._own or asyncio.new_event_loop()
            return _unwrap(self._own.run_until_complete(_limited(coroutine, self._timeout)))
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:
            coroutine.close()
            raise LoopLost("the event loop that was to run the batch is closed") from error
        return _unwrap(_result(future, loop, self._timeout))


@final
class LoopLost(Exception):
    """The event loop went away while a batch ran in it."""


@final
class TimeUp(Exception):
    """The time of a call is up."""


@final
@dataclass(frozen=True)
class _Raised:
    """What a coroutine raised, as a value: an event loop that sees ``SystemExit`` ends, and its owner with it."""

    error: BaseException


async def _await(values: Awaitable[Any]) -> Any:
    try:
        return await values
    except asyncio.CancelledError as error:
        if _is_being_cancelled():  # the loop ends, or the time is up
            raise
        return _Raised(error)
    except BaseException as error:
        if _is_from_signal(error):  # Ctrl-C is meant for the program
            raise
        return _Raised(error)


def _unwrap(value: Any) -> Any:
    if isinstance(value, _Raised):
        raise value.error
    return value


async def _limited(coroutine: Coroutine[Any, Any, Any], timeout: float | None) -> Any:
    try:
        return await asyncio.wait_for(coroutine, timeout)
    except asyncio.TimeoutError:  # the coroutine's own errors are values here
        raise TimeUp from None


def _result(future: concurrent.futures.Future[Any], loop: asyncio.AbstractEventLoop, timeout: float | None) -> Any:
    """Wait for a coroutine in another thread's loop, but not for a loop that is gone."""
    start = last_seen_running = time.monotonic()
    while not concurrent.futures.wait([future], timeout=_poll_seconds(start, timeout)).done:
        if loop.is_running():
            last_seen_running = time.monotonic()
        elif loop.is_closed() or time.monotonic() - last_seen_running > STANDSTILL_SECONDS:
            raise LoopLost("the event loop that ran the batch has stopped")
        if timeout is not None and time.monotonic() - start >= timeout:
            future.cancel()
            raise TimeUp
    if future.cancelled():  # a loop that ends cancels what runs in it
        raise LoopLost("the event loop that ran the batch cancelled it")
    return future.result()


def _poll_seconds(start: float, timeout: float | None) -> float:
    if timeout is None:
        return POLL_SECONDS
    return min(POLL_SECONDS, max(0.0, start + timeout - time.monotonic()))


def timed_out(timeout: float | None) -> RunTimeout:
    """Return the error of a call that took too long."""
    assert timeout is not None
    return RunTimeout(
        f"the batched function ran for {timeout * 1e3:.0f} ms, which is its run_timeout_ms, and was given up; raise "
        "the limit if it may take longer"
    )


def as_ordinary(error: BaseException) -> Exception:
    """Return an error that ends neither the thread nor the event loop of the caller that it is raised in.

    >>> as_ordinary(SystemExit(3))
    RunInterrupted('the batched function raised SystemExit: 3')
    """
    if isinstance(error, Exception):
        return error
    ordinary = RunInterrupted(f"the batched function raised {type(error).__name__}: {text_of(error)}")
    ordinary.__cause__ = error
    return ordinary


def _is_being_cancelled() -> bool:
    """Say whether somebody asked the current task to end; a CancelledError without that is the function's own."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is None or cancelling() > 0  # Python 3.10 does not say, so there the batch runs once more


def _is_from_signal(error: BaseException) -> bool:
    """Say whether a signal raised this in the main thread, such as Ctrl-C, and not the function by itself.

    A handler in Python leaves its frame in the traceback. Python's own handler of Ctrl-C leaves none, and interrupts
    any instruction but ``raise``.
    """
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return False
    frames = list(_frames(error.__traceback__))
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    if any(frame.tb_frame.f_code in handlers for frame in frames):
        return True
    if not isinstance(error, KeyboardInterrupt) or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    last = frames[-1]
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS"


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    code: CodeType | None = getattr(handler, "__code__", None)  # of a method too
    return code
