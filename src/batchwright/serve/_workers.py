"""The threads that drive a core: one for each worker, a lock around every move."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextvars
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, final

from ..errors import ArgumentError
from ._core import Call, Core, Turn
from ._errors import Closed
from ._request import Request
from ._runner import Runner
from ._settings import Settings
from ._stats import Stats
from ._waiters import deliver

# The workers whose function is running here: a function that waits for itself would wait for ever.
_inside: contextvars.ContextVar[Workers | None] = contextvars.ContextVar("_inside", default=None)

_started: weakref.WeakSet[Workers] = weakref.WeakSet()
# How long the end of the interpreter waits for batches that are still running.
EXIT_SECONDS = 5.0
# A worker looks up from its sleep so often: one that was forgotten in a bad moment ends then.
MAX_SLEEP_SECONDS = 60.0


@final
class Workers:
    """Threads that take batches from a core and run them.

    They start with the first request and end once the core is closed and empty. A batch is taken only by a thread that
    is free to run it.

    Args:
        core: the state machine; nobody else moves it.
        run: the function that batches are given to.
        num_workers: how many batches may run at once.
        clock: seconds that never go back.
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
            raise ArgumentError("the batched function submits to its own batcher and would wait for itself for ever")
        if self._threads and os.getpid() != self._pid:
            raise Closed(f"the batcher was started in process {self._pid} before a fork; make one in each process")
        with self._changed:
            self._start_threads()
            self._core.add(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Drop a request; nothing happens where it has ended."""
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
        """End everything and wait for the threads until ``time.monotonic()`` says so."""
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
        """Wait for a batch; None once there will be no more."""
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
                    self._changed.notify()  # there is more than one worker can take
            deliver(turn.ended)
            if turn.call is not None:
                return turn.call

    def _run_batch(self, call: Call, runner: Runner) -> None:
        """Run a batch, and the parts of it that a failure asks for."""
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
    """Leave no thread in the middle of a batch when the interpreter goes down."""
    end = time.monotonic() + EXIT_SECONDS
    for workers in list(_started):
        workers.join(end)
