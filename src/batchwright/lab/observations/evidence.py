"""Evidence: tests of strategies against the baseline, how strategies rank by them, and the findings they support."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, TypeAlias, final

from .._records import CellKey
from ..statistics import PairedDifference, holm, paired_difference
from ._effects import Effects, Measure, counted, p_text, seed_means
from ._slices import Slice

# A corrected p-value below this counts as shown.
LEVEL = 0.05


@final
@dataclass(frozen=True, kw_only=True)
class Compared:
    """A strategy against the baseline, or against another strategy: the mean change and its test.

    Args:
        strategy: what is compared.
        num_pairs: how many seeds both have.
        mean: the mean change, the logarithm of a quotient or a difference; see ``Measure``.
        low: the lower end of the 95 % interval.
        high: the upper end.
        p_corrected: the p-value, corrected over ``num_tests`` tests.
        num_tests: how many tests were corrected together.
        correction: the method of correction.
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
        """Say whether the change is more than chance, at 5 % for all tests corrected together."""
        return self.p_corrected < LEVEL

    def figures(self, measure: Measure) -> str:
        """Write the mean change, its interval and the p-value."""
        return f"{measure.text(self.mean)} ({measure.interval(self.low, self.high)}, {p_text(self.p_corrected)})"


@final
@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One test that a sentence rests on.

    Args:
        what: what was compared with what, and where.
        measure: the figure they were compared by.
        compared: seeds, mean change, interval and corrected p-value.
        metric_name: the metric of the data set, if the measure is the metric.
    """

    what: str
    measure: Measure
    compared: Compared
    metric_name: str | None = None

    def __str__(self) -> str:
        one, measure = self.compared, self.measure
        return (
            f"{self.what}: {measure.title} {measure.text(one.mean, self.metric_name)} "
            f"(95 % interval {measure.interval(one.low, one.high, self.metric_name)}; "
            f"n = {counted(one.num_pairs, 'seed')}; {p_text(one.p_corrected)} after {one.correction} over "
            f"{counted(one.num_tests, 'test')})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the test as plain JSON."""
        return {"what": self.what, "measure": self.measure.name, **asdict(self.compared)}


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence about a lab that its numbers support.

    Args:
        topic: what it is about, e.g. ``"overall"``, ``"type"``, ``"dimensionality"``, ``"limits"``.
        sentence: the finding in words.
        evidence: the tests it rests on; empty if it counts or describes.
        strategies: the strategies it puts first; empty if it names none.
    """

    topic: str
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    strategies: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"  {one}" for one in self.evidence)])

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain JSON."""
        return {
            "topic": self.topic,
            "sentence": self.sentence,
            "strategies": list(self.strategies),
            "evidence": [one.to_dict() for one in self.evidence],
        }


# The name it had first; ``batchwright.size.Observation`` is something else.
Observation: TypeAlias = Finding


@final
@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Strategies against the baseline by one measure, corrected together, the best mean first."""

    measure: Measure
    compared: tuple[Compared, ...]

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


@final
@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The strategies on a slice.

    Args:
        slice: the cells.
        verdicts: each strategy against the baseline.
        ties: the strategies that no test tells apart from the first. Together with the first they include the truly
            best one in 95 of 100 cases: it drops out only if another one seems better in a test, and these tests are
            corrected by Bonferroni.
        closest: the first against the nearest strategy that is not in ``ties``; None if there is none.
        left_out: the strategies that did not run on all cells and so are not ranked.
        against: the cells on which the mean of the first is worse than the baseline.
    """

    slice: Slice
    verdicts: Verdicts
    ties: tuple[str, ...]
    closest: Compared | None
    left_out: tuple[str, ...]
    against: tuple[CellKey, ...]


def compare_all(values: Mapping[str, Sequence[float]]) -> list[Compared]:
    """Test each strategy's changes against zero, and correct all tests together.

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


def rank(found: Effects, part: Slice, measure: Measure) -> Ranking | None:
    """Rank the strategies that ran on all cells of a slice; None if no two seeds can be compared."""
    names = list(dict.fromkeys(strategy for cell, strategy in found if cell in part.cells))
    means = {name: seed_means(found, part.cells, name) for name in names}
    means = {name: changes for name, changes in means.items() if len(changes) > 1}
    if not means:
        return None
    verdicts = _verdicts({name: list(changes.values()) for name, changes in means.items()}, measure)
    ties, closest = _against_first(means, [one.strategy for one in verdicts.compared])
    return Ranking(
        slice=part,
        verdicts=verdicts,
        ties=tuple(ties),
        closest=closest,
        left_out=tuple(name for name in names if name not in means),
        against=tuple(
            cell for cell in part.cells if measure.gain(sum(found[cell, verdicts.first.strategy].values())) < 0
        ),
    )


def cell_tests(found: Effects, measure: Measure) -> dict[CellKey, Verdicts]:
    """Test every strategy on every cell in which one has two seeds to compare; each cell is corrected by itself."""
    tests = {}
    for cell in sorted({cell for cell, _ in found}):
        changes = {strategy: list(values.values()) for (other, strategy), values in found.items() if other == cell}
        verdicts = _verdicts(changes, measure)
        if verdicts.compared:
            tests[cell] = verdicts
    return tests


def _verdicts(changes: Mapping[str, Sequence[float]], measure: Measure) -> Verdicts:
    compared = sorted(compare_all(changes), key=lambda one: (-measure.gain(one.mean), one.strategy))
    return Verdicts(measure=measure, compared=tuple(compared))


def _against_first(means: Mapping[str, Mapping[int, float]], order: Sequence[str]) -> tuple[list[str], Compared | None]:
    """Return the strategies that cannot be told apart from the first, and the test of the first against the next."""
    tests = {name: _against_zero(_differences(means, order[0], name)) for name in order[1:]}
    # Bonferroni, and not Holm: the truly best one must survive each of these tests, whatever the others say.
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
    """Return the p-value; a single pair shows nothing."""
    return 1.0 if test.p_value is None else test.p_value


@lru_cache(maxsize=4096)  # the matrix, the charts and the sentences ask for the same tests
def _against_zero(changes: tuple[float, ...]) -> PairedDifference:
    # The same updates cut into other pieces differ in the last bits; without rounding, a change of 1e-8 that is the
    # same for every seed would count as shown.
    return paired_difference([round(change, 6) for change in changes], [0.0] * len(changes))
