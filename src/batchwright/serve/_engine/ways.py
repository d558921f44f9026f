"""Ways: a part of offline work looks, between its steps, whether requests wait, and lets them run first."""

from __future__ import annotations

import contextvars
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, final

from ...errors import Closed, RunTimeout
from .calls import Call, Outcome
from .lifetimes import forget_in_forks
from .neighbours import Job
from .runners import Worker
from .units import Part
from .waiters import has_running_loop
from .work import Work


class _Here(threading.local):
    """What runs in this thread: a part that can give way, or nothing that can."""

    way: Way | None = None

    def forget(self) -> None:
        """Give way to nobody in the child of a fork, where only the thread that made it lives."""
        self.way = None


_here = _Here()
forget_in_forks(_here)


@final
class Way:
    """How a part gives way to requests, and for how long it held them up in between.

    Args:
        is_wanted: says whether somebody waits at a time; asked often, so it needs no lock.
        run_others: runs what waits, and returns once the part may go on.
        clock: returns seconds that never go back.

    Attributes:
        num_looks: how often it was looked whether somebody waits.
        given_seconds: what others took in between.
    """

    def __init__(
        self, is_wanted: Callable[[float], bool], run_others: Callable[[], None], clock: Callable[[], float]
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
        if self._is_wanted(now) and _has_room() and not _is_recording(_torch()):
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


# How many calls deep requests may always go in the middle of a part; at most half of what Python allows.
_ROOM = 500


def _has_room() -> bool:
    """Say whether a part is not so deep in calls of its own that requests would end with ``RecursionError``."""
    try:
        _descend(min(_ROOM, sys.getrecursionlimit() // 2))
    except RecursionError:
        return False
    return True


def _descend(depth: int) -> None:
    if depth:
        _descend(depth - 1)


def _is_recording(torch: Any) -> bool:
    """Say whether what this thread starts goes into a CUDA graph, and does not run now."""
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Driver(Protocol):
    """What runs requests in the middle of a part."""

    clock: Callable[[], float]

    def next_call(self, worker: Worker, part: Part, *, may_run: bool) -> Call | None:
        """Return requests to run now; None: the part may go on, as it does in any case unless more ``may_run``."""

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
    requests = job.requests if isinstance(job, Call) else []
    if not work.has_background:
        return worker.runner(job.items, requests), 0.0
    way = _way_of_part(driver, work, worker, job) if isinstance(job, Part) else Way(_never, _nothing, driver.clock)
    with _way_in_this_thread(way):
        outcome = worker.runner(job.items, requests)
    if way.num_looks:
        outcome = dataclasses.replace(outcome, held_seconds=way.end())
    return outcome, way.given_seconds


def interrupted() -> Outcome:
    """Return what becomes of a part that gave way to requests that hang."""
    why = "requests that ran in the middle of this part hang"
    return Outcome(error=RunTimeout(f'{why}, and with on_error="raise" no item runs twice'), is_lost=True)


def _way_of_part(driver: Driver, work: Work, worker: Worker, part: Part) -> Way:
    # Requests run as the part began: what it has set since then is its own, and what they set is theirs.
    context, modes = contextvars.copy_context(), _modes_now(_torch())

    def run_requests() -> None:
        with _in_modes(modes):
            context.run(_run_requests, driver, work, worker, part)

    return Way(lambda now: worker.is_abandoned or work.is_wanted(now), run_requests, driver.clock)


def _never(now: float) -> bool:
    return False  # requests only tell how often the function looks


def _nothing() -> None:
    return None


def _run_requests(driver: Driver, work: Work, worker: Worker, part: Part) -> None:
    start, current = time.monotonic(), worker.current
    work.pause(part)
    worker.claim.has_begun = True
    try:
        may_run = True
        while (call := driver.next_call(worker, part, may_run=may_run)) is not None:
            driver.run(worker, call)
            may_run = not work.must_go_on
    except BaseException as error:  # the function, which sees it next, may hide it
        driver.crash(error)
        raise
    finally:
        work.resume(part)
        worker.claim.has_begun = False
    if worker.is_abandoned:
        raise Closed("this call took longer than run_timeout_ms, or requests in the middle of it did, and was given up")
    worker.runner.is_awaiting = False
    worker.paused = None
    worker.current = None if current is None else (part, current[1] + time.monotonic() - start)


@final
class _Modes(NamedTuple):
    """What decides in this thread how torch computes; by default, as a thread begins.

    Args:
        casts: for each kind of device, whether autocast is on, and its type.
        is_inference: inference mode is on.
        has_grad: gradients are recorded.
    """

    casts: tuple[tuple[bool, Any], ...] = ()
    is_inference: bool = False
    has_grad: bool = True


_DEVICES = ("cpu", "cuda", "mps", "xpu")


def _torch() -> Any:
    """Return torch if it has been imported, by whomever."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "set_autocast_dtype"):  # something that stands in its place
        return None
    return None if getattr(torch.__spec__, "_initializing", False) else torch


def _modes_now(torch: Any) -> _Modes:
    if torch is None:
        return _Modes()
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICES)
    return _Modes(casts, torch.is_inference_mode_enabled(), torch.is_grad_enabled())


@contextmanager
def _in_modes(modes: _Modes) -> Iterator[None]:
    """Have torch compute in these modes: a request must not get other numbers where a part has entered autocast."""
    torch = _torch()
    now = _modes_now(torch)
    # Without casts: torch was imported by the part, and its thread began without autocast.
    casts = modes.casts or tuple((False, dtype) for _, dtype in now.casts)
    if now == modes._replace(casts=casts):
        try:
            yield
        finally:
            _set_modes(torch, now)
        return
    with torch.inference_mode(modes.is_inference), torch.set_grad_enabled(modes.has_grad):
        _set_casts(torch, casts)
        try:
            yield
        finally:
            _set_casts(torch, now.casts)


def _set_modes(torch: Any, modes: _Modes) -> None:
    """Go back to these modes, whatever a request has left behind."""
    if _modes_now(torch) != modes:
        torch.set_grad_enabled(modes.has_grad)
        _set_casts(torch, modes.casts)


def _set_casts(torch: Any, casts: tuple[tuple[bool, Any], ...]) -> None:
    for kind, (is_on, dtype) in zip(_DEVICES, casts, strict=True):
        torch.set_autocast_enabled(kind, is_on)
        torch.set_autocast_dtype(kind, dtype)


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
