"""Paired comparisons of a few seeds: t intervals, Holm's correction, equivalence. Needs SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast, final

import numpy as np

from .._checks import as_number, float_of, is_number
from .._optional import require
from .._types import FloatArray
from ..errors import ArgumentError

__all__ = [
    "PairedDifference",
    "equivalence",
    "examples_to_reach",
    "holm",
    "paired_difference",
    "pooled_difference",
    "smallest_detectable",
    "t_cdf",
    "t_quantile",
]

# Differences that vary by less than this share of the values vary only by rounding.
_ROUNDING = 1e-12
# A cell with more of the variance than this gives the degrees of freedom alone: Welch's would be too many.
_DOMINANT = 2 / 3
_LEAST_P = 1e-15


@final
@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The mean of ``values − baseline`` over pairs, with an interval that covers the true mean in 95 of 100 cases.

    Attributes:
        num_pairs: the number of pairs ``n``.
        mean: the mean of the differences.
        low: ``mean − t·s/√n``, where ``t`` is the quantile of Student's distribution with ``n − 1`` degrees of freedom;
            None for a single pair.
        high: ``mean + t·s/√n``; None for a single pair.
        p_value: the p-value of the two-sided t test that the true mean is 0; None for a single pair.
        error: the standard error of the mean; None for a single pair.
        freedom: the degrees of freedom of the test; None for a single pair.
    """

    num_pairs: int
    mean: float
    low: float | None
    high: float | None
    p_value: float | None
    error: float | None = None
    freedom: float | None = None

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def paired_difference(
    values: Sequence[float], baseline: Sequence[float], *, confidence: float = 0.95, resolution: float = 0.0
) -> PairedDifference:
    """Compare two lists of results in pairs, e.g. by seed.

    Pairing removes what a seed does to both sides: only the spread of the differences counts. If all differences are
    equal there is no spread, and the test is certain. That is right for counts that do not depend on the seed, and
    wrong for figures in coarse steps, such as an accuracy on few examples; for those give ``resolution``.

    Args:
        values: the results of a strategy.
        baseline: the results of the baseline, for the same seeds in the same order.
        confidence: the confidence of the interval, above 0 and below 1.
        resolution: the step between possible results, e.g. ``1 / num_validation`` for accuracies. The spread is then at
            least that of two figures rounded to this step, ``resolution / √6``.

    >>> found = paired_difference([3.0, 5.0, 7.0], [2.0, 3.0, 4.0])
    >>> found.mean, round(found.low, 3), round(found.high, 3), round(found.p_value, 4)
    (2.0, -0.484, 4.484, 0.0742)
    """
    confidence = as_number("confidence", confidence, above=0, below=1)
    mean, error, freedom = _summary(values, baseline, resolution)
    if error is None:
        return PairedDifference(num_pairs=1, mean=mean, low=None, high=None, p_value=None)
    return _tested(freedom + 1, mean, error, freedom, confidence)


def pooled_difference(
    cells: Sequence[Sequence[float]], *, confidence: float = 0.95, resolution: float = 0.0
) -> PairedDifference | None:
    """Return the mean change over cells, e.g. pairs of data set and model, each with its own changes by seed.

    The mean of the cells' means counts each cell once. Its error comes from the spread within cells only: that cells
    differ is no noise. With ``v_c = s_c²/n_c``: ``error² = Σ v_c / C²``, with Welch's degrees of freedom
    ``(Σ v_c)² / Σ v_c²/(n_c − 1)``, or those of one cell that has more than two thirds of the variance. The p-value is
    the larger of two: of this test, and of the cells' own t tests combined (Stouffer's ``Σ z_c/√C`` or Fisher's
    ``−2 Σ ln p_c``). Without a change in any cell the second holds however much the spreads differ. With one cell this
    is the paired test.

    The answer is about new seeds on exactly these cells, and all changes must be in one unit, e.g. per cent.

    Args:
        cells: the changes of each cell.
        confidence: the confidence of the interval, above 0 and below 1.
        resolution: the step between possible changes, as for ``paired_difference``.

    Returns:
        The mean and its test; None if a cell has fewer than two changes, since its spread is then unknown.

    >>> found = pooled_difference([[1.0, 3.0], [5.0, 7.0]])
    >>> found.mean, found.num_pairs, round(found.error, 4), found.freedom
    (4.0, 4, 0.7071, 2.0)
    """
    confidence = as_number("confidence", confidence, above=0, below=1)
    if not len(cells):
        raise ArgumentError("cells must hold the changes of at least one cell, got none")
    parts = [_summary(changes, [0.0] * len(changes), resolution) for changes in cells]
    spreads = [_Spread(mean, error, freedom) for mean, error, freedom in parts if error is not None]
    if len(spreads) < len(parts):
        return None
    mean = math.fsum(part.mean for part in spreads) / len(spreads)
    error = math.hypot(*(part.error for part in spreads)) / len(spreads)
    num_pairs = sum(part.freedom + 1 for part in spreads)
    found = _tested(num_pairs, mean, error, _welch(spreads), confidence)
    if len(spreads) == 1:
        return found
    return replace(found, p_value=max(cast(float, found.p_value), _combined(spreads)))


