"""measured: the largest batch that an experiment found not worse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, final

import numpy as np

from ..._checks import as_number, float_of, is_number
from ..._types import FloatArray
from ...errors import ArgumentError
from ..observation import Observation
from ..policy import TIMES, Answer, Policy, ReasoningPolicy, State, hold, show

_LEVEL, _TOLERANCE = 0.05, 0.2
# The error of a mean of fewer differences says little.
_MIN_PAIRS = 4
# Student's distribution hardly changes beyond; its quantile there is a little too careful.
_MOST_FREEDOM = 200


class Verdict(NamedTuple):
    """How a factor compares with a smaller one after the same seconds; harm is how much higher its loss is."""

    rival: str
    loss: float
    harm: float
    reach: float
    limit: float

    @property
    def is_good(self) -> bool:
        """Return whether the harm is surely within the limit; without a fall that limits it, surely no harm."""
        most = self.harm + self.reach
        return most <= self.limit if self.limit > 0 else most < 0

    @property
    def words(self) -> str:
        """Say what was found, the most harm that it leaves possible, and what is allowed."""
        most = self.harm + self.reach
        surely = f"at most {show(most)} higher" if most > 0 else f"at least {show(-most)} lower"
        allowed = f"{show(self.limit)} allowed" if self.limit > 0 else "as the loss did not fall, it must be lower"
        return f"{show(self.loss)} at {self.rival} ({surely}, {allowed})"


@final
@dataclass(frozen=True, repr=False)
class Measured(ReasoningPolicy):
    """Multiplies the size by the largest factor that an experiment found not worse."""

    level: float = _LEVEL
    tolerance: float = _TOLERANCE

    def decide(self, state: State, observation: Observation) -> Answer:
        """Judge an experiment; hold without one."""
        if observation.experiment is None:
            return hold(observation, state, "no experiment was made since the last observation")
        found = _Experiment(observation.experiment)
        if found.num_pairs < _MIN_PAIRS:
            words = f"{found.num_pairs} pairs of losses cannot show what is not worse, {_MIN_PAIRS} are the fewest"
            return hold(observation, state, words)
        taken, said = [1.0], []
        for factor in found.larger:
            is_good, about = found.judge(factor, taken, level=self.level, tolerance=self.tolerance)
            said.append(about)
            # Tested one after the other up to the first that fails, all of them together err as seldom as one.
            if not is_good:
                break
            taken.append(factor)
        best = taken[-1]
        about = "; ".join(said) or "no factor above 1 was tried, nothing to compare"
        words = f"{found.num_pairs} pairs at level {show(self.level)}: {about}"
        if best == 1:
            return hold(observation, state, words)
        size = observation.exact * best
        return Answer(size, state, f"{words}: {show(observation.exact)} {TIMES} {show(best)} = {show(size)}")


def measured(*, level: float = _LEVEL, tolerance: float = _TOLERANCE) -> Policy:
    """Grow to the largest batch that an experiment found not worse by the second; it never shrinks the batch.

    ``step.measure_size`` trains from one state at several multiples of the batch, on the same examples, and measures
    the losses on the same held-out batches. A factor ``c`` ends after fewer seconds. Its losses ``Lc`` are compared
    with those that a smaller factor had reached by then, ``L1``, on a straight line between two evaluations of that
    branch. The loss falls fast at first, so to divide each fall by its own seconds would favour the branch that ends
    sooner. With the losses ``L0`` before::

        not worse:   mean(e) + t · error(e) <= 0,   e = (Lc − L1) − tolerance · (L0 − L1)

    ``t`` is the quantile ``1 − level`` of Student's distribution. So a factor whose true harm is the tolerance or more
    passes in at most ``level`` of all experiments, however few the pairs or noisy the losses: what cannot be told is
    not taken. Where the loss had not fallen by then, a larger factor must be surely better. Factors are tested from the
    smallest to the first that fails, each against the size in force and against all that passed before. A factor whose
    examples took longer than at a smaller one fails too. An experiment without a ``curve`` is compared with the end of
    the smaller branch, which is stricter where the loss falls all the way.

    Pairs by held-out batch leave out that another order of the examples trains another model; repeats of the experiment
    take it in.

    Args:
        level: how often a factor at the limit of the tolerance may pass, above 0 and below 0.5.
        tolerance: the share of the fall of the loss in the same seconds that a larger batch may give up, above 0 and
            below 1. Of sizes that differ less, the larger is taken.

    Returns:
        A policy that holds the size until an ``experiment`` is observed:
        ``controller.observe(**measure_size(stepper, batches).observation())``.

    >>> losses = {1: [2.0, 2.2, 1.9, 2.1], 2: [2.0, 2.21, 1.9, 2.1], 4: [2.4, 2.6, 2.4, 2.4]}
    >>> experiment = {"factors": [1, 2, 4], "losses": losses, "seconds": {1: 8.0, 2: 5.0, 4: 4.0}, "examples": 4096}
    >>> experiment["before"] = [2.5, 2.7, 2.4, 2.6]
    >>> experiment["curve"] = {factor: [[experiment["seconds"][factor], losses[factor]]] for factor in (1, 2, 4)}
    >>> experiment["curve"][1].insert(0, [4.0, [2.1, 2.3, 2.0, 2.2]])
    >>> measured().update(None, Observation(size=64, experiment=experiment))[0]
    128.0
    """
    return Measured(as_number("level", level, above=0, below=0.5), as_number("tolerance", tolerance, above=0, below=1))


@final
class _Experiment:
    """An experiment that was checked.

    Args:
        given: with ``factors``, ``losses`` and ``seconds`` by factor, and the losses ``before``.
    """

    def __init__(self, given: Any) -> None:
        needed = ("factors", "losses", "seconds", "before")
        if not isinstance(given, Mapping) or not set(needed) <= given.keys():
            raise ArgumentError(
                f"experiment must be a dict with {', '.join(needed)}, as measure_size(...).observation() has it, "
                f"got {given!r}"
            )
        factors = [as_number("a factor of the experiment", factor, above=0) for factor in _items("factors", given)]
        if 1.0 not in factors:
            raise ArgumentError(f"the factors of an experiment must have 1, the size in force, got {factors}")
        self.larger = sorted(factor for factor in set(factors) if factor > 1)
        self._losses = {
            factor: _losses(f"the losses of factor {show(factor)}", found)
            for factor, found in _by_factor("losses", given, factors).items()
        }
        self._seconds = {
            factor: as_number(f"the seconds of factor {show(factor)}", found, above=0)
            for factor, found in _by_factor("seconds", given, factors).items()
        }
        self.before = _losses("the losses before", given["before"])
        self.num_pairs = len(self._losses[1.0])
        if len({len(losses) for losses in self._losses.values()}) > 1:
            counts = {show(factor): len(losses) for factor, losses in self._losses.items()}
            raise ArgumentError(
                f"every factor needs as many losses, paired by what they were measured on, got {counts}"
            )
        ends = {factor: [[self._seconds[factor], self._losses[factor].tolist()]] for factor in factors}
        self._curves = {
            factor: _curve(factor, found, end=ends[factor][0])
            for factor, found in _by_factor("curve", {"curve": ends, **given}, factors).items()
        }

    def judge(self, factor: float, rivals: Sequence[float], *, level: float, tolerance: float) -> tuple[bool, str]:
        """Return whether a factor is not worse than smaller ones after the same seconds, and what was found."""
        name, losses, seconds = f"{show(factor)} times the size", self._losses[factor], self._seconds[factor]
        if not np.isfinite(losses).all():
            return False, f"{name} diverged"
        slower = [rival for rival in rivals if seconds > self._seconds[rival]]
        if slower:
            than = f"{show(self._seconds[slower[0]])} s at {show(slower[0])}"
            return False, f"{name} took longer for the same examples, {show(seconds)} s and not {than}"
        bases = [self._at(rival, seconds) for rival in rivals]
        if not all(np.isfinite(known).all() for known in (self.before, *bases)):
            return False, "the loss was not finite before or at a smaller size, nothing to compare"
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is said in words
            found = [
                _compare(losses, base, self.before, rival=self._name(rival, seconds), level=level, tolerance=tolerance)
                for rival, base in zip(rivals, bases, strict=True)
            ]
        if not all(math.isfinite(figure) for verdict in found for figure in verdict[1:]):
            return False, "the losses are too large to compare, their differences are not finite"
        about = ", ".join(verdict.words for verdict in found)
        is_good = all(verdict.is_good for verdict in found)
        return is_good, f"after {show(seconds)} s: {show(losses.mean())} at {name}, {about}"

    def _name(self, factor: float, seconds: float) -> str:
        first = self._curves[factor][0][0]
        return show(factor) if first <= seconds else f"{show(factor)} after {show(first)} s"

    def _at(self, factor: float, seconds: float) -> FloatArray:
        """Return the losses of a branch after some seconds; before its first evaluation, those of that one.

        Where the loss falls, these are lower than by then, so that a branch that is compared with them is not favoured.
        """
        moments, losses = self._curves[factor]
        return np.array([np.interp(seconds, moments, column) for column in losses.T])


def _compare(
    losses: FloatArray, base: FloatArray, before: FloatArray, *, rival: str, level: float, tolerance: float
) -> Verdict:
    # Paired by batch if they can be: batches differ far more than branches do.
    fall = (before if len(before) == len(base) else before.mean()) - base
    # What did not fall sets no limit to what may be given up: the larger size must be better.
    limit = max(0.0, tolerance * float(fall.mean()))
    excess = losses - base - (tolerance * fall if limit > 0 else 0.0)
    error = float(excess.std(ddof=1)) / math.sqrt(len(excess))
    reach = t_quantile(level, len(excess) - 1) * error
    return Verdict(rival, float(base.mean()), float((losses - base).mean()), reach, limit)


@cache
def t_quantile(level: float, freedom: int) -> float:
    """Return what a variable with Student's t distribution exceeds with a probability of ``level``, below a half.

    >>> round(t_quantile(0.05, 1), 4), round(t_quantile(0.05, 10), 4)
    (6.3138, 1.8125)
    """
    low, high = 0.0, 1.0
    while _t_tail(high, freedom) > level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, freedom) > level else (low, middle)
    return high


def _t_tail(t: float, freedom: int) -> float:
    """Return the probability above ``t``, by the finite series for whole degrees of freedom (A&S 26.7.3 and 26.7.4)."""
    freedom = min(freedom, _MOST_FREEDOM)
    angle = math.atan2(t, math.sqrt(freedom))
    square, is_odd = math.cos(angle) ** 2, freedom % 2
    term = total = (math.cos(angle) if freedom > 1 else 0.0) if is_odd else 1.0
    for number in range(2 + is_odd, freedom - 1, 2):
        term *= square * (number - 1) / number
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
    return (1 - inside) / 2


def _items(name: str, given: Mapping[str, Any]) -> Sequence[Any]:
    items = given[name]
    if not isinstance(items, list | tuple) or not items:
        raise ArgumentError(f"the {name} of an experiment must be a list, got {items!r}")
    return items


def _by_factor(name: str, given: Mapping[str, Any], factors: list[float]) -> dict[float, Any]:
    """Return what is given by factor; JSON turns the keys into texts."""
    try:
        found = {float(factor): value for factor, value in given[name].items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        found = {}
    if found.keys() != set(factors):
        raise ArgumentError(f"the {name} of an experiment must be a dict by factor, one for each of {factors}")
    return found


def _losses(name: str, given: Any) -> FloatArray:
    if not isinstance(given, list | tuple) or not given or not all(map(is_number, given)):
        raise ArgumentError(f"{name} must be a list of numbers, got {given!r}")
    values = [float_of(loss) for loss in given]
    if any(math.isinf(value) and value != loss for value, loss in zip(values, given, strict=True)):
        raise ArgumentError(f"{name} must be numbers within the range of a float, got one beyond 1.8e308")
    return np.array(values)


def _curve(factor: float, given: Any, *, end: list[Any]) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of evaluations, and the losses of each."""
    name = f"the curve of factor {show(factor)}"
    if not isinstance(given, list | tuple) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in given):
        raise ArgumentError(f"{name} must be a list of [seconds, losses], got {given!r}")
    moments = [as_number(f"the seconds of {name}", moment, above=0) for moment, _ in given]
    losses = [_losses(f"the losses of {name}", found) for _, found in given]
    if not moments or sorted(set(moments)) != moments or not math.isclose(moments[-1], end[0], rel_tol=1e-9):
        raise ArgumentError(f"{name} must rise in seconds and end with those of the factor, {end[0]}, got {moments}")
    if any(len(found) != len(end[1]) for found in losses) or not np.array_equal(losses[-1], end[1], equal_nan=True):
        raise ArgumentError(f"{name} must have the factor's pairs of losses, and end with its losses, got {given!r}")
    return np.array(moments), np.array(losses)
