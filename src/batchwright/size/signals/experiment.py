"""measured: the largest batch that an experiment found not worse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, final

import numpy as np

from ..._checks import as_number, is_number
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
    """What an experiment says about one factor, in shares of the fall of the loss."""

    factor: float
    harm: float
    reach: float
    speed: float

    def words(self, tolerance: float) -> str:
        """Say what was found, and the smallest harm that could have been seen."""
        if not math.isfinite(self.harm):
            return f"{show(self.factor)} diverged"
        found = f"{show(self.factor)} gives up {_percent(self.harm)} of the fall of the loss"
        limit = f"at most {_percent(self.harm + self.reach)}, allowed {_percent(tolerance)}"
        return f"{found} ({limit}) at {self.speed:.2f} times the speed"

    def is_good(self, tolerance: float) -> bool:
        """Return whether the harm is surely within the tolerance, and the examples took no longer."""
        return self.harm + self.reach <= tolerance and self.speed >= 1


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
        if len(found.base) < _MIN_PAIRS:
            words = f"{len(found.base)} pairs of losses cannot show what is not worse, {_MIN_PAIRS} are the fewest"
            return hold(observation, state, words)
        if not found.fall > 0:
            words = f"the loss did not fall in the experiment ({show(found.before.mean())} before), nothing to compare"
            return hold(observation, state, words)
        best, said = 1.0, []
        for factor in found.larger:
            verdict = found.judge(factor, level=self.level, tolerance=self.tolerance)
            said.append(verdict.words(self.tolerance))
            # Tested one after the other up to the first that fails, all of them together err as seldom as one.
            if not verdict.is_good(self.tolerance):
                break
            best = factor
        words = f"{len(found.base)} pairs at level {show(self.level)}: {'; '.join(said)}"
        if best == 1:
            return hold(observation, state, words)
        size = observation.exact * best
        return Answer(size, state, f"{words}: {show(observation.exact)} {TIMES} {show(best)} = {show(size)}")


def measured(*, level: float = _LEVEL, tolerance: float = _TOLERANCE) -> Policy:
    """Grow to the largest batch that an experiment found not worse; it never shrinks the batch.

    ``step.measure_size`` trains from one state at several multiples of the batch, on the same examples, and measures
    the losses on the same held-out batches. A factor ``c`` that makes fewer updates gives up a share ``h`` of the fall
    of the loss. With the losses ``L0`` before, ``L1`` at the size in force and ``Lc`` at ``c`` times that::

        h = mean(Lc − L1) / mean(L0 − L1)
        not worse:   mean(e) + t · error(e) <= 0,   e = (Lc − L1) − tolerance · (L0 − L1)

    ``t`` is the quantile ``1 − level`` of Student's distribution. So a factor whose true harm is the tolerance or more
    passes in at most ``level`` of all experiments, however few the pairs or noisy the losses: what cannot be told is
    not taken. Factors are tested from the smallest to the first that fails. A factor whose examples took longer than at
    the size in force fails too.

    Pairs by held-out batch leave out that another order of the examples trains another model; repeats of the experiment
    take it in.

    Args:
        level: how often a factor at the limit of the tolerance may pass, above 0 and below 0.5.
        tolerance: the share of the fall of the loss that a larger batch may give up, above 0 and below 1.

    Returns:
        A policy that holds the size until an ``experiment`` is observed:
        ``controller.observe(**measure_size(stepper, batches).observation())``.

    >>> losses = {1: [2.0, 2.2, 1.9, 2.1], 2: [2.0, 2.21, 1.9, 2.1], 4: [2.3, 2.5, 2.3, 2.3]}
    >>> experiment = {"factors": [1, 2, 4], "losses": losses, "seconds": {1: 8.0, 2: 5.0, 4: 3.0}, "examples": 4096}
    >>> experiment["before"] = [2.5, 2.7, 2.4, 2.6]
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
        self.base, self.before = self._losses[1.0], _losses("the losses before", given["before"])
        if len({len(losses) for losses in self._losses.values()}) > 1:
            counts = {show(factor): len(losses) for factor, losses in self._losses.items()}
            raise ArgumentError(
                f"every factor needs as many losses, paired by what they were measured on, got {counts}"
            )

    @property
    def fall(self) -> float:
        """Return by how much the loss fell at the size in force; NaN or below 0 if it did not."""
        return float(self.before.mean() - self.base.mean())

    def judge(self, factor: float, *, level: float, tolerance: float) -> Verdict:
        """Return what a factor gives up, and how far that may be off."""
        speed = self._seconds[1.0] / self._seconds[factor]
        worse = self._losses[factor] - self.base
        if not np.isfinite(worse).all():
            return Verdict(factor, math.inf, 0.0, speed)
        # Paired by batch if they can be: batches differ far more than branches do.
        before = self.before if len(self.before) == len(self.base) else self.before.mean()
        excess = worse - tolerance * (before - self.base)
        error = float(excess.std(ddof=1)) / math.sqrt(len(excess))
        reach = t_quantile(level, len(excess) - 1) * error
        return Verdict(factor, float(worse.mean()) / self.fall, reach / self.fall, speed)


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
    except (AttributeError, TypeError, ValueError):
        found = {}
    if found.keys() != set(factors):
        raise ArgumentError(f"the {name} of an experiment must be a dict by factor, one for each of {factors}")
    return found


def _losses(name: str, given: Any) -> FloatArray:
    if not isinstance(given, list | tuple) or not given or not all(map(is_number, given)):
        raise ArgumentError(f"{name} must be a list of numbers, got {given!r}")
    return np.array(given, dtype=np.float64)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
