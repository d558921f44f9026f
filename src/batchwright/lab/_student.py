"""Student's t distribution, from the incomplete beta function: what SciPy would give, without it."""

from __future__ import annotations

import math
from functools import lru_cache

from ..errors import ArgumentError

_TINY = 1e-300
_MAX_TERMS = 10_000


def t_cdf(t: float, freedom: float) -> float:
    """Return the probability that a t variable is at most ``t``.

    ``P(T ≤ t) = 1 − I_x(ν/2, 1/2) / 2`` for ``t ≥ 0``, with ``x = ν / (ν + t²)``.

    Args:
        t: any number, infinities included.
        freedom: degrees of freedom ``ν``, above 0.

    >>> round(t_cdf(12.706204736, 1), 9), t_cdf(0.0, 7)
    (0.975, 0.5)
    """
    if not freedom > 0:
        raise ArgumentError(f"degrees of freedom must be above 0, got {freedom!r}")
    if math.isnan(t):
        raise ArgumentError("t must be a number, got nan")
    # Where t² overflows, x is 0 and so is the tail.
    x = freedom / (freedom + t * t) if abs(t) < 1e150 else 0.0
    tail = _incomplete_beta(freedom / 2, 0.5, x) / 2
    return 1 - tail if t >= 0 else tail


@lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: float) -> float:
    """Return the ``t`` that a t variable does not exceed with a probability, by halving an interval.

    >>> round(t_quantile(0.975, 4), 6)
    2.776445
    """
    if not 0 < probability < 1:
        raise ArgumentError(f"a quantile needs a probability above 0 and below 1, got {probability!r}")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function ``I_x(a, b)``."""
    if x <= 0 or x >= 1:
        return float(x > 0)
    # The fraction converges fast on one side of this point; the symmetry I_x(a, b) = 1 − I_(1−x)(b, a) brings it there.
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _continued_fraction(a, b, x))


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Return ``1 + d1/(1 + d2/(1 + …))`` of the incomplete beta function, by Lentz's method."""
    value, c, d = 1.0, 1.0, 0.0
    for term in range(1, _MAX_TERMS):
        m = term // 2
        if term % 2:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _away_from_zero(1 + numerator * d)
        c = _away_from_zero(1 + numerator / c)
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away_from_zero(number: float) -> float:
    return number if abs(number) > _TINY else _TINY
