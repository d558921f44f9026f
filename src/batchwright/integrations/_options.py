"""The options that an adapter hands on: which ones, what the framework decides itself, and where batches go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ArgumentError

# The framework opens autocast and owns the scaler; a second one would act twice.
_DECIDED = ("autocast", "scaler")


def check_options(options: Mapping[str, Any], source: str) -> None:
    """Refuse options of ``Stepper`` that the framework decides.

    Args:
        options: the options given to the adapter, by name.
        source: the framework's setting that decides them.

    >>> check_options({"clip_norm": 1.0}, "Trainer(precision=…)")
    >>> check_options({"scaler": None}, "Trainer(precision=…)")
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: scaler comes from Trainer(precision=…); leave it out
    """
    for name in _DECIDED:
        if name in options:
            raise ArgumentError(f"{name} comes from {source}; leave it out")


def move_after_collate(options: Mapping[str, Any], move: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the options; micro-batches from their ``collate``, if there is one, are moved to the device.

    >>> options = move_after_collate({"collate": sum, "clip_norm": 1.0}, float)
    >>> options["collate"]([1, 2]), options["clip_norm"]
    (3.0, 1.0)
    """
    collate = options.get("collate")
    if collate is None:
        return dict(options)
    return {**options, "collate": lambda examples: move(collate(examples))}
