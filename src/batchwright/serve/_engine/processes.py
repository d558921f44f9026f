"""ProcessRunner: calls a function in a process of its own, and starts another one when that ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, final

from ..._oom import text_of
from ...errors import ArgumentError, WorkerDied
from .calls import Outcome
from .child import Message, dumps, main, unpack_message
from .request import Request
from .runners import Runner, timed_out

# How often to look whether the process lives: a process that it has forked itself keeps the pipe open after its end.
POLL_SECONDS = 0.25
# How long a process may take to end by itself.
END_SECONDS = 5.0
# The pause before another start, doubled with each process that ended before it had answered anything.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 10.0
# After the time of a call, a process that takes or gives only a part of a message is killed this much later.
KILL_SECONDS = 0.5
# How Python ends a process whose main script raised while it was imported.
_FAILED_IMPORT = 1


@final
class ProcessRunner(Runner):
    """A process that calls a function, and the thread's end of its pipe.

    One process and one pipe per worker thread, and not the pool of ``concurrent.futures``: there the death of one
    process fails every call of the pool, and a process that hangs cannot be killed (before Python 3.14).

    Args:
        packed_run: the function, from ``pack_function``.
        timeout_seconds: a process whose call takes longer is killed; None: no limit.
        is_over: says that nothing is left to run, so that a process that still starts is not waited for.
    """

    is_process = True

    def __init__(
        self,
        packed_run: bytes,
        *,
        timeout_seconds: float | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._packed_run = packed_run
        self._timeout = timeout_seconds
        self._process: Any = None
        self._connection: Connection | None = None
        self._num_deaths = 0
        self._is_over = is_over
        self._was_killed = False

    def prepare(self) -> bool:
        """Start a process if there is none, after a pause if the last ones ended early; say whether it is ready."""
        if not self.needs_start:
            return True
        self._end(kill=True)
        self._pause()
        num_deaths = self._num_deaths
        self._was_killed = False
        self.problem = _not_started("the batcher was closed") if self._is_over() else self._start()
        if self._was_killed and not self._is_over():  # from outside, which says nothing about the next start
            self.problem = self._start()
        if self.problem is not None:
            self._num_deaths = max(2, num_deaths + 1)  # the next start waits, even after the first failure
            self._end(kill=True)
        return self.problem is None

    @property
    def needs_start(self) -> bool:
        """Say whether there is no process."""
        # The sentinel tells at once: ``is_alive`` is wrong while another thread that starts a process looks after all.
        return self._process is None or bool(wait([self._process.sentinel], 0)) or not self._process.is_alive()

    def __call__(self, items: list[Any], requests: Sequence[Request] = ()) -> Outcome:
        """Return what the function gave in the process, or that the process ended."""
        if self._process is None:
            return Outcome(error=self.problem, is_final=True)  # it says nothing about the items
        packed = [_pack_item(item) for item in items]
        sent = [one for one in packed if isinstance(one, bytes)]
        if not sent:
            return Outcome(values=packed)
        outcome = self._ask(sent)
        if outcome.error is not None or len(sent) == len(packed):
            return outcome
        values = iter(outcome.values)
        return Outcome(values=[next(values) if isinstance(one, bytes) else one for one in packed])

    def close(self) -> None:
        """End the process, which sees that the pipe is closed."""
        self._end(kill=False)

    def kill(self) -> None:
        """End the process whatever it does."""
        with contextlib.suppress(AttributeError, ValueError):  # it has just ended, and its worker has closed it
            self._process.kill()

    def forget(self) -> None:
        """Close the copies of the pipe, in the child of a fork: the process must see when its parent closes it."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the fork came while a thread of the parent was closing it
                self._connection.close()
        # The end of this fork would end all processes that multiprocessing knows of, and these are not its own.
        getattr(multiprocessing.process, "_children", set()).discard(self._process)
        self._process = self._connection = None

    def _pause(self) -> None:
        """Wait longer after every process that ended before it had answered anything; the second start is at once."""
        if self._num_deaths > 1:
            pause = FIRST_PAUSE_SECONDS * 2.0 ** min(self._num_deaths - 2, 30)
            end = time.monotonic() + min(pause, MAX_PAUSE_SECONDS)
            while (left := end - time.monotonic()) > 0 and not self._is_over():
                time.sleep(min(left, POLL_SECONDS))

    def _start(self) -> BaseException | None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of all threads as they are
        try:
            self._connection, theirs = context.Pipe()
            # No daemon, since those may not have processes of their own, such as the workers of a data loader.
            process = context.Process(target=main, args=(theirs, self._packed_run), name="batchwright-serve")
            process.start()
            self._process = process
            theirs.close()
        except Exception as error:
            return _not_started(f"{type(error).__name__}: {text_of(error)}", error)
        self.num_starts += 1
        outcome = self._receive(None, can_stop=True)
        if outcome.error is None:
            return None
        why = f"{type(outcome.error).__name__}: {text_of(outcome.error)}"
        if isinstance(outcome.error, WorkerDied) and f"exit code {_FAILED_IMPORT}" in str(outcome.error):
            why += "; a script must start its work under if __name__ == '__main__', since the process imports it"
        return _not_started(why, outcome.error)

    def _ask(self, packed: list[bytes]) -> Outcome:
        start = time.monotonic()
        with _killed_after(self._timeout, self._process):
            outcome = self._send_and_receive(packed)
        if outcome.is_cut and self._timeout is not None and time.monotonic() - start >= self._timeout:
            outcome = Outcome(error=timed_out(self._timeout), is_cut=True)
        if not outcome.is_cut:
            self._num_deaths = 0
        return outcome

    def _send_and_receive(self, packed: list[bytes]) -> Outcome:
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps(packed))
        except OSError:
            return self._died()
        return self._receive(self._timeout)

    def _receive(self, timeout: float | None, *, can_stop: bool = False) -> Outcome:
        """Wait for a message, the end of the process, or the end of the time."""
        assert self._connection is not None
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if end is None else min(POLL_SECONDS, end - time.monotonic())
            ready = wait([self._connection, self._process.sentinel], max(0.0, left))
            try:
                if self._connection in ready or self._connection.poll():
                    message: Message = pickle.loads(self._connection.recv_bytes())
                    return unpack_message(message)
            except (EOFError, OSError):
                return self._died()
            if not self._process.is_alive() or (can_stop and self._is_over()):
                return self._died()
            if end is not None and time.monotonic() >= end:
                self._num_deaths += 1
                self._end(kill=True)
                return Outcome(error=timed_out(timeout), is_cut=True)

    def _died(self) -> Outcome:
        how = self._how_it_ended()
        self._num_deaths += 1
        self._end(kill=True)
        return Outcome(error=WorkerDied(f"the process that ran the batch {how}"), is_cut=True)

    def _how_it_ended(self) -> str:
        self._process.join(POLL_SECONDS)  # the pipe closes a moment before
        code = self._process.exitcode
        if code is None:
            return "closed its pipe"
        if code >= 0:
            return f"ended with exit code {code}"
        self._was_killed = code == -getattr(signal, "SIGKILL", 0)
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = "; the system may have been out of memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"

    def _end(self, *, kill: bool) -> None:
        """Leave no process behind, and no zombie."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process, self._process = self._process, None
        if process is None:
            return
        if not kill:
            process.join(END_SECONDS)
        if process.is_alive():
            process.kill()
        process.join()
        # A start in another thread looks after all children: it may have seen the end of this one and not noted it yet.
        with contextlib.suppress(ValueError):
            process.close()


@contextlib.contextmanager
def _killed_after(timeout: float | None, process: Any) -> Iterator[None]:
    """Kill a process that has stopped in the middle of a message: whoever reads or writes that waits without limit."""
    if timeout is None:
        yield
        return

    def kill() -> None:
        with contextlib.suppress(ValueError):  # it has just ended, and its worker has closed it
            process.kill()

    timer = threading.Timer(min(timeout + KILL_SECONDS, threading.TIMEOUT_MAX), kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _pack_item(item: Any) -> bytes | ArgumentError:
    try:
        return dumps(item)
    except BaseException as error:  # SystemExit too: it would end the worker, and with it the batcher
        return ArgumentError(
            f"the item, a {type(item).__name__}, cannot be pickled ({type(error).__name__}: {text_of(error)}); "
            "worker='process' needs items that can, or use worker='thread'"
        )


def _not_started(why: str, cause: BaseException | None = None) -> WorkerDied:
    error = WorkerDied(f"the process of the worker could not start: {why}")
    error.__cause__ = cause
    return error


def most_lost(num_items: int) -> int:
    """Return how many calls of a batch may end a process before its suspects are given up: ``2·⌈log2 n⌉ + 2``.

    One item that ends every process is found with fewer, and so are most pairs.

    >>> most_lost(1), most_lost(2), most_lost(64)
    (2, 4, 14)
    """
    return 2 * (num_items - 1).bit_length() + 2
