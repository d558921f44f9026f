"""The response to a signal: by how much a size grows or shrinks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from ..errors import ArgumentError
from ._numbers import TIMES, as_number, as_size, show
from ._signal_checks import check_choice

Mode: TypeAlias = Literal["exponential", "linear"]


@final
@dataclass(frozen=True)
class Response:
    """Grow or shrink a size by a factor or by a number of examples; never below one example.

    ``gain`` makes it proportional to the variation ``v`` of the signal, at most one whole step::

        exponential   size × exp(gain·v), from size × down to size × up
        linear        size + gain·v,      from size − down to size + up

    Args:
        mode: ``"exponential"`` multiplies, ``"linear"`` adds and subtracts.
        up: the factor, 1 or more, or the number of examples to add.
        down: the factor, above 0 and at most 1, or the number of examples to take away.
        gain: None answers every variation with the whole step.

    >>> Response("exponential", up=2.0, down=0.5).apply(64, 1)[0]
    128.0
    >>> Response("linear", up=16, down=16, gain=100).apply(64, -0.02)
    (62.0, '64 - 2 = 62')
    """

    mode: Mode
    up: float
    down: float
    gain: float | None = None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        is_factor = self.mode == "exponential"
        up, down = as_number("up", self.up), as_number("down", self.down)
        if up < is_factor or (down <= 0 or down > 1 if is_factor else down < 0):
            allowed = "factors, up of 1 or more and down above 0 and at most 1" if is_factor else "numbers of examples"
            raise ArgumentError(f"mode={self.mode!r} takes {allowed}, got up={self.up!r}, down={self.down!r}")
        if up == down == is_factor:
            raise ArgumentError(f"up={self.up!r} and down={self.down!r} never change the size; choose one that does")
        if self.gain is not None:
            as_number("gain", self.gain, above=0)

    def apply(self, size: int, variation: float) -> tuple[float, str]:
        """Return the size after a variation, above 0 to grow and below 0 to shrink, and the sum in words."""
        if variation == 0:
            return float(size), f"holds {size}"
        return self._multiply(size, variation) if self.mode == "exponential" else self._add(size, variation)

    def _multiply(self, size: int, variation: float) -> tuple[float, str]:
        factor = self.up if variation > 0 else self.down
        if self.gain is not None:
            factor = math.exp(min(max(self.gain * variation, math.log(self.down)), math.log(self.up)))
        return _at_least_one(size * factor, f"{size} {TIMES} {show(factor)}")

    def _add(self, size: int, variation: float) -> tuple[float, str]:
        step = self.up if variation > 0 else -self.down
        if self.gain is not None:
            step = min(max(self.gain * variation, -self.down), self.up)
        return _at_least_one(size + step, f"{size} {'+' if step >= 0 else '-'} {show(abs(step))}")


def _at_least_one(size: float, words: str) -> tuple[float, str]:
    # A finite size that is at least 1 keeps every transform behind it, logarithms too, in its domain.
    bounded = max(1.0, as_size(size))
    return bounded, f"{words} = {show(size)}" + ("" if bounded == size else f", taken as {show(bounded)}")
