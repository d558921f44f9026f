"""Gradients taken aside and put back, so that a failed attempt leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor, nn

Held: TypeAlias = "list[tuple[nn.Parameter, Tensor]]"


def set_aside(parameters: Sequence[nn.Parameter]) -> Held:
    """Return the gradients that are there, and leave none."""
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if held:
        drop_gradients(parameters)
    return held


def drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set every gradient to None."""
    for parameter in parameters:
        parameter.grad = None


def add_back(held: Held) -> None:
    """Add gradients to those that are there now, as ``backward`` would."""
    for parameter, gradient in held:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def present(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
