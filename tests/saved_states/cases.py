"""What a saved state is: how it comes about, and how to go on from it."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "states"


@dataclass(frozen=True)
class Case:
    """One saved state.

    ``save()`` returns the state as JSON values, ``go_on(state)`` what follows from it. What both returned when the
    state was recorded is in the file of the case's room.
    """

    name: str
    save: Callable[[], Any]
    go_on: Callable[[Any], Any]
    tolerance: float = 1e-12


@dataclass(frozen=True)
class FolderCase:
    """One saved folder: ``save(folder)`` makes it, ``go_on(folder)`` returns what follows and leaves it as it is.

    ``state(folder)`` returns what batchwright itself has put into it.
    """

    name: str
    save: Callable[[Path], None]
    go_on: Callable[[Path], Any]
    state: Callable[[Path], Any]
    tolerance: float


def plain(value: Any) -> Any:
    """Return a value as it comes back from JSON."""
    return json.loads(json.dumps(value))


def without_words(value: Any) -> Any:
    """Return a state without explanations, whose wording is free; in texts of settings 6.0 is the same number as 6."""
    if isinstance(value, dict):
        return {name: without_words(item) for name, item in value.items() if name != "reason"}
    if isinstance(value, str):
        value = re.sub(r" #[\w=+/.!-]+", "", value)  # the values of a cost, which earlier versions did not record
        return re.sub(r"(?<![\w.])(\d+)\.0(?![\w.])", r"\1", value)
    return [without_words(item) for item in value] if isinstance(value, list) else value


def difference(found: Any, expected: Any, tolerance: float, place: str = "") -> str | None:
    """Say where two JSON values differ first, numbers by more than a relative tolerance; None where they do not."""
    if isinstance(found, dict) and isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f"{place}: {sorted(found)} and not {sorted(expected)}"
        pairs = [(found[name], expected[name], f"{place}.{name}") for name in expected]
    elif isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f"{place}: {len(found)} items and not {len(expected)}"
        pairs = [(*both, f"{place}[{number}]") for number, both in enumerate(zip(found, expected, strict=True))]
    elif isinstance(found, float) and isinstance(expected, float):
        is_close = found == expected or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance / 1000)
        return None if is_close else f"{place}: {found!r} and not {expected!r}"
    else:
        return (
            None if type(found) is type(expected) and found == expected else f"{place}: {found!r} and not {expected!r}"
        )
    return next((line for pair in pairs if (line := difference(*pair[:2], tolerance, pair[2]))), None)
