"""Checks of saved states: what a policy would trip over, or silently follow, is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._checks import as_number, as_whole, is_number
from ..errors import ArgumentError

Check = Callable[[str, Any], Any]


def check_none(name: str, saved: Any) -> None:
    """Refuse a state of a policy that remembers nothing."""
    if saved is not None:
        raise ArgumentError(f"{name} must be None, got {saved!r}")


def check_number(name: str, saved: Any, **bounds: Any) -> None:
    """Refuse what is not a finite number within bounds."""
    as_number(name, saved, **bounds)


def check_whole(name: str, saved: Any) -> None:
    """Refuse what is not a whole number of 0 or more."""
    as_whole(name, saved, least=0)


def check_size(name: str, saved: Any) -> None:
    """Refuse what is not a number of examples."""
    as_number(name, saved, least=1)


def optional(check: Check) -> Check:
    """Return a check that lets None pass."""
    return lambda name, saved: None if saved is None else check(name, saved)


def check_record(name: str, saved: Any, checks: Mapping[str, Check], *, may_lack: Sequence[str] = ()) -> None:
    """Check a dict key by key; it has these keys and no other.

    >>> check_record("state", {"mean": "x"}, {"mean": check_number})
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: state['mean'] must be a number, got 'x'
    """
    needed = [key for key in checks if key not in may_lack]
    if not isinstance(saved, Mapping) or not set(needed) <= saved.keys() <= checks.keys():
        raise ArgumentError(f"{name} must be a dict with {', '.join(map(repr, needed))}, got {saved!r}")
    for key, value in saved.items():
        checks[key](f"{name}[{key!r}]", value)


def check_numbers(name: str, saved: Any, *, most: int, **bounds: Any) -> None:
    """Check a list of at most so many finite numbers."""
    if not isinstance(saved, list) or len(saved) > most:
        raise ArgumentError(f"{name} must be a list of at most {most} numbers, got {saved!r}")
    for index, value in enumerate(saved):
        as_number(f"{name}[{index}]", value, **bounds)


def check_parts(name: str, saved: Any, checks: Sequence[Check]) -> None:
    """Check a list that has one state for each part."""
    if not isinstance(saved, list) or len(saved) != len(checks):
        raise ArgumentError(f"{name} must be a list of {len(checks)}, got {saved!r}")
    for index, (value, check) in enumerate(zip(saved, checks, strict=True)):
        check(f"{name}[{index}]", value)


def check_form(name: str, saved: Any, first: Any) -> None:
    """Refuse a state that has not the form of the policy's first one; what begins as None may become any JSON value."""
    if isinstance(first, Mapping):
        if not isinstance(saved, Mapping) or not first.keys() <= saved.keys():
            raise ArgumentError(f"{name} must be a dict with {', '.join(map(repr, first))}, got {saved!r}")
        for key, value in saved.items():
            check_form(f"{name}[{key!r}]", value, first.get(key))
    elif isinstance(first, list):
        if not isinstance(saved, list) or (first and len(saved) != len(first)):
            raise ArgumentError(f"{name} must be a list{f' of {len(first)}' if first else ''}, got {saved!r}")
        for index, item in enumerate(saved):
            check_form(f"{name}[{index}]", item, first[index] if first else None)
    elif is_number(first):
        as_number(name, saved, infinite=True)
    elif isinstance(saved, dict | list):
        check_form(name, saved, type(saved)())
    elif not (saved is None or isinstance(saved, str | bool)):
        as_number(name, saved, infinite=True)


def check_flag(name: str, saved: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(saved, bool):
        raise ArgumentError(f"{name} must be True or False, got {saved!r}")
