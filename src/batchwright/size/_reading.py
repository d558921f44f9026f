"""What ``controller.observe`` is given: names and types are checked, counts are kept up."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any, TypeAlias

from ..errors import ArgumentError
from ._numbers import as_whole
from .observation import Observation

Counts: TypeAlias = dict[str, int | None]

COUNTS = ("epoch", "step", "examples", "tokens")
_LEAST = {**dict.fromkeys(COUNTS, 0), "batch_size": 1, "noise_parts": 1}
# The size in force is the controller's to say.
_KNOWN = tuple(item.name for item in fields(Observation) if item.name != "size")


def read_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was observed as plain numbers, without the figures that are None.

    >>> read_fields({"epoch": 3, "loss": 1, "entropy": None})
    {'epoch': 3, 'loss': 1.0}
    """
    unknown = [name for name in given if name not in _KNOWN]
    if unknown:
        raise ArgumentError(f"observe knows {', '.join(_KNOWN)}; got {', '.join(unknown)}")
    return {name: _read(name, value) for name, value in given.items() if value is not None}


def _read(name: str, value: Any) -> int | float | bool:
    if name in _LEAST:
        return as_whole(name, value, least=_LEAST[name])
    if name == "noise_reliable":
        return bool(value)
    # A tensor or an array of one number is taken for that number: the state of a policy must stay plain JSON.
    if not isinstance(value, (bool, str, bytes)):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise ArgumentError(f"{name} must be a number, got {value!r}")


def count_on(counts: Counts, observed: Mapping[str, Any]) -> Counts:
    """Return the counts after an observation.

    A count that was given wins. With ``batch_size`` one update and its examples are added to the others. What was never
    counted stays None, so that a policy that needs it says so.

    >>> count_on({"epoch": 2, "step": 9, "examples": None, "tokens": None}, {"batch_size": 64})
    {'epoch': 2, 'step': 10, 'examples': 64, 'tokens': None}
    """
    after = dict(counts)
    if "batch_size" in observed:
        after["step"] = (counts["step"] or 0) + 1
        after["examples"] = (counts["examples"] or 0) + observed["batch_size"]
    return {name: observed.get(name, count) for name, count in after.items()}
