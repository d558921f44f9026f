"""Numbers of policies: the checks that settings pass once, arithmetic that cannot overflow, and how they are shown."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any, SupportsIndex

from ..errors import ArgumentError

# The most a policy asks for. Above every batch size, and far enough below infinity to be multiplied and kept in JSON.
LARGEST = 1e300
TIMES = "\N{MULTIPLICATION SIGN}"


def as_whole(name: str, value: SupportsIndex, *, least: int) -> int:
    """Return a whole number of at least ``least`` as a plain ``int``; NumPy's integers count.

    >>> as_whole("period", 3, least=1)
    3
    """
    try:
        whole = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = least - 1
    if whole < least:
        raise ArgumentError(f"{name} must be a whole number of {least} or more, got {value!r}")
    return whole


def as_number(name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf) -> float:
    """Return a finite number of at least ``least`` and above ``above`` as a plain ``float``.

    >>> as_number("slope", 8)
    8.0
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < least or number <= above:
        wish = "" if least == -math.inf else f" of {least:g} or more"
        wish = wish if above == -math.inf else f" above {above:g}"
        raise ArgumentError(f"{name} must be a number{wish}, got {value!r}")
    return number


def as_size(value: Any) -> float:
    """Return a policy's answer within ±``LARGEST``, and NaN for what is no number.

    >>> as_size(64), as_size(float("inf")), as_size(None)
    (64.0, 1e+300, nan)
    """
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        number = math.nan
    return number if math.isnan(number) else min(max(number, -LARGEST), LARGEST)


def grow(base: float, factor: float, exponent: float) -> float:
    """Return ``base × factor^exponent`` for positive numbers, at most ``LARGEST``.

    >>> grow(32, 2.0, 3), grow(1, 10.0, 10**6), grow(1, 0.5, 10**6)
    (256.0, 1e+300, 0.0)
    """
    # The exponent is kept where the power stays between e^-700 and e^700, just inside the range of floats.
    slope = abs(math.log(factor))
    most = 700.0 / slope if slope else 1.0
    exponent = max(-most, min(exponent, most))
    value = min(base * factor**exponent, LARGEST)
    return value if value > 1e-300 else 0.0


def show(value: float) -> str:
    """Return a number as short as it can be read.

    >>> show(64.0), show(2.5), show(1234.5678), show(1e300)
    ('64', '2.5', '1234.6', '1e+300')
    """
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
