"""What each strategy changed against the baseline, in pairs of runs, and how such a change is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np

from .._records import CellKey, RunRecord, cell_of, finished, number
from ..strategies.strategy import BASELINE
from ._dropouts import dropouts, partner_of

# (cell, strategy) -> seed -> change against the baseline.
Effects: TypeAlias = Mapping[tuple[CellKey, str], Mapping[int, float]]
# A quotient with a loss of 0 has no meaning: losses below this, which 32 bits hardly resolve, count as this.
LEAST_LOSS = 1e-8
# A quotient from here on is written as a factor.
_FACTOR = math.log(3)
_TIMES, _MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"


@final
@dataclass(frozen=True, kw_only=True)
class Measure:
    """A figure of a run, and how two runs are compared by it.

    Args:
        name: the key of the measure.
        title: what it is, in words.
        of: returns the figure of a run, None if it has none.
        both: returns the figures of a run and of its partner, for a measure that only two runs together have, such as
            the loss after as many updates as both made; None if ``of`` is enough.
        change: ``"ratio"`` compares by the logarithm of the quotient, which has no unit and so can be averaged over
            data sets; ``"difference"`` subtracts.
        lower_is_better: whether a lower figure is better.
        floor: the least figure of a quotient; lower ones, down to 0, count as this. None compares only figures above 0.
        misreading: for figures read between two validations, by how much the change may be wrong the same way for
            every seed: two estimates with their signs. None for figures that are not read.
    """

    name: str
    title: str
    of: Callable[[RunRecord], float | None]
    both: Callable[[RunRecord, RunRecord], tuple[float, float] | None] | None = None
    change: Literal["ratio", "difference"] = "ratio"
    lower_is_better: bool = True
    floor: float | None = None
    misreading: Callable[[RunRecord, RunRecord], tuple[float, float]] | None = None

    def compare(self, run: RunRecord, base: RunRecord) -> float | None:
        """Return the change from the run of the baseline to another run, None if it has no meaning."""
        if self.both is None:
            return self.between(self.of(run), self.of(base))
        figures = self.both(run, base)
        return None if figures is None else self.between(*figures)

    def between(self, there: float | None, here: float | None) -> float | None:
        """Return the change from the baseline's figure ``here`` to ``there``, None if it has no meaning."""
        if there is None or here is None:
            return None
        if self.change == "difference":
            return there - here
        if self.floor is not None and min(there, here) >= 0:
            there, here = max(there, self.floor), max(here, self.floor)
        return math.log(there / here) if there > 0 and here > 0 else None

    def gain(self, change: float) -> float:
        """Return a change with the sign that is positive for a good change."""
        return -change if self.lower_is_better else change

    def text(self, change: float, metric_name: str | None = None) -> str:
        """Write a change in the unit of the measure: per cent, points of accuracy, or plain.

        >>> LOSS.text(-0.1), METRIC.text(0.012, "accuracy"), METRIC.text(0.012, "r2")
        ('−9.5 %', '+1.2 pt', '+0.012')
        """
        if self.change == "ratio":
            return percent_change(change)
        return f"{hundredths(change)} pt" if metric_name == "accuracy" else signed(change)

    def interval(self, low: float, high: float, metric_name: str | None = None) -> str:
        """Write a 95 % interval, with both ends in one unit.

        >>> LOSS.interval(-0.2, 0.1), LOSS.interval(math.log(0.9), math.log(4))
        ('−18 to +11 %', '×0.9 to ×4')
        """
        return self.texts(low, low, high, metric_name)[1]

    def texts(self, mean: float, low: float, high: float, metric_name: str | None = None) -> tuple[str, str]:
        """Write a mean change and its 95 % interval, all in one unit: factors if one of them is three or more.

        >>> LOSS.texts(math.log(2.12), math.log(1.07), math.log(4.2))
        ('×2.1', '×1.1 to ×4.2')
        """
        if self.change == "ratio" and max(mean, low, high) >= _FACTOR:
            texts = [factor(value) for value in (mean, low, high)]
        else:
            texts = [self.text(value, metric_name) for value in (mean, low, high)]
        unit = texts[2].partition(" ")[2]
        first = texts[1].removesuffix(f" {unit}") if unit else texts[1]
        return texts[0], f"{first} to {texts[2]}"


