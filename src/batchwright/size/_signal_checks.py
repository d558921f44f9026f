"""Checks of the settings of signal-driven policies: each refusal says what came and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ArgumentError
from ._numbers import as_number


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not one of the allowed ones."""
    if value not in allowed:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_inside(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number that is not above ``low`` and below ``high``."""
    if not low < as_number(name, value) < high:
        raise ArgumentError(f"{name} must be above {low:g} and below {high:g}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")


def check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    """Refuse limits that leave no room between them."""
    if not as_number(low_name, low) < as_number(high_name, high):
        raise ArgumentError(f"{low_name} must be below {high_name}, got {low_name}={low!r}, {high_name}={high!r}")


def refuse_given(settings: Mapping[str, object], *, belong_to: str) -> None:
    """Refuse settings that were given although the chosen rule has no use for them."""
    given = [f"{name}={value!r}" for name, value in settings.items() if value is not None]
    if given:
        raise ArgumentError(f"{', '.join(given)} belongs to {belong_to}; leave it out or choose that")
