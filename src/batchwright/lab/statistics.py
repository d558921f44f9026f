"""Paired comparisons of a few seeds: t intervals, Holm's correction, equivalence. Needs SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from .._checks import as_number, float_of, is_number
from .._optional import require
from .._types import FloatArray
from ..errors import ArgumentError

__all__ = ["PairedDifference", "equivalence", "examples_to_reach", "holm", "paired_difference", "t_cdf", "t_quantile"]

# Differences that vary by less than this share of the values vary only by rounding.
_ROUNDING = 1e-12


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
    """

    num_pairs: int
    mean: float
    low: float | None
    high: float | None
    p_value: float | None

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
    reach = t_quantile((1 + confidence) / 2, freedom) * error
    p_value = 2 * t_cdf(-_ratio(abs(mean), error), freedom)
    return PairedDifference(num_pairs=freedom + 1, mean=mean, low=mean - reach, high=mean + reach, p_value=p_value)


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
