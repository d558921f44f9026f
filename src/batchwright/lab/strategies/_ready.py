"""How the ready strategies are gathered: each file of them has a catalogue, to which its functions are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from .strategy import Make, Strategy

Ready: TypeAlias = dict[str, Strategy]


def add_to(ready: Ready, group: str, name: str, about: str, **options: Any) -> Callable[[Make], Make]:
    """Add a strategy to a catalogue; it decorates the function that makes the setup."""

    def add(make: Make) -> Make:
        # Only the entropy of an output needs classes to choose between.
        ready[name] = Strategy(
            name=name, group=group, make=make, about=about, needs_classes=group == "entropy", **options
        )
        return make

    return add
