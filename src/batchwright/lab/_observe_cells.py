"""Sentences about single data sets and models: where adapting the batch size is no better, and by which figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ._observe_best import Compared, compare_all
from ._observe_effects import Effects, Measure
from ._observe_record import Evidence, Observation
from ._observe_words import counted, listed
from ._report_records import BASELINE, Cell


@final
@dataclass(frozen=True, kw_only=True)
class CellTests:
    """The strategies on one data set and model, corrected together, the best mean first."""

    cell: Cell
    measure: Measure
    compared: tuple[Compared, ...]

    def better(self) -> list[Compared]:
        """Return the strategies shown to be better than the baseline."""
        return [one for one in self.compared if one.is_shown and self.measure.gain(one.mean) > 0]

    def worse(self) -> list[Compared]:
        """Return the strategies shown to be worse than the baseline."""
        return [one for one in self.compared if one.is_shown and self.measure.gain(one.mean) < 0]


def cell_tests(found: Effects, measure: Measure) -> list[CellTests]:
    """Test every strategy on every cell; the strategies of a cell are corrected together.

    Returns:
        One entry for each cell in which at least one strategy has two seeds to compare.
    """
    tests = []
    for cell in sorted({cell for cell, _ in found}):
        changes = {strategy: list(values.values()) for (other, strategy), values in found.items() if other == cell}
        compared = sorted(compare_all(changes), key=lambda one: (-measure.gain(one.mean), one.strategy))
        if compared:
            tests.append(CellTests(cell=cell, measure=measure, compared=tuple(compared)))
    return tests


def count_observation(tests: Sequence[CellTests], adaptive: frozenset[str], *, topic: str) -> Observation:
    """Count how often an adaptive strategy was better, worse, or neither, over all data sets and models."""
    num_all, num_better, num_worse = (
        sum(one.strategy in adaptive for test in tests for one in kind(test))
        for kind in (lambda test: test.compared, CellTests.better, CellTests.worse)
    )
    undecided = num_all - num_better - num_worse
    return Observation(
        topic=topic,
        sentence=f"Of {counted(num_all, 'comparison')} of one adaptive strategy with {BASELINE} on one data set and "
        f"model by the {tests[0].measure.title}, {num_better} came out better, {num_worse} worse and {undecided} "
        "undecided, each corrected for the other strategies on the same data set and model.",
    )


def no_better_observation(tests: Sequence[CellTests], adaptive: frozenset[str]) -> Observation:
    """Name the data sets and models on which no adaptive strategy is shown to be better than the baseline."""
    without = [test for test in tests if not any(one.strategy in adaptive for one in test.better())]
    if not without:
        sentence = f"On every data set and model at least one adaptive strategy is shown to be better than {BASELINE}."
        return Observation(topic="no better", sentence=sentence, evidence=_firsts(tests, adaptive))
    sentence = (
        f"Adapting the batch size is not shown to lower the validation loss on {len(without)} of "
        f"{counted(len(tests), 'pair')} of data set and model: {listed([str(test.cell) for test in without])}."
    )
    hurt = [str(test.cell) for test in without if _all_worse(test, adaptive)]
    if hurt:
        sentence += f" Every adaptive strategy is shown to be worse on {listed(hurt)}."
    return Observation(topic="no better", sentence=sentence, evidence=_firsts(without, adaptive))


def _all_worse(test: CellTests, adaptive: frozenset[str]) -> bool:
    ran = adaptive.intersection(one.strategy for one in test.compared)
    return bool(ran) and ran.issubset(one.strategy for one in test.worse())


def _firsts(tests: Sequence[CellTests], adaptive: frozenset[str]) -> tuple[Evidence, ...]:
    """Return the test of the best adaptive strategy of each cell."""
    found = []
    for test in tests:
        first = next((one for one in test.compared if one.strategy in adaptive), None)
        if first is not None:
            what = f"{first.strategy} against {BASELINE}, the best adaptive one on {test.cell}"
            found.append(Evidence(what=what, measure=test.measure, compared=first))
    return tuple(found)
