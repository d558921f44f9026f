"""Numbers of policies: the checks that settings pass once, arithmetic that cannot overflow, and how they are shown."""

from __future__ import annotations

import math
from typing import Any

from .._checks import as_number as as_number
from .._checks import as_whole as as_whole

# The most a policy asks for. Above every batch size, and far enough below infinity to be multiplied and kept in JSON.
LARGEST = 1e300
TIMES = "\N{MULTIPLICATION SIGN}"


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
