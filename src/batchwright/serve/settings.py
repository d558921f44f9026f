"""The settings of a batcher: frozen, checked once, replaced as a whole when they change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from .._checks import as_number, as_whole, check_choice
from .._types import MAX_INT32

POLICIES = ("adaptive", "greedy", "window")
ON_ERROR = ("bisect", "raise")
ON_OOM = ("split", "raise")
# Each step of priority halves or doubles the patience; a factor of 2**10 is as good as "always" or "never".
MAX_PRIORITY = 10
# Beyond these, sums and products of numbers would leave what a float holds, and times what a thread can wait for.
MAX_WHOLE = 2**63 - 1
MAX_LENGTH = 2**53
MAX_WAIT_MS = 86_400_000.0
MAX_DEADLINE_MS = 365 * MAX_WAIT_MS


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides when a batch closes and what happens when it fails.

    Args:
        policy: "adaptive", "greedy" or "window".
        max_items: the most requests in a batch.
        max_wait_ms: the window of policy "window"; the other policies never wait on purpose.
        deadline_ms: the time a request may take from submission to answer; None: no limit.
        max_tokens: the most ``num_items × longest`` in a batch; None: no limit.
        max_queue: the most requests that wait; further requests are refused with ``QueueFull``.
        on_error: "bisect" finds the bad item and answers the others; "raise" fails the whole batch.
        on_oom: "split" runs a batch that ran out of memory in halves; "raise" treats it like any other error.

    >>> Settings(max_items=0)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: max_items must be a whole number of 1 or more, got 0
    """

    policy: str = "adaptive"
    max_items: int = 64
    max_wait_ms: float = 10.0
    deadline_ms: float | None = None
    max_tokens: int | None = None
    max_queue: int = 1000
    on_error: str = "bisect"
    on_oom: str = "split"

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICIES)
        check_choice("on_error", self.on_error, ON_ERROR)
        check_choice("on_oom", self.on_oom, ON_OOM)
        plain: dict[str, Any] = {
            "max_items": as_whole("max_items", self.max_items, least=1, most=MAX_WHOLE),
            "max_queue": as_whole("max_queue", self.max_queue, least=1, most=MAX_WHOLE),
            "max_wait_ms": as_number("max_wait_ms", self.max_wait_ms, least=0, most=MAX_WAIT_MS),
        }
        if self.max_tokens is not None:
            plain["max_tokens"] = as_whole("max_tokens", self.max_tokens, least=1, most=MAX_WHOLE)
        if self.deadline_ms is not None:
            plain["deadline_ms"] = as_deadline(self.deadline_ms)
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def as_deadline(deadline_ms: Any) -> float:
    """Return a deadline above 0 as a plain number; infinity, and what is more than a year, means no deadline.

    >>> as_deadline(50), as_deadline(float("inf")), as_deadline(1e300)
    (50.0, inf, inf)
    """
    # A shortcut for plain numbers, since every request may bring a deadline of its own.
    kind = type(deadline_ms)
    if (kind is float or kind is int) and 0 < deadline_ms <= MAX_INT32:
        return float(deadline_ms)
    deadline = as_number("deadline_ms", deadline_ms, above=0, infinite=True)
    return deadline if deadline <= MAX_DEADLINE_MS else math.inf


def as_length(length: Any) -> int:
    """Return the length of an item as a plain number of 1 or more: an empty item still takes a place.

    >>> as_length(3), as_length(0)
    (3, 1)
    """
    if type(length) is int and 0 < length <= MAX_INT32:
        return length
    return as_whole("the result of length_of", length, least=0, most=MAX_LENGTH) or 1


def as_priority(priority: Any) -> float:
    """Return a priority from -10 to 10 as a plain number.

    >>> as_priority(3)
    3.0
    """
    if type(priority) in (int, float) and -MAX_PRIORITY <= priority <= MAX_PRIORITY:  # a shortcut, as above
        return float(priority)
    return as_number("priority", priority, least=-MAX_PRIORITY, most=MAX_PRIORITY)
