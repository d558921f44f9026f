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

    # There is one of each, and the hash of its name would be computed anew with every count.
    __hash__ = object.__hash__


ENDED = (State.ANSWERED, State.FAILED, State.SHED, State.CANCELLED, State.CLOSED)


@final
@dataclass(slots=True, eq=False)
class Request:
    """An item, when it arrived, when it is due, and how it ended.

    ``urgency = arrival + allowance × 2 ** -priority`` is fixed on arrival. Requests that arrive after that instant are
    less urgent, so no request waits forever. A length that is only an estimate is no reason to refuse the item. While
    its batch runs, ``is_called`` tells whether the request is in a call, or waits for one.
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
    held_by: frozenset[Any] = frozenset()
    is_estimate: bool = False
    is_doubtful: bool = False
    is_called: bool = False

    def __post_init__(self) -> None:
        patience = PATIENCE_SECONDS if self.deadline == math.inf else self.allowance
        self.urgency = self.arrival + patience * 2.0**-self.priority

    @property
    def allowance(self) -> float:
        """Return the seconds from arrival to deadline."""
        return self.deadline - self.arrival

    @property
    def least_length(self) -> int:
        """Return the length that is certain: a text of unknown tokens may be cut to any length by the function."""
        return 1 if self.is_estimate else self.length

    def is_over(self, max_tokens: float) -> bool:
        """Say whether the item alone is known to be over a limit."""
        return self.length > max_tokens and not self.is_estimate

    @property
    def is_live(self) -> bool:
        """Say whether the request has yet to end, and somebody still waits for the answer."""
        return self.state is State.WAITING or self.state is State.RUNNING


def num_tokens(requests: Sequence[Request]) -> int:
    """Return the sum of the lengths."""
    return sum(map(_length, requests))


def longest(requests: Sequence[Request]) -> int:
    """Return the length that a batch is padded to."""
    length: int = max(map(_length, requests))
    return length
