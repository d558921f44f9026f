"""One request, where it stands, and what a call of the function gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, final

_length = attrgetter("length")
# The allowance of a request without a deadline, where it is compared with requests that have one.
PATIENCE_SECONDS = 1.0


@final
class State(Enum):
    """Where a request stands; it only moves forward, and ends once."""

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
    """An item, when it arrived, when it is due, and how it ended.

    ``urgency = arrival + allowance × 2 ** -priority`` is fixed on arrival. Requests that arrive after that instant are
    less urgent, so no request waits forever.
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
    """What a call of the function gave: one value per item, or an error.

    Args:
        values: one per item; an exception object fails only that item.
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
    """Return the length that a batch is padded to."""
    length: int = max(map(_length, requests))
    return length
