"""One request: what it asks for, when it is due, and where it stands."""

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


ENDED = (State.ANSWERED, State.FAILED, State.SHED, State.CANCELLED, State.CLOSED)


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
        patience = PATIENCE_SECONDS if self.deadline == math.inf else self.allowance
        self.urgency = self.arrival + patience * 2.0**-self.priority

    @property
    def allowance(self) -> float:
        """Return the seconds from arrival to deadline."""
        return self.deadline - self.arrival

    @property
    def is_live(self) -> bool:
        """Say whether the request has yet to end, and somebody still waits for the answer."""
        return self.state is State.WAITING or self.state is State.RUNNING


def longest(requests: Sequence[Request]) -> int:
    """Return the length that a batch is padded to."""
    length: int = max(map(_length, requests))
    return length
