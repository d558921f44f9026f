"""Findings behind the headline: costs, properties of the data, replays, and single data sets and models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

from .._records import CellKey, RunRecord
from ..strategies.strategy import BASELINE
from ._effects import (
    LOSS,
    SECONDS,
    UPDATES,
    Effects,
    Measure,
    counted,
    effects,
    listed,
    of_strategies,
    p_text,
    paired,
    seed_means,
)
from ._headline import MARGIN, shown_below
from ._ranking import Verdicts, fixed_clause, testable
from ._slices import REPLAY, Halves, Slice, fixed_of, groups_of
from .evidence import Compared, Evidence, Finding, compare_all, compare_family

SeedMeans: TypeAlias = Mapping[str, Mapping[int, float]]
_PREFIX = "replay_"


def cost_finding(records: Sequence[RunRecord], part: Slice) -> Finding | None:
    """Name the strategies that need fewer updates and are shown to end within 5 % of the baseline's loss.

    "Shown" is a test of its own, that the loss is less than 5 % higher: a difference that was not found does not prove
    that there is none. None if no two seeds can be compared.
    """
    losses, updates, seconds = (testable(effects(records, one), part.cells) for one in (LOSS, UPDATES, SECONDS))
    if not losses:
        return None
    margin = f"{100 * MARGIN:.0f} %"
    # Tested against a loss that is higher by the margin.
    as_good, fewer = shown_below(losses, math.log1p(MARGIN)), shown_below(updates, 0.0)
    saving = sorted(as_good.keys() & fewer.keys(), key=lambda name: (fewer[name].mean, name))
    if not saving:
        return Finding(
            topic="cost",
            sentence=f"Of {counted(len(losses), 'strategy')} none is shown to need fewer updates than {BASELINE} and "
            f"to end at most {margin} above its validation loss, on {part}.",
        )
    best = saving[0]
    loss, time = (next((one for one in compare_all(x) if one.strategy == best), None) for x in (losses, seconds))
    tests = ((UPDATES, fewer[best]), (LOSS, loss), (SECONDS, time))
    rest = f" The same holds for {listed(saving[1:])}." if saving[1:] else ""
    return Finding(
        topic="cost",
        sentence=f"On {part}, {best} is shown to end less than {margin} above the validation loss of {BASELINE} "
        f"({p_text(as_good[best].p_corrected)}). Its updates change by {_brief(UPDATES, fewer[best])}"
        f"{_seconds_clause(time)}.{fixed_clause(best, fixed_of(records))}{rest}",
        evidence=tuple(one.evidence(measure, str(part)) for measure, one in tests if one is not None),
        strategies=tuple(saving),
    )


def _seconds_clause(test: Compared | None) -> str:
    if test is None:
        return ""
    if test.is_shown:
        return f" and its seconds by {_brief(SECONDS, test)}"
    return f"; its seconds are not shown to differ ({', '.join(SECONDS.texts(test.mean, test.low, test.high))})"


def _brief(measure: Measure, one: Compared) -> str:
    mean, interval = measure.texts(one.mean, one.low, one.high)
    return mean if math.isclose(one.low, one.high) else f"{mean} ({interval})"


def contrast_findings(found: Effects, every: Sequence[Halves]) -> dict[str, Finding]:
    """Say for each property whether the effect of any strategy differs between two halves of the data sets.

    Tested is the change on the upper half minus the change on the lower half, seed by seed, for every strategy; all
    strategies and properties are corrected together. A property is left out if no two seeds have both its halves.
    """
    sides = {half.topic: [seed_means(found, part.cells) for part in (half.low, half.high)] for half in every}
    values = {
        (topic, name): [paired(changes, low.get(name, {}))]
        for topic, (low, high) in sides.items()
        for name, changes in high.items()
    }
    tests = compare_family(values)
    by_topic = {half.topic: [one for (topic, _), one in tests.items() if topic == half.topic] for half in every}
    return {
        half.topic: _contrast(half, by_topic[half.topic], *sides[half.topic]) for half in every if by_topic[half.topic]
    }


def _contrast(halves: Halves, tests: Sequence[Compared], low: SeedMeans, high: SeedMeans) -> Finding:
    compared = sorted(tests, key=lambda one: (one.p_corrected, -abs(one.mean), one.strategy))
    first, low_label, high_label = compared[0], halves.low.label, halves.high.label
    name = first.strategy
    if first.is_shown:
        both = low[name].keys() & high[name].keys()
        low_text, high_text = (LOSS.text(fmean(side[name][seed] for seed in both)) for side in (low, high))
        num_shown = sum(one.is_shown for one in compared)
        sentence = (
            f"The effect of {name} on the validation loss depends on the {halves.topic} of the data: "
            f"{low_text} on {halves.low}, {high_text} on {halves.high}; the difference is {first.figures(LOSS)}. "
            f"Such a difference is shown for {num_shown} of {counted(len(compared), 'strategy')}."
        )
    else:
        sentence = (
            f"No strategy's effect is shown to depend on the {halves.topic} of the data: among "
            f"{counted(len(compared), 'strategy')} the clearest difference between {low_label} and {high_label}, "
            f"for {name}, could be chance: {first.figures(LOSS)}."
        )
    what = f"{name}: its change on {high_label} minus its change on {low_label}"
    evidence = Evidence(what=what, measure=LOSS, compared=first)
    return Finding(topic=halves.topic, sentence=sentence, evidence=(evidence,))


def replay_finding(records: Sequence[RunRecord], found: Effects, part: Slice) -> Finding | None:
    """Compare each strategy with a replay of its sizes from another seed; None if no two seeds have both.

    The replay grows as the strategy did and does not react: what remains between the two is the reaction.
    """
    changes = of_strategies(found, part.cells)
    replays = [name for name, group in groups_of(records).items() if group == REPLAY and name in changes]
    sources = {name.removeprefix(_PREFIX): changes[name] for name in replays}
    differences = {
        source: list(map(paired, changes[source], replayed))
        for source, replayed in sources.items()
        if source in changes
    }
    compared = sorted(compare_all(differences), key=lambda one: (one.mean, one.strategy))
    if not compared:
        return None
    parts = []
    for where, sign in (("lower", 1), ("higher", -1)):
        some = [_with_figures(one) for one in compared if one.is_shown and sign * one.mean < 0]
        if some:
            ends = "ends" if len(some) == 1 else "end"
            parts.append(f"{listed(some)} {ends} {where} than a replay of the same sizes")
    undecided = [one.strategy for one in compared if not one.is_shown]
    if undecided:
        parts.append(f"{listed(undecided)} cannot be told apart from a replay of the same sizes")
    return Finding(
        topic="reacting",
        sentence=f"Reacting to training, or only growing? On {part}, {'; '.join(parts)}.",
        evidence=tuple(one.evidence(LOSS, str(part), against=_PREFIX + one.strategy) for one in compared),
    )


def _with_figures(one: Compared) -> str:
    return f"{one.strategy} ({', '.join(LOSS.texts(one.mean, one.low, one.high))}, {p_text(one.p_corrected)})"


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
