"""The settings of a batcher: frozen, checked once, replaced as a whole when they change."""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any, final

from ..errors import ArgumentError

POLICIES = ("adaptive", "greedy", "window")
ON_ERROR = ("bisect", "raise")
ON_OOM = ("split", "raise")


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides when a batch closes and what happens when it fails.

    Args:
        policy: "adaptive", "greedy" or "window".
        max_items: the most requests in a batch.
        max_wait_ms: the window of policy "window"; the others never wait on purpose.
        deadline_ms: what a request is allowed from submission to answer; None: no limit.
        max_tokens: the most ``num_items × longest`` in a batch; None: no limit.
        max_queue: the most requests that wait; one more is refused with ``QueueFull``.
        on_error: "bisect" finds the bad item and answers its mates; "raise" fails the whole batch.
        on_oom: "split" runs a batch that ran out of memory in halves; "raise" treats it as any error.

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
        for name, allowed in (("policy", POLICIES), ("on_error", ON_ERROR), ("on_oom", ON_OOM)):
            if getattr(self, name) not in allowed:
                raise ArgumentError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        check_count("max_items", self.max_items)
        check_count("max_queue", self.max_queue)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens)
        if self.deadline_ms is not None:
            check_deadline(self.deadline_ms)
        if not _is_real(self.max_wait_ms) or not 0 <= self.max_wait_ms < math.inf:
            raise ArgumentError(f"max_wait_ms must be a finite number of 0 or more, got {self.max_wait_ms!r}")


def check_count(name: str, value: Any) -> None:
    """Refuse what is not a whole number of 1 or more."""
    try:
        whole = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = 0
    if whole < 1:
        raise ArgumentError(f"{name} must be a whole number of 1 or more, got {value!r}")


def check_deadline(deadline_ms: Any) -> None:
    """Refuse what is not a number above 0; infinity is one, and means no deadline."""
    if not _is_real(deadline_ms) or not deadline_ms > 0:
        raise ArgumentError(f"deadline_ms must be a number above 0, got {deadline_ms!r}; math.inf means no deadline")


def check_priority(priority: Any) -> None:
    """Refuse a priority outside -10 to 10: one step halves or doubles the patience, 2**10 is as good as for ever."""
    if not _is_real(priority) or not -10 <= priority <= 10:
        raise ArgumentError(f"priority must be a number from -10 to 10, got {priority!r}")


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