def mean_loss(record: RunRecord) -> float | None:
    """Return the mean validation loss on the way: its integral over the examples seen, divided by their number.

    It is low for a run whose loss falls early, wherever it ends.

    >>> points = [{"examples": 0, "validation_loss": 2.0}, {"examples": 100, "validation_loss": 1.0}]
    >>> mean_loss({"curve": points})
    1.5
    """
    points = [
        (examples, loss)
        for point in record.get("curve") or ()
        if (examples := number(point.get("examples"))) is not None
        and (loss := number(point.get("validation_loss"))) is not None
    ]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    places, losses = np.array(points).T
    return float(((losses[1:] + losses[:-1]) / 2 * np.diff(places)).sum() / (places[-1] - places[0]))


def end_of(record: RunRecord, axis: str) -> float | None:
    """Return where a run ended on an axis of its curve, e.g. ``"updates"``; None if its last point does not say.

    >>> end_of({"curve": [{"updates": 0}, {"updates": 12}]}, "updates")
    12.0
    """
    curve = record.get("curve") or ()
    return number(curve[-1].get(axis)) if curve else None


def _final(name: str) -> Callable[[RunRecord], float | None]:
    return lambda record: number((record.get("final") or {}).get(name))


LOSS = Measure(name="loss", title="final validation loss", of=_final("validation_loss"), floor=LEAST_LOSS)
METRIC = Measure(
    name="metric",
    title="final quality (accuracy, R², or minus the loss)",
    of=_final("metric"),
    change="difference",
    lower_is_better=False,
)
CONVERGENCE = Measure(name="convergence", title="mean validation loss on the way", of=mean_loss, floor=LEAST_LOSS)
UPDATES = Measure(name="updates", title="updates", of=_final("updates"))
SECONDS = Measure(name="seconds", title="seconds of training", of=_final("seconds"))
SIMULATED = Measure(name="simulated", title="simulated seconds", of=lambda record: end_of(record, "simulated_seconds"))


def effects(records: Iterable[RunRecord], measure: Measure) -> dict[tuple[CellKey, str], dict[int, float]]:
    """Return the change of every strategy against the baseline, per data set, model and seed that both have.

    Runs over different numbers of examples are not compared, and neither is a strategy in a cell in which one of its
    runs failed or diverged while the baseline ended well: the seeds that are left would flatter it.

    >>> def run(strategy, loss):
    ...     place = {"dataset": "wine", "model": "mlp", "strategy": strategy, "seed": 0, "status": "ok"}
    ...     return place | {"final": {"validation_loss": loss}}
    >>> effects([run("constant", 0.5), run("linear", 0.25)], LOSS)
    {(CellKey(dataset='wine', model='mlp'), 'linear'): {0: -0.6931471805599453}}
    """
    every = list(records)
    bad = dropouts(every)
    return {place: changes for place, changes in changes_of(every, measure).items() if place not in bad}


def changes_of(records: Iterable[RunRecord], measure: Measure) -> dict[tuple[CellKey, str], dict[int, float]]:
    """Return the change of every run that ended well against its run of the baseline, whatever the others did."""
    runs = list(finished(records))
    baselines = {partner_of(run): run for run in runs if run["strategy"] == BASELINE}
    found: dict[tuple[CellKey, str], dict[int, float]] = {}
    for run in runs:
        base = baselines.get(partner_of(run))
        if run["strategy"] != BASELINE and base is not None:
            change = measure.compare(run, base)
            if change is not None:
                found.setdefault((cell_of(run), run["strategy"]), {})[run["seed"]] = change
    return found


