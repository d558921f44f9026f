"""RecentNoise: the noise of the newest updates, for a gradient that changes faster than a long average forgets."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple, final

from ...errors import ArgumentError
from .._states import check_numbers
from ..noise import MIN_UPDATES, TOO_LARGE, NoiseAverage

# Measured updates that are kept. One reading far above the others leaves with the twelfth after it.
_NUM_KEPT = 12
# A mean of so few readings must be this many of its standard errors above 0, or away from another mean.
_SURE = 3.0
# The same for an average of many updates.
_SURE_OF_MANY = 2.0


@final
class Evidence(NamedTuple):
    """What is known of the noise: the scale, None if nobody can tell, whether it is sure, and over how many updates.

    A scale that is not sure is what the noise scale is at least.
    """

    scale: float | None
    is_sure: bool
    num_updates: float


@final
class RecentNoise(NamedTuple):
    """Means of ``S`` and ``G2`` over the newest updates, and the standard error of ``G2``.

    The error comes from successive differences (von Neumann 1941), ``sqrt(mean (g_i − g_(i−1))² / 2n)``: a mean that
    drifts adds hardly anything to them, while it adds all of its way to the spread around the mean.

    >>> recent = RecentNoise.of([[8.0, float(value)] for value in range(12, 0, -1)])
    >>> recent.g2, round(recent.error, 3), recent.is_reliable
    (6.5, 0.204, True)
    """

    s: float
    g2: float
    error: float
    num_updates: int

    @staticmethod
    def of(readings: list[list[float]]) -> RecentNoise:
        """Return the means of readings ``[S, G2]``, oldest first."""
        num = len(readings)
        if num < MIN_UPDATES:
            return RecentNoise(0.0, 0.0, math.inf, num)
        square = fmean((after[1] - before[1]) ** 2 for before, after in pairwise(readings))
        means = fmean(s for s, _ in readings), fmean(g2 for _, g2 in readings)
        return RecentNoise(*means, math.sqrt(square / 2 / num), num)

    @property
    def is_reliable(self) -> bool:
        """Return whether ``G2`` is surely above 0."""
        return self.s > 0 and self.g2 > _SURE * self.error

    def has_left(self, average: NoiseAverage) -> bool:
        """Return whether ``G2`` is surely not what a longer average says."""
        return abs(self.g2 - average.g2) > _SURE * self.error

    def weigh(self, average: NoiseAverage) -> Evidence:
        """Return what the two tell together.

        The longer average counts, unless ``G2`` has surely left it, or it is lost in its spread and the newest updates
        are not. A ``G2`` that is lost in its error is at most so many errors above its mean, so that the noise scale is
        at least ``S / (G2 + 2 errors)``, with 3 errors for the newest updates.
        """
        if self.has_left(average) or (self.is_reliable and not average.is_reliable):
            scale, most = self.s / self.g2 if self.is_reliable else None, self.g2 + _SURE * self.error
            return _judge(scale, self.s, most, float(self.num_updates))
        scale, most = average.scale if average.is_reliable else None, average.g2 + _SURE_OF_MANY * average.g2_error
        return _judge(scale, average.s, most, average.num_updates)


def _judge(scale: float | None, s: float, most: float, num_updates: float) -> Evidence:
    if scale is not None:
        return Evidence(scale, is_sure=True, num_updates=num_updates)
    is_bound = num_updates >= MIN_UPDATES and s > 0 and most > 0
    return Evidence(s / most if is_bound else None, is_sure=False, num_updates=num_updates)


def add_recent(readings: list[list[float]], s: float, g2: float) -> list[list[float]]:
    """Return the newest readings with one more; a value that is not finite, or whose square is not, is left out."""
    if not (abs(s) < TOO_LARGE and abs(g2) < TOO_LARGE):
        return readings
    return [*readings, [s, g2]][-_NUM_KEPT:]


def check_recent(name: str, saved: Any) -> None:
    """Refuse what is not a list of a few pairs."""
    if not isinstance(saved, list) or len(saved) > _NUM_KEPT:
        raise ArgumentError(f"{name} must be a list of at most {_NUM_KEPT} pairs, got {saved!r}")
    for index, pair in enumerate(saved):
        check_numbers(f"{name}[{index}]", pair, most=2, least=-TOO_LARGE, below=TOO_LARGE)
        if len(pair) != 2:
            raise ArgumentError(f"{name}[{index}] must hold s and g2, got {pair!r}")
