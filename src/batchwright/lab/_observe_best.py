"""Which strategy is best on a part of a lab, which ones cannot be told apart from it, and which beat the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from ._observe_effects import Effects, Measure, seed_means
from ._observe_slices import Slice
from ._report_records import Cell
from .statistics import PairedDifference, holm, paired_difference

# A corrected p below this counts as shown.
LEVEL = 0.05


@final
@dataclass(frozen=True, kw_only=True)
class Compared:
    """A strategy against the baseline, or against another strategy: the mean change and its test.

    Args:
        strategy: what is compared.
        num_pairs: seeds that both have.
        mean: the mean change, a logarithm of a quotient or a difference; see ``Measure``.
        low: the lower end of the 95 % interval.
        high: the upper end.
        p_corrected: after the correction over ``num_tests`` tests.
        num_tests: how many tests were corrected together.
        correction: by whom.
    """

    strategy: str
    num_pairs: int
    mean: float
    low: float
    high: float
    p_corrected: float
    num_tests: int
    correction: str = "Holm"

    @property
    def is_shown(self) -> bool:
        """Say whether the change is more than chance, at 5 % for all tests of the family together."""
        return self.p_corrected < LEVEL


@final
@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The strategies on a slice, by one measure.

    Args:
        slice: the cells.
        measure: what they are ranked by.
        compared: against the baseline, the best mean first.
        ties: strategies that no test tells apart from the first. They and the first hold the truly best one in 95
            of 100 cases: it falls out only if one of the others seems better in a test, and each is corrected by
            Bonferroni for all of these.
        closest: the first against the strategy, not in ``ties``, that is nearest to it; None without one.
        left_out: strategies that did not run on all cells and so have no place.
        against: cells on which the mean of the first is worse than the baseline.
    """

    slice: Slice
    measure: Measure
    compared: tuple[Compared, ...]
    ties: tuple[str, ...]
    closest: Compared | None
    left_out: tuple[str, ...]
    against: tuple[Cell, ...]

    @property
    def first(self) -> Compared:
        """Return the strategy with the best mean."""
        return self.compared[0]

    def better(self) -> list[Compared]:
        """Return the strategies shown to be better than the baseline."""
        return [one for one in self.compared if one.is_shown and self.measure.gain(one.mean) > 0]

    def worse(self) -> list[Compared]:
        """Return the strategies shown to be worse than the baseline."""
        return [one for one in self.compared if one.is_shown and self.measure.gain(one.mean) < 0]


def compare_all(values: Mapping[str, Sequence[float]]) -> list[Compared]:
    """Test each strategy's changes against zero, and correct all of them together.

    >>> for one in compare_all({"linear": [-0.3, -0.31, -0.29], "cyclical": [0.1, -0.2, 0.05]}):
    ...     print(one.strategy, round(one.mean, 3), one.num_tests, one.is_shown)
    linear -0.3 2 True
    cyclical -0.017 2 False
    """
    tests = {name: _against_zero(tuple(changes)) for name, changes in values.items() if len(changes) > 1}
    corrected = holm([_p_of(test) for test in tests.values()])
    return [
        _compared(name, test, p, num_tests=len(tests)) for (name, test), p in zip(tests.items(), corrected, strict=True)
    ]


def _compared(name: str, test: PairedDifference, p: float, *, num_tests: int, correction: str = "Holm") -> Compared:
    return Compared(
        strategy=name,
        num_pairs=test.num_pairs,
        mean=test.mean,
        low=-math.inf if test.low is None else test.low,
        high=math.inf if test.high is None else test.high,
        p_corrected=p,
        num_tests=num_tests,
        correction=correction,
    )


def _p_of(test: PairedDifference) -> float:
    """Return the p value; a single pair shows nothing."""
    return 1.0 if test.p_value is None else test.p_value


@lru_cache(maxsize=4096)  # the matrix, the charts and the sentences ask for the same tests
def _against_zero(changes: tuple[float, ...]) -> PairedDifference:
    # The same updates in other pieces differ in the last bits; a change of 1e-8 with no spread would count as shown.
    return paired_difference([round(change, 6) for change in changes], [0.0] * len(changes))


def rank(found: Effects, part: Slice, measure: Measure) -> Ranking | None:
    """Rank the strategies that ran on all cells of a slice, None where no two seeds can be compared."""
    names = list(dict.fromkeys(strategy for cell, strategy in found if cell in part.cells))
    means = {name: seed_means(found, part.cells, name) for name in names}
    means = {name: changes for name, changes in means.items() if len(changes) > 1}
    if not means:
        return None
    compared = compare_all({name: list(changes.values()) for name, changes in means.items()})
    compared.sort(key=lambda one: (-measure.gain(one.mean), one.strategy))
    ties, closest = _against_first(means, [one.strategy for one in compared])
    return Ranking(
        slice=part,
        measure=measure,
        compared=tuple(compared),
        ties=tuple(ties),
        closest=closest,
        left_out=tuple(name for name in names if name not in means),
        against=tuple(cell for cell in part.cells if _gain(found[cell, compared[0].strategy], measure) < 0),
    )


def _gain(changes: Mapping[int, float], measure: Measure) -> float:
    return measure.gain(sum(changes.values()))


def _against_first(means: Mapping[str, Mapping[int, float]], order: Sequence[str]) -> tuple[list[str], Compared | None]:
    """Return the strategies that the first cannot be told apart from, and its test against the next one."""
    tests = {name: _against_zero(_differences(means, order[0], name)) for name in order[1:]}
    corrected = {name: min(1.0, len(tests) * _p_of(test)) for name, test in tests.items()}
    ties = [name for name, p in corrected.items() if p >= LEVEL]
    apart = next((name for name in corrected if name not in ties), None)
    if apart is None:
        return ties, None
    closest = _compared(apart, tests[apart], corrected[apart], num_tests=len(tests), correction="Bonferroni")
    return ties, closest


def _differences(means: Mapping[str, Mapping[int, float]], one: str, other: str) -> tuple[float, ...]:
    seeds = sorted(means[one].keys() & means[other].keys())
    return tuple(means[one][seed] - means[other][seed] for seed in seeds)
