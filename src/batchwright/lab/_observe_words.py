"""Changes, intervals and lists as they are read in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._observe_effects import Measure

_TIMES, _MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"


def percent_change(log_ratio: float) -> str:
    """Write the logarithm of a quotient as a change in per cent, or as a factor from three times on.

    >>> percent_change(math.log(0.88)), percent_change(math.log(1.004)), percent_change(math.log(12)), percent_change(0)
    ('−12 %', '+0.4 %', '×12', '±0 %')
    """
    if log_ratio >= math.log(3):
        return _TIMES + (digits(math.exp(log_ratio)) if log_ratio < 30 else "10¹³ and more")
    return f"{hundredths(math.expm1(log_ratio))} %"


def hundredths(share: float) -> str:
    """Write a share as signed per cent or points, without the unit: whole from ten on, else with one decimal.

    >>> hundredths(-0.0012), hundredths(0.5), hundredths(-0.0001)
    ('−0.1', '+50', '±0')
    """
    value = 100 * abs(share)
    return _sign(share, f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0"))


def signed(value: float) -> str:
    """Write a number with two digits or so and its sign; the minus is the typographic one.

    >>> signed(-0.5), signed(3.14159), signed(120.4), signed(-0.0)
    ('−0.5', '+3.1', '+120', '±0')
    """
    return _sign(value, digits(abs(value)))


def _sign(value: float, text: str) -> str:
    return "±0" if not text.strip("0.") else (_MINUS if value < 0 else "+") + text


def change_text(measure: Measure, change: float, metric_name: str | None = None) -> str:
    """Write a change in the unit of its measure: per cent, points of accuracy, or plain.

    >>> from ._observe_effects import LOSS, METRIC
    >>> change_text(LOSS, -0.1), change_text(METRIC, 0.012, "accuracy"), change_text(METRIC, 0.012, "r2")
    ('−9.5 %', '+1.2 pt', '+0.012')
    """
    if measure.change == "ratio":
        return percent_change(change)
    return f"{hundredths(change)} pt" if metric_name == "accuracy" else signed(change)


def interval_text(measure: Measure, low: float, high: float, metric_name: str | None = None) -> str:
    """Write a 95 % interval.

    >>> from ._observe_effects import LOSS
    >>> interval_text(LOSS, -0.2, 0.1)
    '−18 to +11 %'
    """
    texts = [change_text(measure, end, metric_name) for end in (low, high)]
    unit = texts[1].partition(" ")[2]
    # The unit once, unless one end is a factor.
    return f"{texts[0].removesuffix(f' {unit}') if unit else texts[0]} to {texts[1]}"


def p_text(p: float) -> str:
    """Write a p value.

    >>> p_text(0.2345), p_text(0.012), p_text(0.0001), p_text(1.0)
    ('p = 0.23', 'p = 0.012', 'p < 0.001', 'p = 1')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def listed(names: Sequence[str], *, most: int = 6) -> str:
    """Write a list with ``and``; the names past ``most`` are counted.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(list("abcdefgh"), most=3)
    ('a', 'a, b and c', 'a, b, c and 5 more')
    """
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def counted(number: int, what: str) -> str:
    """Write a number and what it counts.

    >>> counted(1, "seed"), counted(3, "strategy"), counted(2, "loss")
    ('1 seed', '3 strategies', '2 losses')
    """
    if number == 1:
        return f"1 {what}"
    if what.endswith("y"):
        return f"{number:,} {what[:-1]}ies"
    return f"{number:,} {what}{'es' if what.endswith('s') else 's'}"


def digits(value: float) -> str:
    """Write a positive number with two significant digits, whole ones in full.

    >>> digits(0.0123), digits(2.0), digits(1234.5)
    ('0.012', '2', '1,234')
    """
    if value >= 9.95:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    decimals = max(0, 1 - math.floor(math.log10(value)))
    text = f"{value:.{min(decimals, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
