"""Compare a saved state with the object that is to continue from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import StateMismatchError


def check_same(name: str, saved: Any, mine: Any) -> None:
    """Refuse a saved value that differs from ours, naming both; mappings are compared key by key.

    >>> check_same("seed", 1, 2)
    Traceback (most recent call last):
        ...
    batchwright.errors.StateMismatchError: the state was saved with seed = 1, here it is 2; use the same data and \
settings, or start without the state
    """
    if isinstance(mine, dict) and isinstance(saved, Mapping):
        for key in sorted(mine.keys() | saved.keys()):
            check_same(key, saved.get(key), mine.get(key))
    elif saved != mine:
        raise StateMismatchError(
            f"the state was saved with {name} = {saved!r}, here it is {mine!r}; "
            "use the same data and settings, or start without the state"
        )


def read_whole(state: Mapping[str, Any], name: str) -> int:
    """Return a whole number of 0 or more from a saved state, or refuse the state.

    >>> read_whole({"epoch": 3}, "epoch")
    3
    """
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateMismatchError(f"the state needs {name} as a whole number of 0 or more, got {value!r}")
    return value
