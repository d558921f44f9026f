"""Ways: a part of offline work looks, between its steps, whether requests wait, and lets them run first."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, final

from ...errors import Closed
from .calls import Call, Outcome
from .runners import Worker
from .turns import held_here, hold
from .units import Part
from .waiters import has_running_loop
from .work import Job, Work


class _Here(threading.local):
    """What runs in this thread: a part that can give way, or nothing that can."""

    way: Way | None = None


_here = _Here()


@final
class Way:
    """How a part gives way to requests, and for how long it held them up in between.

    Args:
        is_wanted: says whether somebody waits; asked often, so it needs no lock.
        run_others: runs what waits, and returns once the part may go on.
        clock: returns seconds that never go back.

    Attributes:
        num_looks: how often it was looked whether somebody waits.
        given_seconds: what others took in between.
    """

    def __init__(
        self, is_wanted: Callable[[], bool], run_others: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._is_wanted, self._run_others, self._clock = is_wanted, run_others, clock
        self._since = clock()
        self._longest = 0.0
        self.num_looks = 0
        self.given_seconds = 0.0

    def look(self) -> None:
        """Let others run if somebody waits."""
        now = self._note()
        self.num_looks += 1
        if self._is_wanted():
            with _way_in_this_thread(None):  # what runs now is not part of the offline work
                self._run_others()
            self._since = self._clock()
            self.given_seconds += self._since - now

    def end(self) -> float:
        """Return the longest time in seconds for which nobody else could run, now that the part is over."""
        self._note()
        return self._longest

    def _note(self) -> float:
        now = self._clock()
        self._longest = max(self._longest, now - self._since)
        self._since = now
        return now


class Driver(Protocol):
    """What runs requests in the middle of a part."""

    clock: Callable[[], float]

    def next_call(self, worker: Worker) -> Call | None:
        """Return requests to run now; None: the part may go on."""

    def run(self, worker: Worker, job: Call) -> None:
        """Run them, and hand out the answers."""

    def crash(self, error: BaseException) -> None:
        """End all requests."""


def run_job(driver: Driver, work: Work, worker: Worker, job: Job) -> tuple[Outcome, float]:
    """Return what a job gave, and the seconds that it left to others in between, if it is a part that gives way.

    Args:
        driver: runs the requests.
        work: knows of them.
        worker: of this thread.
        job: what runs.
    """
    if isinstance(job, Call):
        return worker.runner(job.items, job.requests), 0.0
    way = Way(lambda: work.is_wanted, lambda: _run_requests(driver, worker, job), driver.clock)
    with _way_in_this_thread(way):
        outcome = worker.runner(job.items)
    if way.num_looks:
        outcome = dataclasses.replace(outcome, held_seconds=way.end())
    return outcome, way.given_seconds


def _run_requests(driver: Driver, worker: Worker, part: Part) -> None:
    start, current, busy = time.monotonic(), worker.current, held_here()
    worker.paused = part
    try:
        while (call := driver.next_call(worker)) is not None:
            driver.run(worker, call)
    except BaseException as error:  # the function, which sees it next, may hide it
        driver.crash(error)
        raise
    if worker.is_abandoned:
        raise Closed("a batch of requests that ran in between hangs; this part of background work runs again elsewhere")
    hold(busy)
    worker.paused = None
    worker.current = None if current is None else (part, current[1] + time.monotonic() - start)


@contextmanager
def _way_in_this_thread(way: Way | None) -> Iterator[None]:
    """Have ``look_around`` in this thread ask this one."""
    before, _here.way = _here.way, way
    try:
        yield
    finally:
        _here.way = before


def look_around() -> None:
    """Let what waits run, if this thread is in the middle of a part."""
    if _here.way is not None and not has_running_loop():  # a coroutine in a loop of the worker's own
        _here.way.look()
