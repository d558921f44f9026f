"""How settings are written: as the call that made them, and as text that is the same in every run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, ClassVar

from ._numbers import show


class Named:
    """A frozen dataclass that is written as the call that makes it; abstract.

    Attributes:
        name: of the function that users call.
    """

    name: ClassVar[str]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        """Return the arguments of the call, without options that have their usual value."""
        given = [(item, getattr(self, item.name)) for item in fields(self)]  # type: ignore[arg-type]
        return [_argument(item, value) for item, value in given if item.default is MISSING or value != item.default]


def _argument(item: Field[Any], value: Any) -> str:
    name = item.metadata.get("argument", item.name)
    return f"{name}={_word(value)}" if item.kw_only else _word(value)


def _word(value: Any) -> str:
    if isinstance(value, float):
        return show(value)
    if isinstance(value, tuple):  # a mapping, kept as pairs so that it is frozen
        return "{" + ", ".join(f"{key}: {_word(item)}" for key, item in value) + "}"
    return getattr(value, "__name__", type(value).__name__) if callable(value) else repr(value)


def describe(settings: Any) -> str:
    """Return settings as text that is the same in every run; functions are left out, their addresses change.

    >>> from .schedules import from_lr
    >>> describe(from_lr(lambda i: 0.5**i, start=32))
    "FromLr(start_size=32.0, power=1.0, per='epoch', every=1, after=0, max_factor=None)"
    """
    if is_dataclass(settings) and not isinstance(settings, type):
        parts = [(item.name, getattr(settings, item.name)) for item in fields(settings)]
        inside = ", ".join(f"{name}={describe(value)}" for name, value in parts if not callable(value))
        return f"{type(settings).__name__}({inside})"
    if isinstance(settings, Mapping):
        return "{" + ", ".join(f"{describe(key)}: {describe(value)}" for key, value in settings.items()) + "}"
    if isinstance(settings, (list, tuple)):
        return "(" + ", ".join(describe(value) for value in settings if not callable(value)) + ")"
    # An object without a text of its own would show its address.
    has_text = getattr(type(settings), "__repr__", None) is not object.__repr__
    return repr(settings) if has_text else type(settings).__name__
