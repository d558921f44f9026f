"""What a sampler asks of a controller: the size of the next batch, and nothing else."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import ArgumentError
from ._arrays import as_whole


class HasSize(Protocol):
    """Anything that knows how many examples the next update uses, over all ranks."""

    @property
    def size(self) -> int:
        """Return the number of examples."""


def check_controller(controller: Any) -> HasSize:
    """Return the controller, or say what one is.

    >>> check_controller(64)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: controller must have a whole number .size, as a BatchSizeController has, got 64
    """
    if not hasattr(controller, "size"):
        raise ArgumentError(
            f"controller must have a whole number .size, as a BatchSizeController has, got {controller!r}"
        )
    checked: HasSize = controller
    read_size(checked)
    return checked


def read_size(controller: HasSize) -> int:
    """Return the size that a controller wants now, as a plain ``int`` of 1 or more."""
    return as_whole("controller.size", controller.size, least=1)
