"""Evidence: tests of strategies in pairs of runs, corrected together, and the findings that rest on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal, TypeAlias, TypeVar, final

from ..statistics import PairedDifference, holm, pooled_difference, smallest_detectable
from ..strategies.strategy import BASELINE
from ._effects import Measure, counted, p_text

Correction: TypeAlias = Literal["Holm", "Bonferroni"]
# The changes of a strategy: one mapping from seed to change for each cell.
Cells: TypeAlias = Sequence[Mapping[int, float]]
_Key = TypeVar("_Key", bound=tuple[Any, ...])
# A corrected p-value below this counts as shown.
LEVEL = 0.05


@final
@dataclass(frozen=True, kw_only=True)
class Compared:
    """A strategy against the baseline, or against another strategy: the mean change and its test.

    Args:
        strategy: what is compared.
        num_pairs: how many pairs of runs there are, over all cells.
        mean: the mean change, the logarithm of a quotient or a difference; see ``Measure``.
        low: the lower end of the 95 % interval.
        high: the upper end.
        p_corrected: the p-value, corrected over ``num_tests`` tests.
        num_tests: how many tests were corrected together.
        correction: the method of correction.
        num_cells: over how many cells, pairs of data set and model, the mean is.
        error: the standard error of the mean.
        freedom: the degrees of freedom of its test.
        misreading: by how much the mean may be wrong the same way for every seed, where losses are read between two
            validations; the interval is wider by it, and the test is that the change is larger than it.
    """

    strategy: str
    num_pairs: int
    mean: float
    low: float
    high: float
    p_corrected: float
    num_tests: int
    correction: Correction = "Holm"
    num_cells: int = 1
    error: float = 0.0
    freedom: float = 1.0
    misreading: float = 0.0

    @property
    def detectable(self) -> float:
        """Return the size of a change that tests like this one, with their correction, find in four of five labs."""
        return self.misreading + smallest_detectable(self.error, self.freedom, level=LEVEL / self.num_tests)

    @property
    def is_shown(self) -> bool:
        """Say whether the change is more than chance, at 5 % for all tests corrected together."""
        return self.p_corrected < LEVEL

    def figures(self, measure: Measure) -> str:
        """Write the mean change, its interval, the number of pairs and the p-value."""
        mean, interval = measure.texts(self.mean, self.low, self.high)
        return f"{mean} ({interval}, n = {self.num_pairs}, {p_text(self.p_corrected)})"

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
        mean, interval = measure.texts(one.mean, one.low, one.high, self.metric_name)
        return (
            f"{self.what}: {measure.title} {mean} (95 % interval {interval}; "
            f"n = {counted(one.num_pairs, 'pair')}; {p_text(one.p_corrected)} after {one.correction} over "
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
        why: what in the records is a likely reason; empty if there is nothing to explain.
    """

    topic: str
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    strategies: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        return "\n".join([self.sentence, *([self.why] if self.why else []), *(f"  {one}" for one in self.evidence)])

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain JSON."""
        evidence = [one.to_dict() for one in self.evidence]
        words = {"topic": self.topic, "sentence": self.sentence, "why": self.why}
        return {**words, "strategies": [*self.strategies], "evidence": evidence}


# The name it had first; ``batchwright.size.Observation`` is something else.
Observation: TypeAlias = Finding


def compare_all(values: Mapping[str, Cells], *, correction: Correction = "Holm") -> list[Compared]:
    """Test each strategy's changes against zero, pooled within cells, and correct all tests together.

    A strategy with fewer than two seeds in one of its cells is not tested.

    >>> changes = {"linear": [{0: -0.3, 1: -0.31, 2: -0.29}], "cyclical": [{0: 0.1, 1: -0.2, 2: 0.05}]}
    >>> for one in compare_all(changes):
    ...     print(one.strategy, round(one.mean, 3), one.num_tests, one.is_shown)
    linear -0.3 2 True
    cyclical -0.017 2 False
    """
    return list(compare_family({(name,): cells for name, cells in values.items()}, correction=correction).values())


def compare_family(
    values: Mapping[_Key, Cells],
    *,
    correction: Correction = "Holm",
    misread: Mapping[_Key, Sequence[float]] | None = None,
) -> dict[_Key, Compared]:
    """Test every member of a family, and correct all of them together; the name of the strategy ends the key.

    Args:
        values: the changes, under keys that are tuples.
        correction: the method of correction.
        misread: by how much the changes of each cell may be wrong the same way for every seed; None if they are not.
    """
    wrong = {key: tuple((misread or {}).get(key) or [0.0] * len(cells)) for key, cells in values.items()}
    tests = {key: test for key, cells in values.items() if (test := _test(cells, wrong[key])) is not None}
    p_values = [test.p_value or 0.0 for test in tests.values()]
    if correction == "Holm":
        num_tests, corrected = len(tests), holm(p_values)
    else:
        num_tests = len(values)
        corrected = [min(1.0, num_tests * p) for p in p_values]
    return {
        key: replace(_compared(key[-1], test, p, num_tests, correction, len(values[key])), misreading=fmean(wrong[key]))
        for (key, test), p in zip(tests.items(), corrected, strict=True)
    }


def _compared(
    name: str, test: PairedDifference, p: float, num_tests: int, correction: Correction, num_cells: int
) -> Compared:
    assert test.low is not None
    assert test.high is not None
    assert test.error is not None
    assert test.freedom is not None
    return Compared(
        strategy=name,
        num_pairs=test.num_pairs,
        mean=test.mean,
        low=test.low,
        high=test.high,
        p_corrected=p,
        num_tests=num_tests,
        correction=correction,
        num_cells=num_cells,
        error=test.error,
        freedom=test.freedom,
    )


def _test(cells: Cells, misread: Sequence[float]) -> PairedDifference | None:
    if not cells or not all(cells):
        return None
    found = _against_zero(tuple(tuple(changes.values()) for changes in cells))
    wrong = fmean(misread)
    if found is None or found.low is None or found.high is None or not wrong:
        return found
    p_value: float | None = 1.0
    if abs(found.mean) > wrong:
        # The nearest that the truth may be to no change at all.
        sign = math.copysign(1.0, found.mean)
        nearer = [
            tuple(change - sign * most for change in changes.values())
            for changes, most in zip(cells, misread, strict=True)
        ]
        test = _against_zero(tuple(nearer))
        p_value = None if test is None else test.p_value
    return replace(found, low=found.low - wrong, high=found.high + wrong, p_value=p_value)


@lru_cache(maxsize=4096)  # the matrix, the charts and the sentences ask for the same tests
def _against_zero(cells: tuple[tuple[float, ...], ...]) -> PairedDifference | None:
    """Return the test of changes in cells, None if one has fewer than two."""
    # The same updates cut into other pieces differ in the last bits; without rounding, a change of 1e-8 that is the
    # same for every seed would count as shown.
    return pooled_difference([[round(change, 6) for change in changes] for changes in cells])
