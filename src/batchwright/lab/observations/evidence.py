"""Evidence: tests of strategies in pairs of runs, corrected together, and the findings that rest on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, cast, final

from ..statistics import holm, paired_difference
from ..strategies.strategy import BASELINE
from ._effects import Measure, counted, p_text

Correction: TypeAlias = Literal["Holm", "Bonferroni"]
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
    correction: Correction = "Holm"

    @property
    def is_shown(self) -> bool:
        """Say whether the change is more than chance, at 5 % for all tests corrected together."""
        return self.p_corrected < LEVEL

    def figures(self, measure: Measure) -> str:
        """Write the mean change, its interval and the p-value."""
        return f"{measure.text(self.mean)} ({measure.interval(self.low, self.high)}, {p_text(self.p_corrected)})"

    def evidence(self, measure: Measure, where: str, *, against: str = BASELINE) -> Evidence:
        """Return the test as evidence about cells."""
        return Evidence(what=f"{self.strategy} against {against}, {where}", measure=measure, compared=self)


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
        evidence = [one.to_dict() for one in self.evidence]
        return {"topic": self.topic, "sentence": self.sentence, "strategies": [*self.strategies], "evidence": evidence}


# The name it had first; ``batchwright.size.Observation`` is something else.
Observation: TypeAlias = Finding


def compare_all(values: Mapping[str, Mapping[int, float]], *, correction: Correction = "Holm") -> list[Compared]:
    """Test each strategy's changes, by seed, against zero, and correct all tests together.

    A strategy with fewer than two seeds is not tested.

    >>> changes = {"linear": {0: -0.3, 1: -0.31, 2: -0.29}, "cyclical": {0: 0.1, 1: -0.2, 2: 0.05}}
    >>> for one in compare_all(changes):
    ...     print(one.strategy, round(one.mean, 3), one.num_tests, one.is_shown)
    linear -0.3 2 True
    cyclical -0.017 2 False
    """
    tests = {name: _against_zero(tuple(changes.values())) for name, changes in values.items() if len(changes) > 1}
    p_values = [p for *_, p in tests.values()]
    if correction == "Holm":
        num_tests, corrected = len(tests), holm(p_values)
    else:
        num_tests = len(values)
        corrected = [min(1.0, num_tests * p) for p in p_values]
    return [
        Compared(
            strategy=name,
            num_pairs=len(values[name]),
            mean=mean,
            low=low,
            high=high,
            p_corrected=p,
            num_tests=num_tests,
            correction=correction,
        )
        for (name, (mean, low, high, _)), p in zip(tests.items(), corrected, strict=True)
    ]


@lru_cache(maxsize=4096)  # the matrix, the charts and the sentences ask for the same tests
def _against_zero(changes: tuple[float, ...]) -> tuple[float, float, float, float]:
    """Return the mean, both ends of its interval and the p-value of two changes or more."""
    # The same updates cut into other pieces differ in the last bits; without rounding, a change of 1e-8 that is the
    # same for every seed would count as shown.
    test = paired_difference([round(change, 6) for change in changes], [0.0] * len(changes))
    return cast("tuple[float, float, float, float]", (test.mean, test.low, test.high, test.p_value))
