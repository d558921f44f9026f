"""Gradient noise: how many examples an update should average, from gradients of parts of a batch. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple, final

from .._checks import as_number, as_state, read_number
from ..errors import ArgumentError
from ._states import check_numbers

# An average over fewer updates than this says nothing about its own error.
MIN_UPDATES = 8.0
# Squares of larger values overflow; NaN is not below it either.
TOO_LARGE = 1e150


def estimate_noise(q: float, gb: float, *, num_examples: int, num_parts: int) -> tuple[float, float]:
    """Return unbiased estimates of the gradient's noise and of its squared norm, for parts of any sizes.

    With ``g_i`` the mean gradient of part ``i`` of ``b_i`` examples, ``B = sum b_i`` and ``k`` parts::

        Q  = sum_i b_i |g_i|²        GB = |sum_i (b_i / B) g_i|²
        S  = (Q − B·GB) / (k − 1)    E[S]  = tr(Σ), Σ the covariance of the per-example gradient
        G2 = GB − S / B              E[G2] = |G|², the squared norm of the true gradient; may be below 0

    For equal parts this is appendix A of McCandlish et al. 2018.

    Args:
        q: ``Q``.
        gb: ``GB``, before clipping.
        num_examples: ``B``.
        num_parts: ``k``, at least 2.

    Returns:
        ``(S, G2)``.

    >>> estimate_noise(8.0, 3.0, num_examples=2, num_parts=2)
    (2.0, 2.0)
    """
    if num_parts < 2:
        raise ArgumentError(f"noise needs the gradients of at least 2 parts of a batch, got {num_parts}")
    s = (q - num_examples * gb) / (num_parts - 1)
    return s, gb - s / num_examples


def noise_ratio(s: float, g2: float, *, num_examples: int, num_parts: int) -> float:
    """Return the textbook ratio ``mean_i |g_i − g_m|² / |g_m|²`` of ``k`` equal parts, from unbiased estimates.

    Parts of ``b_i`` of ``B`` examples that are not equal count by their examples: ``sum_i (b_i / B)·|g_i − g_m|²``,
    with ``g_m = sum_i (b_i / B)·g_i``, takes the place of the mean.

    In expectation it is about ``(k − 1)·B_simple / (B + B_simple)``: it depends on how the batch was split and tends to
    ``k − 1``, however noisy the gradient is; the ratio of a single update may be above that. Prefer ``s / g2``, which
    is a number of examples.

    >>> noise_ratio(2.0, 2.0, num_examples=2, num_parts=2)
    0.3333333333333333
    """
    gb = g2 + s / num_examples
    return (num_parts - 1) * s / num_examples / gb if gb > 0 else math.inf


@final
@dataclass(frozen=True)
class NoiseAverage:
    """Moving averages of ``S`` and ``G2``, kept apart and divided last; a value that is replaced and never changed.

    A mean of ratios would be biased, often several-fold. The average forgets by examples, not by updates, so that it
    means the same at every batch size.

    Attributes:
        horizon: examples over which the average forgets.
        s: average of ``S``.
        g2: average of ``G2``.
    """

    horizon: float = 100_000.0
    s: float = 0.0
    g2: float = 0.0
    g2_square: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "horizon", as_number("horizon", self.horizon, above=0, infinite=True))

    def update(self, s: float, g2: float, *, num_examples: int) -> NoiseAverage:
        """Return the average with one more update; a value that is not finite, or whose square is not, is left out."""
        s, g2, num_examples = float(s), float(g2), int(num_examples)
        if not (abs(s) < TOO_LARGE and abs(g2) < TOO_LARGE) or num_examples < 1:
            return self
        keep, new = math.exp(-num_examples / self.horizon), -math.expm1(-num_examples / self.horizon)
        weight = keep * self.weight + new
        share = new / weight
        return NoiseAverage(
            horizon=self.horizon,
            s=self.s + share * (s - self.s),
            g2=self.g2 + share * (g2 - self.g2),
            g2_square=self.g2_square + share * (g2 * g2 - self.g2_square),
            weight=weight,
            weight_square=keep**2 * self.weight_square + new**2,
        )

    @property
    def num_updates(self) -> float:
        """Return over how many updates the average effectively runs."""
        return self.weight**2 / self.weight_square if self.weight_square else 0.0

    @property
    def scale(self) -> float | None:
        """Return the noise scale ``S / G2`` in examples, None if ``G2`` is not above 0."""
        return self.s / self.g2 if self.g2 > 0 else None

    @property
    def is_reliable(self) -> bool:
        """Return whether ``G2``, the noisier of the two, is at least two standard errors above 0."""
        if self.num_updates < MIN_UPDATES:
            return False
        return self.s > 0 and self.g2 > 2 * self.g2_error

    @property
    def g2_error(self) -> float:
        """Return the standard error of ``G2``, infinite for fewer than two updates."""
        variance = max(0.0, self.g2_square - self.g2**2)
        return math.sqrt(variance / (self.num_updates - 1)) if self.num_updates > 1 else math.inf

    def to_state(self) -> dict[str, Any]:
        """Return the average as JSON values."""
        return asdict(self)

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> NoiseAverage:
        """Return the average of a saved state."""
        names = [item.name for item in fields(NoiseAverage)]
        state = as_state(state, of="NoiseAverage", needs=names)
        bounds: dict[str, Any] = {name: {"least": -TOO_LARGE, "most": TOO_LARGE} for name in ("s", "g2")}
        bounds["horizon"] = {"infinite": True}
        return NoiseAverage(**{name: read_number(state, name, **bounds.get(name, {})) for name in names})


# Measured updates that are kept. One reading far above the others leaves with the twelfth after it.
_NUM_RECENT = 12
# A mean of so few readings must be this many of its standard errors above 0, or away from another mean.
_SURE = 3.0
# The same for an average of many updates.
_SURE_OF_AVERAGE = 2.0


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
        scale, most = average.scale if average.is_reliable else None, average.g2 + _SURE_OF_AVERAGE * average.g2_error
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
    return [*readings, [s, g2]][-_NUM_RECENT:]


def check_recent(name: str, saved: Any) -> None:
    """Refuse what is not a list of a few pairs."""
    if not isinstance(saved, list) or len(saved) > _NUM_RECENT:
        raise ArgumentError(f"{name} must be a list of at most {_NUM_RECENT} pairs, got {saved!r}")
    for index, pair in enumerate(saved):
        check_numbers(f"{name}[{index}]", pair, most=2, least=-TOO_LARGE, below=TOO_LARGE)
        if len(pair) != 2:
            raise ArgumentError(f"{name}[{index}] must hold s and g2, got {pair!r}")


# Over how many updates the comparison forgets: it drifts slowly, as training goes on.
_HORIZON = 16.0
# How far the logarithm of the true ratio is from 0 before anything was measured: ratios were 1 to 2 in our runs.
_PRIOR = 0.7
_MIN_UPDATES = 3.0


@final
@dataclass(frozen=True)
class NoiseRatio:
    """Moving averages over updates that measured both; a value that is replaced and never changed.

    ``s`` of the whole is ``factors[0]`` times that of the vectors, and ``g2`` is ``factors[1]`` times that of theirs.
    The first is known well from one update. The second is a ratio of small differences, so its scale counts only as far
    as its own error allows: the logarithm of ``(s / g2 of the whole) / (s / g2 of the vectors)`` is multiplied by
    ``trust = p² / (p² + e²)``, with ``e`` its standard error and ``p = 0.7``.

    >>> ratio = NoiseRatio()
    >>> for _ in range(20):
    ...     ratio = ratio.update((40.0, 2.0), (10.0, 1.0))
    >>> ratio.factors, ratio.trust
    ((4.0, 2.0), 1.0)
    """

    s: float = 0.0
    g2: float = 0.0
    s_vectors: float = 0.0
    g2_vectors: float = 0.0
    g2_square: float = 0.0
    g2_product: float = 0.0
    g2_vectors_square: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0

    def update(self, whole: tuple[float, float], vectors: tuple[float, float]) -> NoiseRatio:
        """Return the averages with ``(s, g2)`` of one more update; values that are not finite are left out.

        All are divided by ``s`` of the vectors: gradients of the first updates are many times larger, and would count
        as many times more.
        """
        (s, g2), (unit, g2_vectors) = whole, vectors
        if not (unit > 0 and all(abs(value) < TOO_LARGE * min(1.0, unit) for value in (*whole, *vectors))):
            return self
        s, g2, g2_vectors = s / unit, g2 / unit, g2_vectors / unit
        keep, new = math.exp(-1 / _HORIZON), -math.expm1(-1 / _HORIZON)
        weight = keep * self.weight + new
        share = new / weight
        values = {
            "s": s, "g2": g2, "s_vectors": 1.0, "g2_vectors": g2_vectors, "g2_square": g2 * g2,
            "g2_product": g2 * g2_vectors, "g2_vectors_square": g2_vectors * g2_vectors,
        }  # fmt: skip
        before = self._by_vectors()
        averages = {name: before[name] + share * (value - before[name]) for name, value in values.items()}
        return replace(self, **averages, weight=weight, weight_square=keep**2 * self.weight_square + new**2)

    def _by_vectors(self) -> dict[str, float]:
        """Return the averages divided by ``s_vectors``; those that an earlier version saved are not."""
        unit = self.s_vectors if self.s_vectors > 0 else 1.0
        names = {name: value for name, value in asdict(self).items() if not name.startswith("weight")}
        return {
            name: value / unit ** (2 if name.endswith(("square", "product")) else 1) for name, value in names.items()
        }

    @property
    def trust(self) -> float:
        """Return how far the measured ratio of scales counts, from 0 to 1."""
        num = self.weight**2 / self.weight_square if self.weight_square else 0.0
        if num < _MIN_UPDATES or not min(self.g2, self.g2_vectors, self.s, self.s_vectors) > 0:
            return 0.0
        ratio = self.g2 / self.g2_vectors
        # The two are measured on the same batches, so what both share drops out of their ratio.
        square = self.g2_square - 2 * ratio * self.g2_product + ratio**2 * self.g2_vectors_square
        error = math.sqrt(max(0.0, square) / (num - 1)) / self.g2
        return _PRIOR**2 / (_PRIOR**2 + error**2)

    @property
    def factors(self) -> tuple[float, float]:
        """Return what ``s`` and ``g2`` of the vectors are multiplied by."""
        if not (self.s > 0 and self.s_vectors > 0):
            return 1.0, 1.0
        s, trust = self.s / self.s_vectors, self.trust
        scale = 1.0 if trust == 0 else (s * self.g2_vectors / self.g2) ** trust
        return s, s / scale

    def to_state(self) -> dict[str, Any]:
        """Return the averages as JSON values."""
        return asdict(self)

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> NoiseRatio:
        """Return the averages of a saved state."""
        names = [item.name for item in fields(NoiseRatio)]
        state = as_state(state, of="NoiseRatio", needs=names)
        return NoiseRatio(**{name: read_number(state, name) for name in names})