def misreadings(records: Iterable[RunRecord], measure: Measure) -> dict[tuple[CellKey, str], float]:
    """Return by how much the mean change of each strategy and cell may be wrong, since losses were read off curves.

    The error of reading between two validations is much the same for every seed, so that the spread between seeds does
    not show it. Only what the seeds have in common counts here: the mean of their estimates.
    """
    if measure.misreading is None:
        return {}
    runs = list(finished(records))
    baselines = {partner_of(run): run for run in runs if run["strategy"] == BASELINE}
    found: dict[tuple[CellKey, str], list[tuple[float, float]]] = {}
    for run in runs:
        base = baselines.get(partner_of(run))
        if run["strategy"] != BASELINE and base is not None and measure.compare(run, base) is not None:
            found.setdefault((cell_of(run), run["strategy"]), []).append(measure.misreading(run, base))
    return {place: float(np.abs(np.mean(pairs, axis=0)).max()) for place, pairs in found.items()}


def of_strategies(found: Effects, cells: Sequence[CellKey]) -> dict[str, list[Mapping[int, float]]]:
    """Return the changes of each strategy in each of some cells, in their order; empty where it has no pair."""
    names = dict.fromkeys(strategy for cell, strategy in found if cell in cells)
    return {name: [found.get((cell, name), {}) for cell in cells] for name in names}


def seed_means(found: Effects, cells: Sequence[CellKey]) -> dict[str, dict[int, float]]:
    """Return the change of each strategy averaged over cells, for each seed that has all of them."""
    return {name: _mean_of(parts) for name, parts in of_strategies(found, cells).items()}


def _mean_of(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    seeds = set(parts[0]).intersection(*parts[1:])
    return {seed: math.fsum(part[seed] for part in parts) / len(parts) for seed in sorted(seeds)}


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """Return ``one - other`` for each seed that both have.

    >>> paired({0: 1.0, 1: 3.0, 2: 5.0}, {1: 1.0, 2: 1.0})
    {1: 2.0, 2: 4.0}
    """
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def percent_change(log_ratio: float) -> str:
    """Write the logarithm of a quotient as a change in per cent, or as a factor if it is three or more.

    >>> percent_change(math.log(0.88)), percent_change(math.log(1.004)), percent_change(math.log(12)), percent_change(0)
    ('−12 %', '+0.4 %', '×12', '±0 %')
    """
    return factor(log_ratio) if log_ratio >= _FACTOR else f"{hundredths(math.expm1(log_ratio))} %"


def factor(log_ratio: float) -> str:
    """Write the logarithm of a quotient as a factor.

    >>> factor(math.log(0.2)), factor(math.log(4))
    ('×0.2', '×4')
    """
    return _TIMES + (digits(math.exp(log_ratio)) if log_ratio < 30 else "10¹³ and more")


def hundredths(share: float) -> str:
    """Write a share as signed per cent or points without the unit: whole numbers from ten on, else one decimal.

    >>> hundredths(-0.0012), hundredths(0.5), hundredths(-0.0001)
    ('−0.1', '+50', '±0')
    """
    value = 100 * abs(share)
    return _sign(share, f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}".removesuffix(".0"))


def signed(value: float) -> str:
    """Write a number with about two digits and its sign; the minus is the typographic one.

    >>> signed(-0.5), signed(3.14159), signed(120.4), signed(-0.0)
    ('−0.5', '+3.1', '+120', '±0')
    """
    return _sign(value, digits(abs(value)))


def _sign(value: float, text: str) -> str:
    return "±0" if not text.strip("0.") else (_MINUS if value < 0 else "+") + text


def p_text(p: float) -> str:
    """Write a p-value.

    >>> p_text(0.2345), p_text(0.012), p_text(0.0001), p_text(1.0)
    ('p = 0.23', 'p = 0.012', 'p < 0.001', 'p = 1')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def listed(names: Sequence[object], *, most: int = 6) -> str:
    """Write a list with ``and``; names beyond ``most`` are only counted.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(list("abcdefgh"), most=3)
    ('a', 'a, b and c', 'a, b, c and 5 more')
    """
    shown = [str(name) for name in names[:most]]
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
    """Write a positive number with two significant digits and at most four decimals, and from ten on with none.

    >>> digits(0.0123), digits(2.0), digits(1234.5)
    ('0.012', '2', '1,234')
    """
    if value >= 9.95:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value >= 0.001 else f"{value:.4f}".rstrip("0").rstrip(".")
