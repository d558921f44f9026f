"""How strategies rank on some cells, tested against the baseline and against the first, and the sentence about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from .._records import CellKey
from ..strategies.strategy import BASELINE
from ._effects import Effects, Measure, counted, listed, of_strategies, paired
from ._slices import Slice
from .evidence import Cells, Compared, Evidence, Finding, compare_all, compare_family


@final
@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Strategies against the baseline by one measure, corrected together, the best mean first."""

    measure: Measure
    compared: tuple[Compared, ...]

    @classmethod
    def of(cls, measure: Measure, compared: Iterable[Compared]) -> Verdicts:
        """Return verdicts in their order."""
        ranked = sorted(compared, key=lambda one: (-measure.gain(one.mean), one.strategy))
        return cls(measure=measure, compared=tuple(ranked))

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
        left_out: the strategies that have no two pairs of runs in one of the cells and so are not ranked.
        against: the cells on which the mean of the first is worse than the baseline.
    """

    slice: Slice
    verdicts: Verdicts
    ties: tuple[str, ...]
    closest: Compared | None
    left_out: tuple[str, ...]
    against: tuple[CellKey, ...]


def testable(found: Effects, cells: Sequence[CellKey]) -> dict[str, Cells]:
    """Return the changes of the strategies that have two seeds or more in every one of some cells."""
    every = of_strategies(found, cells)
    return {name: parts for name, parts in every.items() if all(len(changes) > 1 for changes in parts)}


def rank(
    found: Effects, part: Slice, measure: Measure, *, compared: Iterable[Compared] | None = None
) -> Ranking | None:
    """Rank the strategies that ran on all cells of a slice; None if no two seeds can be compared.

    Args:
        found: the changes against the baseline.
        part: the cells.
        measure: what they are ranked by.
        compared: the tests against the baseline, if they belong to a larger family; None corrects them by themselves.
    """
    changes = testable(found, part.cells)
    if not changes:
        return None
    verdicts = Verdicts.of(measure, compare_all(changes) if compared is None else compared)
    first, *others = (one.strategy for one in verdicts.compared)
    # Bonferroni, and not Holm: the truly best one must survive each of these tests, whatever the others say.
    pairs = {name: list(map(paired, changes[first], changes[name])) for name in others}
    tests = compare_all(pairs, correction="Bonferroni")
    apart = {one.strategy: one for one in tests if one.is_shown}
    return Ranking(
        slice=part,
        verdicts=verdicts,
        ties=tuple(name for name in others if name not in apart),
        closest=next(iter(apart.values()), None),
        left_out=tuple(name for name in of_strategies(found, part.cells) if name not in changes),
        against=tuple(cell for cell in part.cells if measure.gain(sum(found[cell, first].values())) < 0),
    )


def cell_tests(
    found: Effects, measure: Measure, *, misread: Mapping[tuple[CellKey, str], float] | None = None
) -> dict[CellKey, Verdicts]:
    """Test every strategy on every cell in which it has two seeds; all cells and strategies are corrected together."""
    wrong = {place: [most] for place, most in (misread or {}).items()}
    tests = compare_family({place: [changes] for place, changes in found.items()}, misread=wrong)
    cells: dict[CellKey, list[Compared]] = {}
    for (cell, _), one in tests.items():
        cells.setdefault(cell, []).append(one)
    return {cell: Verdicts.of(measure, cells[cell]) for cell in sorted(cells)}


def best_finding(ranking: Ranking, fixed: frozenset[str], *, topic: str) -> Finding:
    """Say which strategy is best on a slice, which ones tie with it, or that none is better than the baseline.

    Args:
        ranking: the ranking on the slice.
        fixed: the strategies whose batch size never changes.
        topic: the topic of the finding.
    """
    better = ranking.verdicts.better()
    leaders: tuple[str, ...] = ()
    if better:
        best = better[0].strategy
        leaders = (best, *(name for name in ranking.ties if name != best))
        tell = _winner if ranking.verdicts.first.is_shown else _second_winner
        sentence = tell(ranking) + fixed_clause(best, fixed)
    else:
        sentence = _no_winner(ranking)
    if ranking.left_out:
        sentence += f" Not compared on all of it, so not ranked: {listed(ranking.left_out)}."
    return Finding(topic=topic, sentence=sentence, evidence=_best_evidence(ranking), strategies=leaders)


def _winner(ranking: Ranking) -> str:
    verdicts, first = ranking.verdicts, ranking.verdicts.first
    num_others, num_pairs = len(verdicts.compared) - 1, counted(first.num_pairs, "pair")
    sentence = (
        f"On {ranking.slice}, {first.strategy} has the lowest {verdicts.measure.title}: "
        f"{first.figures(verdicts.measure)} against {BASELINE}"
    )
    if ranking.ties:
        sentence += f". It is a tie: {listed(ranking.ties)} cannot be told apart from it with {num_pairs} of runs."
    else:
        others = "the other strategy" if num_others == 1 else f"all {num_others} others"
        sentence += f", and it is ahead of {others}." if num_others else "."
    if ranking.against:  # an average must not hide where it is on the wrong side
        sentence += f" Not everywhere: its mean is worse than that of {BASELINE} on {listed(ranking.against)}."
    return sentence


def _second_winner(ranking: Ranking) -> str:
    """Name the best strategy that is shown to be better, if the one with the best mean is not."""
    measure, best, first = ranking.verdicts.measure, ranking.verdicts.better()[0], ranking.verdicts.first
    return (
        f"On {ranking.slice}, {best.strategy} is shown to be better than {BASELINE} by the {measure.title}: "
        f"{best.figures(measure)}. The mean of {first.strategy} is lower still, but could be chance: "
        f"{first.figures(measure)}."
    )


def _no_winner(ranking: Ranking) -> str:
    verdicts, first = ranking.verdicts, ranking.verdicts.first
    worse, num_all, figures = verdicts.worse(), len(verdicts.compared), first.figures(verdicts.measure)
    if len(worse) == num_all:
        which = f"the only strategy, {first.strategy}, is" if num_all == 1 else f"all {num_all} strategies are"
        return (
            f"On {ranking.slice}, {which} worse than {BASELINE} by the {verdicts.measure.title}; "
            f"the nearest is {first.strategy} with {figures}."
        )
    is_gain = verdicts.measure.gain(first.mean) > 0
    sentence = (
        f"On {ranking.slice}, no strategy is shown to be better than {BASELINE} by the {verdicts.measure.title}: "
        f"{'the' if is_gain else 'even the'} best mean, {figures} for {first.strategy}, "
        f"{'could be chance' if is_gain else 'is not a gain'}."
    )
    return sentence + (f" Shown to be worse: {listed([one.strategy for one in worse])}." if worse else "")


def fixed_clause(strategy: str, fixed: frozenset[str]) -> str:
    """Return the sentence that a gain of a fixed batch size does not come from adapting; empty for other strategies."""
    if strategy not in fixed:
        return ""
    return f" The batch size of {strategy} never changes, so this gain does not come from adapting it."


def _best_evidence(ranking: Ranking) -> tuple[Evidence, ...]:
    """Return the tests of the strategies that the sentence names, and of the nearest one that is told apart."""
    verdicts, where = ranking.verdicts, str(ranking.slice)
    better, first, closest = verdicts.better(), verdicts.first, ranking.closest
    named = {first.strategy, *(one.strategy for one in better[:1] or verdicts.worse())}
    has_won = bool(better) and first.is_shown
    named |= set(ranking.ties if has_won else ())
    found = [one.evidence(verdicts.measure, where) for one in verdicts.compared if one.strategy in named]
    if closest is not None and has_won:
        what = f"{first.strategy} against {closest.strategy}, {where}"
        found.append(Evidence(what=what, measure=verdicts.measure, compared=closest))
    return tuple(found)


def count_finding(tests: Mapping[CellKey, Verdicts], adaptive: frozenset[str], *, topic: str) -> Finding:
    """Count how often an adaptive strategy was better, worse, or neither, over all data sets and models."""
    num_all, num_better, num_worse = (
        sum(one.strategy in adaptive for test in tests.values() for one in kind(test))
        for kind in (lambda test: test.compared, Verdicts.better, Verdicts.worse)
    )
    undecided = num_all - num_better - num_worse
    measure = next(iter(tests.values())).measure
    len_all = sum(len(test.compared) for test in tests.values())
    return Finding(
        topic=topic,
        sentence=f"Of {counted(num_all, 'comparison')} of one adaptive strategy with {BASELINE} on one data set and "
        f"model by the {measure.title}, {num_better} came out better, {num_worse} worse and {undecided} "
        f"undecided, all {len_all} tests corrected together.",
        evidence=tuple(
            one.evidence(measure, str(cell))
            for cell, test in tests.items()
            for one in (*test.better(), *test.worse())
            if one.strategy in adaptive
        ),
    )


def no_better_finding(tests: Mapping[CellKey, Verdicts], adaptive: frozenset[str]) -> Finding:
    """Name the data sets and models on which no adaptive strategy is shown to be better than the baseline."""
    without = {cell: test for cell, test in tests.items() if not any(one.strategy in adaptive for one in test.better())}
    if not without:
        sentence = f"On every data set and model at least one adaptive strategy is shown to be better than {BASELINE}."
        return Finding(topic="no better", sentence=sentence, evidence=_firsts(tests, adaptive))
    sentence = (
        f"Adapting the batch size is not shown to lower the validation loss on {len(without)} of "
        f"{counted(len(tests), 'pair')} of data set and model: {listed(list(without))}."
    )
    hurt = [cell for cell, test in without.items() if _all_worse(test, adaptive)]
    if hurt:
        sentence += f" Every adaptive strategy is shown to be worse on {listed(hurt)}."
    return Finding(topic="no better", sentence=sentence, evidence=_firsts(without, adaptive))


def _all_worse(test: Verdicts, adaptive: frozenset[str]) -> bool:
    ran = adaptive.intersection(one.strategy for one in test.compared)
    return bool(ran) and ran.issubset(one.strategy for one in test.worse())


def _firsts(tests: Mapping[CellKey, Verdicts], adaptive: frozenset[str]) -> tuple[Evidence, ...]:
    """Return the test of the best adaptive strategy of each cell."""
    found = []
    for cell, test in tests.items():
        ran = [one for one in test.compared if one.strategy in adaptive]
        found += [one.evidence(test.measure, f"the best adaptive strategy on {cell}") for one in ran[:1]]
    return tuple(found)
