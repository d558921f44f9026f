"""What a batcher asks of its arguments and its surroundings."""

from __future__ import annotations

import asyncio
import inspect
import operator
from typing import Any

from ..errors import ArgumentError


def as_length(length: Any) -> int:
    """Return a length as a whole number; an empty item still takes a place.

    >>> as_length(7), as_length(0)
    (7, 1)
    """
    try:
        whole = operator.index(length)
    except TypeError:
        raise ArgumentError(f"length_of must return a whole number, got {length!r}") from None
    if whole < 0:
        raise ArgumentError(f"length_of must return 0 or more, got {whole}")
    return max(1, whole)


def is_coroutine_function(run: Any) -> bool:
    """Say whether calling it gives something to await: a function, a method, or an object with such a call."""
    unwrapped = inspect.unwrap(run)
    return inspect.iscoroutinefunction(unwrapped) or inspect.iscoroutinefunction(type(unwrapped).__call__)


def has_running_loop() -> bool:
    """Say whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
