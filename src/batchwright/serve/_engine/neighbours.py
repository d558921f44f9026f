"""Neighbours: what ran at the same time, and requests that run again without it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias, final

from .calls import Call, gone
from .core import Core, Turn
from .request import Request
from .units import Part

Job: TypeAlias = Call | Part


@final
@dataclass
class Run:
    """A job that runs, the part in whose middle it does, and whether a part or another batch ran at any time meanwhile.

    A part does not have those for neighbours that run in its middle: they have ended when it goes on.
    """

    job: Job
    inside: Part | None = None
    beside_part: bool = False
    beside_call: bool = False

    @property
    def is_crowded(self) -> bool:
        """Say whether anything ran meanwhile."""
        return self.beside_part or self.beside_call

    def note(self, other: Run) -> None:
        if other.inside is None or other.inside is not self.job:
            is_part = isinstance(other.job, Part)
            self.beside_part |= is_part
            self.beside_call |= not is_part


@final
class Neighbours:
    """What runs at the same time shares the memory, and so nothing is blamed for what its neighbours held.

    Requests that ran out of memory beside a part of background work run again once all parts have ended; until then no
    new part begins. An item that ran out of memory alone, but beside other batches, runs again once these have ended.
    If it is short again beside later ones, no new batch begins before it has run: not at once, since one of those that
    it waits for may hang.

    Args:
        core: of the requests.
        paused: parts that wait in their middle, of all batchers of a device.
    """

    def __init__(self, core: Core, paused: set[Part]) -> None:
        self._core = core
        self._paused = paused
        self._running: dict[int, Run] = {}
        self._again: tuple[Call, ...] = ()
        # By what is left to run of a batch: whether it must run without other batches, and not only without parts.
        self._quiet: dict[int, bool] = {}
        # By the same: the batches that ran beside an item, and have not ended.
        self._awaited: dict[int, set[int]] = {}

    @property
    def is_awaited(self) -> bool:
        """Say whether requests wait until others have ended."""
        return bool(self._again)

    @property
    def keeps_parts_out(self) -> bool:
        """Say whether no new part may begin."""
        return bool(self._quiet)

    @property
    def keeps_batches_out(self) -> bool:
        """Say whether no new batch may begin."""
        return any(self._quiet.values())

    def least_urgency(self) -> float:
        """Return when the most urgent of the requests that wait is due; ``inf``: none does. It needs no lock."""
        waiting = (request for call in self._again for request in tuple(call.requests))
        return min((request.urgency for request in waiting if request.is_live), default=math.inf)

    @property
    def is_busy(self) -> bool:
        """Say whether anything runs."""
        return bool(self._running)

    def begin(self, job: Job, inside: Part | None = None) -> None:
        """Note a job that begins, maybe in the middle of a part."""
        run = Run(job, inside)
        for other in self._running.values():
            run.note(other)
            other.note(run)
        self._running[id(job)] = run

    def end(self, job: Job) -> Run:
        """Note that a job has ended, and return what ran meanwhile."""
        run = self._running.pop(id(job), Run(job))
        run.beside_part |= bool(self._paused)
        for awaited in self._awaited.values():
            awaited.discard(id(job))
        return run

    def put(self, call: Call, run: Run, now: float) -> list[Request]:
        """Have a batch wait that ran out of what its neighbours held; return the requests whose time is up."""
        key = id(call.steps)
        self._quiet.setdefault(key, False)
        if run.beside_call and len(call.requests) == 1:
            self._quiet[key] = key in self._awaited
            self._awaited[key] = set(self._running)
        self._core.pause(call)
        self._again += (call,)
        return self.leave(now)

    def take(self, now: float) -> Turn:
        """Return a batch that runs again, if what held the memory has ended."""
        ended = self.leave(now) if self._again else []
        call = next(filter(self._may_run, self._again), None)
        if call is None:
            return Turn(None, ended)
        self._again = tuple(other for other in self._again if other is not call)
        self._core.resume(call)
        self._core.counters.num_calls += 1
        return Turn(call, ended)

    def leave(self, now: float) -> list[Request]:
        """Let requests go that were cancelled or whose time is up, and return the latter."""
        waiting, staying, ended = deque(self._again), list[Call](), list[Request]()
        while waiting:
            call = waiting.popleft()
            ended += self._core.thin(call, now)
            if any(request.is_live for request in call.requests):
                staying.append(call)
                continue
            turn = self._core.complete(call, gone(), now, 0.0)
            ended += turn.ended
            if turn.call is None:
                self.finish(call)
            else:
                self._core.pause(turn.call)
                waiting.appendleft(turn.call)
        self._again = tuple(staying)  # at once: others look at it without the lock
        return ended

    def drop(self, now: float) -> list[Request]:
        """End the requests that wait, since the batcher is closed."""
        return self._core.drop(now, [request for call in self._again for request in call.requests]) + self.leave(now)

    def pause(self, job: Job) -> None:
        """Note that a job waits for a process before it begins."""
        if isinstance(job, Call):
            self._core.pause(job)

    def resume(self, job: Job, now: float) -> list[Request]:
        """Note that it begins now; return the requests that it comes too late for."""
        if not isinstance(job, Call):
            return []
        ended = self._core.thin(job, now)
        self._core.resume(job)
        return ended

    def finish(self, call: Call) -> None:
        """Note that nothing is left to run of a batch."""
        self._quiet.pop(id(call.steps), None)
        self._awaited.pop(id(call.steps), None)

    def clear(self) -> None:
        """Forget all: nothing will run any more."""
        self._again = ()
        self._quiet.clear()
        self._awaited.clear()
        self._running.clear()

    def _may_run(self, call: Call) -> bool:
        """Say whether what may have held the memory has ended."""
        if self._paused or any(isinstance(run.job, Part) for run in self._running.values()):
            return False
        return not self._running or not (self.keeps_batches_out or self._awaited.get(id(call.steps)))
