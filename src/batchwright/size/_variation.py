"""How a loss varies: from one value to the next, smoothed, or within a window. Pure arithmetic."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

from ..errors import ArgumentError
from ._numbers import as_number, as_whole, show
from ._signal_checks import check_flag, check_inside, check_order

Span: TypeAlias = Callable[[int], str]

# Two means of the same losses in another order differ by this share of rounding, which is no news.
_ROUNDING = 1e-12


class Verdict(NamedTuple):
    """What a measure found: above 0 the loss does well, below 0 it does not, 0 says nothing; and the words."""

    variation: float
    words: str


class Measure(ABC):
    """Turns losses, one after the other, into verdicts. What it remembers is a list of numbers."""

    @abstractmethod
    def take(self, past: list[float], loss: float, span: Span) -> tuple[Verdict | None, list[float]]:
        """Return the verdict on a loss, None while there are too few, and what to remember.

        Args:
            past: what was remembered.
            loss: the newest.
            span: a number of periods in words.
        """


@final
@dataclass(frozen=True)
class Difference(Measure):
    """``Δ = loss − previous``, or with ``alpha`` the same of the moving average.

    ``average = alpha·loss + (1 − alpha)·previous average``; the first loss is the first average. ``relative`` divides
    ``Δ`` by the size of the previous value.

    >>> Difference(tolerance=0.0).take([2.0], 1.5, "{} epochs".format)
    (Verdict(variation=0.25, words='loss fell 25 % over 1 epochs (tolerance 0 %)'), [1.5])
    """

    tolerance: float
    relative: bool = True
    alpha: float | None = None

    def __post_init__(self) -> None:
        as_number("tolerance", self.tolerance, least=0)
        check_flag("relative", self.relative)
        if self.alpha is not None:
            check_inside("alpha", self.alpha, 0, 1)

    def take(self, past: list[float], loss: float, span: Span) -> tuple[Verdict | None, list[float]]:
        """Compare a loss, or the average with it, with the one before."""
        if not past:
            return None, [loss]
        before = past[-1]
        now = loss if self.alpha is None else _blend(before, loss, self.alpha)
        what = "loss" if self.alpha is None else "average loss"
        return self.judge(_change(now, before, relative=self.relative), f"{what} {{}} over {span(1)}"), [now]

    def judge(self, change: float, sentence: str) -> Verdict:
        """Return the verdict on a change; the sentence has a place for what the loss did."""
        way = "fell" if change < 0 else "rose"
        moved = "stayed the same" if change == 0 else f"{way} {_amount(abs(change), self.relative)}"
        words = f"{sentence.format(moved)} (tolerance {_amount(self.tolerance, self.relative)})"
        return Verdict(0.0 if abs(change) <= self.tolerance else -change, words)


@final
@dataclass(frozen=True)
class Variance(Measure):
    """``var = 1/K · sum_k (loss_k − mean)²`` of the last ``K = window`` values.

    ``divide=False`` leaves out ``1/K``; ``relative`` divides by the squared mean; ``detrend`` measures around the line
    of least squares, and then a fall or rise of that line decides where the loss does not fluctuate.
    """

    window: int
    steady: float
    fluctuating: float
    tolerance: float = 0.0
    relative: bool = True
    divide: bool = True
    detrend: bool = False

    def __post_init__(self) -> None:
        as_number("tolerance", self.tolerance, least=0)
        for name in ("relative", "divide", "detrend"):
            check_flag(name, getattr(self, name))
        as_whole("window", self.window, least=3 if self.detrend else 2)
        as_number("steady", self.steady, least=0)
        check_order("steady", self.steady, "fluctuating", self.fluctuating)
        if self.tolerance and not self.detrend:
            raise ArgumentError(
                "a variance has no sign: set steady and fluctuating, or use tolerance with detrend=True"
            )

    def take(self, past: list[float], loss: float, span: Span) -> tuple[Verdict | None, list[float]]:
        """Judge the variance of the last values."""
        values = [*past, loss][-self.window :]
        return (None if len(values) < self.window else self._judge(values, span)), values

    def _judge(self, values: list[float], span: Span) -> Verdict:
        variance, slope = self._measure(values)
        words = f"variance of the loss over {span(self.window)} is {show(variance)}"
        if not math.isfinite(variance):
            return Verdict(0.0, words)
        if variance > self.fluctuating:
            return Verdict(-1.0, f"{words}, above {show(self.fluctuating)}")
        if self.detrend:
            # The line says the same as a difference of two losses, from all values.
            return Difference(self.tolerance, self.relative).judge(slope, f"{words} around a line that {{}} a period")
        if variance < self.steady:
            return Verdict(1.0, f"{words}, below {show(self.steady)}")
        return Verdict(0.0, f"{words}, between {show(self.steady)} and {show(self.fluctuating)}")

    def _measure(self, values: list[float]) -> tuple[float, float]:
        """Return the variance and the slope a value, both relative where asked."""
        largest = max(map(abs, values)) or 1.0
        # Divided by the largest, no square can overflow.
        scaled = [value / largest for value in values]
        mean, slope = _line(scaled)
        center = (len(scaled) - 1) / 2
        line = [mean + (slope * (index - center) if self.detrend else 0.0) for index in range(len(scaled))]
        square = math.fsum((value - at) ** 2 for value, at in zip(scaled, line, strict=True))
        square /= len(values) if self.divide else 1
        unit = abs(mean) if self.relative else 1 / largest
        return _divide(square, unit * unit), _divide(slope, unit)


def _line(values: list[float]) -> tuple[float, float]:
    """Return the mean and the slope of the line of least squares."""
    center = (len(values) - 1) / 2
    mean = math.fsum(values) / len(values)
    top = math.fsum((index - center) * (value - mean) for index, value in enumerate(values))
    return mean, top / math.fsum((index - center) ** 2 for index in range(len(values)))


def _blend(before: float, loss: float, alpha: float) -> float:
    # The first form leaves an average of equal values exactly there; the second cannot overflow.
    exact = before + alpha * (loss - before)
    return exact if math.isfinite(exact) else (1 - alpha) * before + alpha * loss


def _change(now: float, before: float, *, relative: bool) -> float:
    change = now - before
    if abs(change) <= _ROUNDING * max(abs(now), abs(before)):
        return 0.0
    if relative:
        change = _divide(change, max(abs(before), sys.float_info.min))
    return min(max(change, -sys.float_info.max), sys.float_info.max)


def _divide(top: float, bottom: float) -> float:
    if bottom == 0:
        return 0.0 if top == 0 else math.copysign(math.inf, top)
    return top / bottom


def _amount(value: float, relative: bool) -> str:
    return f"{show(100 * value)} %" if relative else f"by {show(value)}"
