"""The threads that drive a core: they take batches, call the user's function and hand the answers out."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, final

from ...errors import Closed, RunTimeout
from ..settings import Settings
from ..stats import Stats
from .calls import Call, Garbage, Outcome, gone
from .core import Core
from .lifetimes import end_at_exit, entered_at_once, forget_in_forks
from .neighbours import Job
from .processes import most_lost
from .request import Request
from .runners import POLL_SECONDS, Runner, Worker, timed_out, why_none_is_ready
from .turns import Claim, Turns, check_nesting, hold
from .units import Part, Units
from .waiters import deliver, tell
from .ways import interrupted, run_job
from .work import Work

# A worker wakes at least this often: one whose batcher was forgotten in a bad moment ends then.
MAX_SLEEP_SECONDS = 60.0
# One whose process could not start tries again after this time, and after the pause between starts.
RETRY_SECONDS = 1.0
# With this many threads in calls that never returned, no more are started: each keeps its memory, and maybe a device.
MAX_HUNG = 8


@final
class Workers:
    """Threads that take batches from a core and run them.

    They start with the first request and end once the core is closed and empty. A batch is taken only by a thread that
    is free to run it, and that has the device if there is one.

    Args:
        core: the state machine; only the workers move it, with a lock around every move.
        make_runner: returns the runner of a worker, given what says that nothing is left to run.
        num_workers: how many batches may run at once.
        clock: returns seconds that never go back.
        timeout_seconds: a call that takes longer is given up; None: no limit.
        device: shared with other batchers; only one batch of all runs at a time.
        background: runs while no request can.
    """

    def __init__(
        self,
        core: Core,
        make_runner: Callable[[Callable[[], bool]], Runner],
        *,
        num_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
        timeout_seconds: float | None = None,
        device: Turns | None = None,
        background: Units | None = None,
    ) -> None:
        self._core = core
        self._work = Work(core, device=device, background=background)
        self._make_runner = make_runner
        self._num_workers = num_workers
        self.clock = clock
        self._timeout = timeout_seconds
        self._device = device
        self._changed = threading.Condition()
        self._workers: list[Worker] = []
        self._hung: list[Worker] = []
        self._num_abandoned = 0
        self._garbage = Garbage()
        self._watcher: threading.Thread | None = None
        self._pid = os.getpid()
        self._idle_futures: list[concurrent.futures.Future[None]] = []
        end_at_exit(self)
        forget_in_forks(self)

    @property
    def is_open(self) -> bool:
        """Say whether requests are taken."""
        return self._core.is_open

    def add(self, request: Request) -> None:
        """Take a request in and wake a worker."""
        request.held_by = check_nesting(self, self._device)
        if self._workers and os.getpid() != self._pid:
            raise Closed(f"the batcher was started in process {self._pid} before a fork; make one in each process")
        with self._changed:
            self._start_threads()
            self._work.add(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Drop a request, now or with the next move; garbage that is collected anywhere may call this."""
        self._core.left.append(request)
        with entered_at_once(self._changed) as has_entered:
            ended = self._work.leave(self.clock()) if has_entered else []
            if has_entered:
                self._tell_if_idle()
        deliver(ended)

    def expire(self, request: Request) -> None:
        """Give up a request whose deadline has come, if it waits, or runs in a call that may hang."""
        with self._changed:
            ended = self._work.expire(request, self.clock(), running=self._timeout is not None)
            self._tell_if_idle()
        deliver(ended)

    def configure(self, settings: Settings) -> None:
        """Change the settings from the next decision on."""
        with self._changed:
            ended = self._work.configure(settings, self.clock())
            self._changed.notify_all()
        deliver(ended)

    def stats(self) -> Stats:
        """Return the figures so far."""
        with self._changed:
            self._core.let_go(self.clock())
            stats = dataclasses.replace(self._core.stats(), background=self._work.background_stats())
            num = sum(max(0, worker.runner.num_starts - 1) for worker in self._workers)
            failure = stats.failure or why_none_is_ready(self._workers)
            return dataclasses.replace(stats, num_abandoned=self._num_abandoned, num_restarts=num, failure=failure)

    def wake(self) -> None:
        """Have a worker look for something to run; the first time, start the threads."""
        with self._changed:
            self._start_threads()
            self._changed.notify()

    def stop(self, *, drop: bool) -> None:
        """Take no more requests, run no more background work, and end the requests that wait if ``drop``."""
        with self._changed:
            self._core.stop()
            ended = self._work.neighbours.drop(self.clock()) if drop else []
            self._tell_if_idle()
            self._changed.notify_all()
        self._work.stop_background()
        deliver(ended)

    def when_idle(self) -> concurrent.futures.Future[None]:
        """Return a future that is done once nothing waits, nothing runs, and no process of a worker is left."""
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
            for worker in self._workers:
                worker.thread.join(max(0.0, end_seconds - time.monotonic()))
                if not worker.has_ended:
                    worker.runner.kill()

    def forget(self) -> None:
        """Begin anew in the child of a fork: the threads are gone, and may have held the lock."""
        self._changed = threading.Condition()
        self._idle_futures, self._hung, self._watcher = [], [], None
        if self._workers:
            for worker in self._workers:
                worker.has_ended = True
                worker.runner.forget()
            # The requests are the parent's. The core is a new one: a thread may have been in the middle of a move.
            self._core = Core(self._core.settings, self._core.model)
            self._core.stop()
            self._work.forget_background()
            self._work = Work(self._core, device=None, background=None)

    def _start_threads(self) -> None:
        if not self._core.is_open:
            self._work.stop_background()
            return
        while len(self._workers) < self._num_workers:
            self._pid = os.getpid()
            self._workers.append(self._start_worker(None))
        self._work.begin_background()
        if self._timeout is not None and self._watcher is None and not self._workers[0].runner.is_process:
            self._watcher = threading.Thread(target=self._watch, name="batchwright-serve-watch", daemon=True)
            self._watcher.start()

    def _start_worker(self, call: Call | None) -> Worker:
        claim = Claim(lambda: self._work.urgency_at(self.clock()))
        worker = Worker(self._make_runner(lambda: self._work.is_over), claim)
        # Daemons: a function that never returns must not keep the interpreter from ending.
        name = f"batchwright-serve-{len(self._workers)}"
        worker.thread = threading.Thread(target=self._serve, args=(worker, call), name=name, daemon=True)
        worker.thread.start()
        return worker

    def _serve(self, worker: Worker, job: Job | None) -> None:
        """Run one job after the other; the first may be what is left of a batch whose worker was given up."""
        try:
            if job is not None and self._device is not None:
                self._device.acquire(worker.claim)
            job = job or self._next(worker)
            while job is not None:
                self.run(worker, job)
                job = None  # nothing of it stays in memory while the worker waits
                job = None if worker.is_abandoned else self._next(worker)
        except BaseException as error:  # callers must hear of it, whatever it is
            self.crash(error)
            raise
        finally:
            self._give_back(worker)
            worker.runner.close()
            self._end(worker)

    def _end(self, worker: Worker) -> None:
        with self._changed:
            worker.has_ended = True
            self._hung = [other for other in self._hung if other is not worker]
            self._tell_if_idle()
        if not self._core.is_open:
            self._work.stop_background()

    def crash(self, error: BaseException) -> None:
        """End all requests with an error that no worker survives."""
        with self._changed:
            ended = self._work.crash(error, self.clock())
            self._tell_if_idle()
            self._changed.notify_all()
        self._work.stop_background()
        deliver(ended)

    def _next(self, worker: Worker) -> Job | None:
        """Wait for something to run; return None once there will be no more."""
        while True:
            self._prepare(worker)
            with self._changed:
                turn, part = self._work.take(self.clock())
                job: Job | None = turn.call or part
                if job is None and not turn.ended:
                    self._give_back(worker)
                    if self._work.is_over:
                        return None
                    most = RETRY_SECONDS if worker.is_ready is False else MAX_SLEEP_SECONDS
                    self._changed.wait(most if turn.wake_seconds is None else turn.wake_seconds)
                    continue
                self._tell_if_idle()
                if self._core.num_waiting:
                    self._changed.notify()  # more waits than one worker can take
            deliver(turn.ended)
            if job is not None:
                return job
            self._give_back(worker)

    def _prepare(self, worker: Worker) -> None:
        """Wait until the worker can run a batch, and has the device once there is something to run."""
        while not worker.runner.prepare():
            with self._changed:
                worker.is_ready = False
                # If nobody can run anything, one takes a batch all the same: its callers are told why.
                if self._work.is_over or all(other.is_ready is False for other in self._workers):
                    break
        else:
            worker.is_ready = True
        if self._device is not None:
            with self._changed:
                while not self._work.has_job and not self._work.is_over:
                    self._changed.wait(MAX_SLEEP_SECONDS)
            self._device.acquire(worker.claim, unless=lambda: self._work.is_over)

    def _give_back(self, worker: Worker) -> None:
        if self._device is not None:
            self._device.release(worker.claim)

    def run(self, worker: Worker, job: Job) -> None:
        """Run a batch, and the parts of it that must run again after a failure; or a part of background work."""
        following: Job | None = job
        num_lost, is_clean = 0, False
        while following is not None:
            outcome, seconds = self._call(worker, following)
            if outcome.is_cut:
                num_lost += 1
                if num_lost > most_lost(len(job.items)):
                    outcome = dataclasses.replace(outcome, is_final=True)
            with self._changed:
                if worker.is_abandoned:
                    return
                following, ended = self._work.complete(following, outcome, self.clock(), seconds)
                self._tell_if_idle()
            deliver(ended)
            if outcome.is_oom:
                del outcome
                # Before an item runs alone, and at the end, nothing old may hold memory. In between, what the failed
                # call has left is enough.
                is_due = not is_clean and (following is None or len(following.items) == 1)
                self._garbage.collect(full=is_due)
                is_clean |= is_due
        self._give_back(worker)

    def _call(self, worker: Worker, job: Job) -> tuple[Outcome, float]:
        """Return what a call gave and its seconds, without those that it took to start a process again."""
        requests = job.requests if isinstance(job, Call) else []
        own = {self} if self._device is None else {self, self._device}
        hold(frozenset[Any](own).union(*(request.held_by for request in requests)))
        if worker.is_ready and worker.runner.needs_start:  # after a start that failed, this call only tells why
            self._start_again(worker, job, requests)
            if requests and not any(request.is_live for request in requests):
                return gone(), 0.0
        worker.current = (job, time.monotonic())
        start = self.clock()
        outcome, given = run_job(self, self._work, worker, job)
        worker.current = None  # at once: a call that has returned does not hang, however long the lock is busy
        return outcome, self.clock() - start - given

    def next_call(self, worker: Worker, part: Part, *, may_run: bool) -> Call | None:
        """Return requests to run in the middle of a part, if they may, after more urgent ones of the device."""
        with self._changed:  # the part does not hang now, however long others take
            worker.current, worker.paused = None, part
        while not worker.is_abandoned:
            if self._device is not None:
                self._device.pass_on(worker.claim)
            with self._changed:
                turn = self._work.take_between(self.clock(), may_run=may_run, part=part)
                self._tell_if_idle()
            deliver(turn.ended)
            if turn.call is not None or not turn.ended:
                return turn.call
        return None

    def _start_again(self, worker: Worker, job: Job, requests: list[Request]) -> None:
        """Start a process in the middle of a batch; others may use the device until it is there."""
        self._give_back(worker)
        with self._changed:
            self._work.neighbours.pause(job)
        worker.runner.prepare()
        if self._device is not None:
            worker.claim.running_urgency = min((request.urgency for request in requests), default=math.inf)
            self._device.acquire(worker.claim)
            worker.claim.running_urgency = math.inf
        with self._changed:
            ended = self._work.neighbours.resume(job, self.clock())
        deliver(ended)

    def _watch(self) -> None:
        """Give up calls that take too long. It needs no wake-up: a call that begins later is due later."""
        assert self._timeout is not None
        while True:
            with self._changed:
                current = [worker.current for worker in self._workers]
                if self._work.is_over and self._work.is_idle and not any(current):
                    return
            for worker in list(self._workers):
                if worker.is_late(self._timeout):
                    self._give_up(worker, self._timeout)
            left = [one[1] + self._timeout - time.monotonic() for one in current if one is not None]
            time.sleep(max(0.001, min([POLL_SECONDS, self._timeout, *left])))

    def _give_up(self, worker: Worker, timeout: float) -> None:
        """Fail the call of a worker that hangs, and put another in its place; nothing of it is run again, to hang."""
        with self._changed:
            current = worker.current
            if current is None or not worker.is_late(timeout):
                return
            job, start = current
            worker.current, worker.is_abandoned = None, True
            self._num_abandoned += 1
            self._hung.append(worker)
            outcome = Outcome(error=timed_out(timeout), is_final=True)
            following, ended = self._work.complete(job, outcome, self.clock(), time.monotonic() - start)
            if worker.paused is not None:  # it gave way to what hangs, and has to begin again
                self._work.complete(worker.paused, interrupted(), self.clock(), 0.0)
            failure = self._replace(worker, following)
            self._tell_if_idle()
        deliver(ended)
        self._give_back(worker)
        if failure is not None:
            self.crash(failure)

    def _replace(self, worker: Worker, following: Call | None) -> Exception | None:
        """Put another worker in the place of one that hangs, or say why there is none."""
        try:
            if len(self._hung) >= MAX_HUNG:
                raise RunTimeout(f"{MAX_HUNG} threads hang in the batched function; start the program again")
            self._workers[self._workers.index(worker)] = self._start_worker(following)
            return None
        except Exception as error:  # the system may allow no more threads
            return error

    def _tell_if_idle(self) -> None:
        if self._idle_futures and self._work.is_idle and not any(worker.has_process for worker in self._workers):
            tell(self._idle_futures)