class _Spread(NamedTuple):
    """The mean of a cell, its standard error and its degrees of freedom."""

    mean: float
    error: float
    freedom: int


def _welch(parts: Sequence[_Spread]) -> float:
    variances = np.square([part.error for part in parts])
    total = float(variances.sum())
    if total == 0:  # without any spread the test is certain, whatever the degrees of freedom
        return float(sum(part.freedom for part in parts))
    widest = int(variances.argmax())
    if variances[widest] > _DOMINANT * total:
        return float(parts[widest].freedom)
    return total**2 / sum(float(one) ** 2 / part.freedom for one, part in zip(variances, parts, strict=True))


def _combined(parts: Sequence[_Spread]) -> float:
    """Return a p-value that no cell has a change, from the cells' own tests: exact however much their spreads differ.

    Stouffer's test is the stronger one if all cells change alike, Fisher's if they do not; the smaller p-value counts,
    twice.
    """
    below = np.array([t_cdf(_ratio(part.mean, part.error), part.freedom) for part in parts])
    # A cell without spread is certain by itself; its logarithm would be infinite, and it must not decide for all.
    below = np.clip(below, _LEAST_P, 1 - _LEAST_P)
    z = float(_special().ndtri(below).sum()) / math.sqrt(len(parts))
    logs = np.log(2 * np.minimum(below, 1 - below))
    stouffer = 2 * float(_special().ndtr(-abs(z)))
    fisher = float(_special().chdtrc(2 * len(parts), -2 * float(logs.sum())))
    return min(1.0, 2 * min(stouffer, fisher))


def smallest_detectable(error: float, freedom: float, *, level: float = 0.05, power: float = 0.8) -> float:
    """Return the smallest true mean that a two-sided t test finds with a given probability.

    ``(t(1 − level/2) + t(power))·error``, with the quantiles of Student's distribution.

    Args:
        error: the standard error of the mean, at least 0.
        freedom: the degrees of freedom, above 0.
        level: the error rate of the test, above 0 and below 1; divide it by the number of tests that are corrected.
        power: the probability of finding it, at least 0.5 and below 1.

    >>> round(smallest_detectable(1.0, 1e6), 2)
    2.8
    """
    error = as_number("error", error, least=0)
    level = as_number("level", level, above=0, below=1)
    power = as_number("power", power, least=0.5, below=1)
    return (t_quantile(1 - level / 2, freedom) + t_quantile(power, freedom)) * error


def _tested(num_pairs: int, mean: float, error: float, freedom: float, confidence: float) -> PairedDifference:
    reach = t_quantile((1 + confidence) / 2, freedom) * error
    p_value = 2 * t_cdf(-_ratio(abs(mean), error), freedom)
    return PairedDifference(
        num_pairs=num_pairs,
        mean=mean,
        low=mean - reach,
        high=mean + reach,
        p_value=p_value,
        error=error,
        freedom=float(freedom),
    )


