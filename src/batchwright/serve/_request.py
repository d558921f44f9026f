"""One request on its way: waiting, running, ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, final

_length = attrgetter("length")
# What a request without a deadline counts as allowed, when it is compared with those that have one.
PATIENCE_SECONDS = 1.0


@final
class State(Enum):
    """Where a request is; it only moves forward, and ends once."""

    WAITING = "waiting"
    RUNNING = "running"
    ANSWERED = "answered"
    FAILED = "failed"
    SHED = "shed"
    CANCELLED = "cancelled"
    CLOSED = "closed"

    @property
    def is_live(self) -> bool:
        """Say whether the request has yet to end."""
        return self in (State.WAITING, State.RUNNING)


@final
@dataclass(slots=True, eq=False)
class Request:
    """An item, when it came, by when it is due, and how it ended.

    ``urgency = arrival + allowance × 2 ** -priority``, fixed on arrival: whatever comes later than that instant goes
    behind it, so nothing waits for ever.
    """

    item: Any
    length: int
    arrival: float
    deadline: float = math.inf
    priority: float = 0.0
    waiter: Any = None
    state: State = State.WAITING
    passed_over: int = 0
    result: Any = None
    error: BaseException | None = None
    urgency: float = 0.0

    def __post_init__(self) -> None:
        self.urgency = self.arrival + min(self.allowance, self._patience()) * 2.0**-self.priority

    @property
    def allowance(self) -> float:
        """Return the seconds from arrival to deadline."""
        return self.deadline - self.arrival

    @property
    def is_live(self) -> bool:
        """Say whether somebody still waits for the answer."""
        return self.state is State.WAITING or self.state is State.RUNNING

    def _patience(self) -> float:
        return PATIENCE_SECONDS if self.deadline == math.inf else math.inf


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of the function gave: one value an item, or an error.

    Args:
        values: one for each item; an exception object fails that item alone.
        error: what was raised instead.
        is_oom: the error means that memory ran out.
        is_final: the error says nothing about the items, so running parts of them would not help.
        is_lost: the event loop that ran the batch is gone; another one may do better.
    """

    values: Sequence[Any] = ()
    error: BaseException | None = None
    is_oom: bool = False
    is_final: bool = False
    is_lost: bool = False


def longest(requests: Sequence[Request]) -> int:
    """Return the length that the batch is padded to."""
    length: int = max(map(_length, requests))
    return length