def equivalence(
    values: Sequence[float], baseline: Sequence[float], *, margin: float, resolution: float = 0.0
) -> float | None:
    """Return the p-value of two one-sided t tests that the mean difference lies within ``±margin``.

    A small p-value says that the two are the same for practical purposes. A large p-value of ``paired_difference`` does
    not say so: it may only mean that there were few seeds. None for a single pair.

    Args:
        values: the results of a strategy.
        baseline: the results of the baseline, for the same seeds in the same order.
        margin: the largest difference that does not matter, above 0.
        resolution: the step between possible results, as for ``paired_difference``.

    >>> round(equivalence([1.0, 3.0, 2.0], [1.0, 2.0, 3.0], margin=3.0), 4)
    0.0175
    """
    margin = as_number("margin", margin, above=0)
    mean, error, freedom = _summary(values, baseline, resolution)
    if error is None:
        return None
    # The worse of the two tests counts: mean > −margin and mean < margin.
    return t_cdf(-_ratio(margin - abs(mean), error), freedom)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests (Holm 1979); reject those at or below the wanted error rate.

    With ``p_(1) ≤ … ≤ p_(m)``: ``p'_(j) = max over i ≤ j of min(1, (m − i + 1)·p_(i))``.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    if not all(is_number(value) and 0 <= value <= 1 for value in p_values):
        raise ArgumentError(f"p-values must be from 0 to 1, got {list(p_values)}")
    order, factors = np.argsort(p_values), np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, factors * np.take(p_values, order)))
    return [float(value) for value in corrected]


def examples_to_reach(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return after how many examples a curve first reaches a target, along straight lines between its points.

    Args:
        curve: ``(examples, metric)`` in the order of examples; a higher metric is better.
        target: the metric to reach.

    Returns:
        The examples, or None if the curve never reaches the target.

    >>> examples_to_reach([(0, 0.1), (100, 0.5), (200, 0.9)], 0.7)
    150.0
    """
    target = as_number("target", target)
    before: tuple[float, float] | None = None
    for point in curve:
        if not all(map(is_number, point)):
            raise ArgumentError(f"the points of curve must be two numbers, got {point!r}")
        examples, metric = map(float, point)
        if metric >= target:
            if before is None:
                return examples
            share = (target - before[1]) / (metric - before[1])
            return before[0] + share * (examples - before[0])
        before = (examples, metric)
    return None


def _summary(values: Sequence[float], baseline: Sequence[float], resolution: float) -> tuple[float, float | None, int]:
    """Return the mean of the differences, its standard error (None for one pair) and the degrees of freedom."""
    resolution = as_number("resolution", resolution, least=0)
    if len(values) != len(baseline) or not len(values):
        raise ArgumentError(
            f"values and baseline must have the same length, at least 1; got {len(values)} and {len(baseline)}"
        )
    one, other = _figures(values), _figures(baseline)
    differences = one - other
    if not np.isfinite(differences).all():
        raise ArgumentError("pairs must be finite numbers; leave out failed runs, on both sides")
    freedom = len(differences) - 1
    if not freedom:
        return float(differences[0]), None, freedom
    spread = float(differences.std(ddof=1))
    if spread <= _ROUNDING * float(np.abs([one, other]).max()):
        spread, differences = 0.0, differences[:1]
    spread = max(spread, resolution / math.sqrt(6))
    return float(differences.mean()), spread / math.sqrt(freedom + 1), freedom


def _figures(values: Sequence[float]) -> FloatArray:
    """Return results as an array, with NaN for what is not a number."""
    return np.array([float_of(value) if is_number(value) else math.nan for value in values])


def _ratio(top: float, bottom: float) -> float:
    # If all differences are equal the error is 0, and the test is certain.
    if bottom > 0:
        return top / bottom
    return 0.0 if top == 0 else math.copysign(math.inf, top)


def t_cdf(t: float, freedom: float) -> float:
    """Return the probability that a variable with Student's t distribution is at most ``t``.

    Args:
        t: any number, or infinity.
        freedom: degrees of freedom, above 0.

    >>> round(t_cdf(12.706204736, 1), 9), t_cdf(0.0, 7)
    (0.975, 0.5)
    """
    freedom = as_number("freedom", freedom, above=0, infinite=True)
    return float(_special().stdtr(freedom, as_number("t", t, infinite=True)))


def t_quantile(probability: float, freedom: float) -> float:
    """Return the ``t`` that a variable with Student's t distribution does not exceed with a given probability.

    >>> round(t_quantile(0.975, 4), 6)
    2.776445
    """
    probability = as_number("probability", probability, above=0, below=1)
    return float(_special().stdtrit(as_number("freedom", freedom, above=0, infinite=True), probability))


def _special() -> Any:
    require("scipy", extra="lab")
    from scipy import special  # scipy.stats takes ten times as long to load

    return special
