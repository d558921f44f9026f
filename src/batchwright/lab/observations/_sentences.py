"""The sentences: which strategy is best, what it saves, whether the data or reacting matters, where none is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .._records import CellKey, RunRecord
from ..strategies.strategy import BASELINE
from ._effects import LOSS, SECONDS, UPDATES, Effects, Measure, counted, effects, listed, p_text, seed_means
from ._slices import REPLAY, Halves, Slice, fixed_of, groups_of
from .evidence import Compared, Evidence, Finding, Ranking, Verdicts, compare_all

# A loss that is at most this much higher counts as equally good.
MARGIN = 0.05
_MARGIN_TEXT = f"{100 * MARGIN:.0f} %"
_PREFIX = "replay_"


def best_finding(ranking: Ranking, fixed: frozenset[str], *, topic: str) -> Finding:
    """Say which strategy is best on a slice, which ones tie with it, or that none is better than the baseline.

    Args:
        ranking: the ranking on the slice.
        fixed: the strategies whose batch size never changes.
        topic: the topic of the finding.
    """
    better = [one.strategy for one in ranking.verdicts.better()]
    sentence = _winner(ranking, fixed) if better else _no_winner(ranking)
    leaders = (better[0], *(name for name in ranking.ties if name != better[0])) if better else ()
    if ranking.left_out:
        sentence += f" Not ranked, since not run on all of it: {listed(ranking.left_out)}."
    return Finding(topic=topic, sentence=sentence, evidence=tuple(_best_evidence(ranking)), strategies=leaders)


def _winner(ranking: Ranking, fixed: frozenset[str]) -> str:
    verdicts, first = ranking.verdicts, ranking.verdicts.first
    if not first.is_shown:
        return _second_winner(ranking, fixed)
    sentence = (
        f"On {ranking.slice}, {first.strategy} has the lowest {verdicts.measure.title}: "
        f"{first.figures(verdicts.measure)} against {BASELINE}"
    )
    if not ranking.ties:
        num_others = len(verdicts.compared) - 1
        sentence += f", and ahead of all {num_others} others." if num_others else "."
    else:
        sentence += (
            f". It is a tie: {listed(ranking.ties)} cannot be told apart from it with "
            f"{counted(first.num_pairs, 'seed')}."
        )
    return sentence + _elsewhere(ranking) + _fixed_clause(first.strategy, fixed)


def _second_winner(ranking: Ranking, fixed: frozenset[str]) -> str:
    """Name the best strategy that is shown to be better, if the one with the best mean is not."""
    measure, best, first = ranking.verdicts.measure, ranking.verdicts.better()[0], ranking.verdicts.first
    return (
        f"On {ranking.slice}, {best.strategy} is shown to be better than {BASELINE} by the {measure.title}: "
        f"{best.figures(measure)}. The mean of {first.strategy} is lower still, but could be chance: "
        f"{first.figures(measure)}.{_fixed_clause(best.strategy, fixed)}"
    )


def _elsewhere(ranking: Ranking) -> str:
    """Name the cells where the mean of the best strategy is on the wrong side: an average must not hide them."""
    if not ranking.against:
        return ""
    return f" Not everywhere: its mean is worse than that of {BASELINE} on {listed(list(map(str, ranking.against)))}."


def _no_winner(ranking: Ranking) -> str:
    verdicts, first = ranking.verdicts, ranking.verdicts.first
    worse, num_all, figures = verdicts.worse(), len(verdicts.compared), first.figures(verdicts.measure)
    if len(worse) == num_all:
        which = f"the only strategy, {first.strategy}, is" if num_all == 1 else f"all {num_all} strategies are"
        return (
            f"On {ranking.slice}, {which} worse than {BASELINE} by the {verdicts.measure.title}; "
            f"the nearest is {first.strategy} with {figures}."
        )
    sentence = (
        f"On {ranking.slice}, no strategy is shown to be better than {BASELINE} by the {verdicts.measure.title}: "
    )
    if verdicts.measure.gain(first.mean) > 0:
        sentence += f"the best mean, {figures} for {first.strategy}, could be chance."
    else:
        sentence += f"even the best mean, {figures} for {first.strategy}, is not a gain."
    if worse:
        sentence += f" Shown to be worse: {listed([one.strategy for one in worse])}."
    return sentence


def _fixed_clause(strategy: str, fixed: frozenset[str]) -> str:
    """Return the sentence that a gain of a fixed batch size does not come from adapting; empty for other strategies."""
    if strategy not in fixed:
        return ""
    return f" The batch size of {strategy} never changes, so this gain does not come from adapting it."


def _best_evidence(ranking: Ranking) -> list[Evidence]:
    """Return the tests of the strategies that the sentence names, and of the nearest one that is told apart."""
    verdicts, where = ranking.verdicts, str(ranking.slice)
    better, first = verdicts.better(), verdicts.first
    named = {first.strategy, *(one.strategy for one in better[:1] or verdicts.worse())}
    named |= set(ranking.ties if better and first.is_shown else ())
    found = [
        Evidence(what=f"{one.strategy} against {BASELINE}, {where}", measure=verdicts.measure, compared=one)
        for one in verdicts.compared
        if one.strategy in named
    ]
    if ranking.closest is not None and better and first.is_shown:
        what = f"{first.strategy} against {ranking.closest.strategy}, {where}"
        found.append(Evidence(what=what, measure=verdicts.measure, compared=ranking.closest))
    return found


def cost_finding(records: Sequence[RunRecord], part: Slice) -> Finding | None:
    """Name the strategies that need fewer updates and are shown to end within 5 % of the baseline's loss.

    "Shown" is a test of its own, that the loss is less than 5 % higher: a difference that was not found does not prove
    that there is none.

    Args:
        records: the runs.
        part: the cells to look at.

    Returns:
        The finding, None if no two seeds can be compared.
    """
    losses, updates, seconds = (_changes(records, part, measure) for measure in (LOSS, UPDATES, SECONDS))
    if not losses:
        return None
    # Tested against a loss that is higher by the margin.
    limit = math.log1p(MARGIN)
    shifted = compare_all({name: [change - limit for change in changes] for name, changes in losses.items()})
    as_good = {one.strategy: one for one in shifted if one.is_shown and one.mean < 0}
    fewer = {one.strategy: one for one in compare_all(updates) if one.is_shown and one.mean < 0}
    saving = sorted(as_good.keys() & fewer.keys(), key=lambda name: (fewer[name].mean, name))
    if not saving:
        return Finding(
            topic="cost",
            sentence=f"Of {counted(len(losses), 'strategy')} none is shown to need fewer updates than {BASELINE} and "
            f"to end at most {_MARGIN_TEXT} above its validation loss, on {part}.",
        )
    best = saving[0]
    tests = {measure: _named(changes, best) for measure, changes in ((LOSS, losses), (SECONDS, seconds))}
    rest = _fixed_clause(best, fixed_of(records))
    rest += f" The same holds for {listed(saving[1:])}." if saving[1:] else ""
    what = f"{best} against {BASELINE}, {part}"
    return Finding(
        topic="cost",
        sentence=f"{best} is shown to end less than {_MARGIN_TEXT} above the validation loss of {BASELINE} "
        f"({p_text(as_good[best].p_corrected)}), with "
        f"{_brief(UPDATES, fewer[best])} updates{_seconds_clause(tests[SECONDS])}, on {part}.{rest}",
        evidence=tuple(
            Evidence(what=what, measure=measure, compared=one)
            for measure, one in {UPDATES: fewer[best], **tests}.items()
            if one is not None
        ),
        strategies=tuple(saving),
    )


def _changes(records: Sequence[RunRecord], part: Slice, measure: Measure) -> dict[str, list[float]]:
    found = effects(records, measure)
    names = dict.fromkeys(strategy for _, strategy in found)
    means = {name: list(seed_means(found, part.cells, name).values()) for name in names}
    return {name: changes for name, changes in means.items() if len(changes) > 1}


def _named(changes: dict[str, list[float]], name: str) -> Compared | None:
    return next((one for one in compare_all(changes) if one.strategy == name), None)


def _seconds_clause(test: Compared | None) -> str:
    if test is None:
        return ""
    if not test.is_shown:
        interval = SECONDS.interval(test.low, test.high)
        return f" and a time that is not shown to differ ({SECONDS.text(test.mean)}, {interval})"
    return f" and {_brief(SECONDS, test)} seconds"


def _brief(measure: Measure, one: Compared) -> str:
    if math.isclose(one.low, one.high):
        return measure.text(one.mean)
    return f"{measure.text(one.mean)} ({measure.interval(one.low, one.high)})"


def contrast_finding(found: Effects, halves: Halves) -> Finding | None:
    """Say whether the effect of any strategy differs between two halves of the data sets.

    Tested is the change on the upper half minus the change on the lower half, seed by seed, for every strategy; all
    are corrected together.

    Returns:
        The finding, None if no two seeds have both halves.
    """
    differences, sides = {}, {}
    for name in dict.fromkeys(strategy for _, strategy in found):
        low, high = (seed_means(found, part.cells, name) for part in (halves.low, halves.high))
        seeds = sorted(low.keys() & high.keys())
        differences[name] = [high[seed] - low[seed] for seed in seeds]
        sides[name] = [sum(side[seed] for seed in seeds) / len(seeds) if seeds else 0.0 for side in (low, high)]
    compared = sorted(compare_all(differences), key=lambda one: (one.p_corrected, -abs(one.mean), one.strategy))
    if not compared:
        return None
    first, low_label, high_label = compared[0], halves.low.label, halves.high.label
    if first.is_shown:
        low_text, high_text = (LOSS.text(side) for side in sides[first.strategy])
        num_shown = sum(one.is_shown for one in compared)
        sentence = (
            f"The effect of {first.strategy} on the validation loss depends on the {halves.topic} of the data: "
            f"{low_text} on {halves.low}, {high_text} on {halves.high}; {p_text(first.p_corrected)}. "
            f"Such a difference is shown for {num_shown} of {counted(len(compared), 'strategy')}."
        )
    else:
        sentence = (
            f"No strategy's effect is shown to depend on the {halves.topic} of the data: among "
            f"{counted(len(compared), 'strategy')} the clearest difference between {low_label} and {high_label}, "
            f"for {first.strategy}, could be chance ({p_text(first.p_corrected)})."
        )
    what = f"{first.strategy}: its change on {high_label} minus its change on {low_label}"
    evidence = Evidence(what=what, measure=LOSS, compared=first)
    return Finding(topic=halves.topic, sentence=sentence, evidence=(evidence,))


def replay_finding(records: Sequence[RunRecord], found: Effects, part: Slice) -> Finding | None:
    """Compare each strategy with a replay of its sizes from another seed.

    The replay grows as the strategy did and does not react: what remains between the two is the reaction.

    Returns:
        The finding, None if no strategy and its replay have two seeds in common.
    """
    sources = [name.removeprefix(_PREFIX) for name, group in groups_of(records).items() if group == REPLAY]
    differences = {}
    for source in sources:
        own, replayed = (seed_means(found, part.cells, name) for name in (source, _PREFIX + source))
        differences[source] = [own[seed] - replayed[seed] for seed in sorted(own.keys() & replayed.keys())]
    compared = sorted(compare_all(differences), key=lambda one: (one.mean, one.strategy))
    if not compared:
        return None
    better, worse = ([one for one in compared if one.is_shown and sign * one.mean < 0] for sign in (1, -1))
    parts = [
        f"{listed([_with_figures(one) for one in some])} {'ends' if len(some) == 1 else 'end'} {where} than a replay "
        "of the same sizes"
        for some, where in ((better, "lower"), (worse, "higher"))
        if some
    ]
    undecided = [one.strategy for one in compared if not one.is_shown]
    if undecided:
        parts.append(f"{listed(undecided)} cannot be told apart from a replay of the same sizes")
    return Finding(
        topic="reacting",
        sentence=f"Reacting to training, or only growing? On {part}, {'; '.join(parts)}.",
        evidence=tuple(
            Evidence(what=f"{one.strategy} against {_PREFIX}{one.strategy}, {part}", measure=LOSS, compared=one)
            for one in compared
        ),
    )


def _with_figures(one: Compared) -> str:
    interval = LOSS.interval(one.low, one.high)
    return f"{one.strategy} ({LOSS.text(one.mean)}, {interval}, {p_text(one.p_corrected)})"


def count_finding(tests: Mapping[CellKey, Verdicts], adaptive: frozenset[str], *, topic: str) -> Finding:
    """Count how often an adaptive strategy was better, worse, or neither, over all data sets and models."""
    num_all, num_better, num_worse = (
        sum(one.strategy in adaptive for test in tests.values() for one in kind(test))
        for kind in (lambda test: test.compared, Verdicts.better, Verdicts.worse)
    )
    undecided = num_all - num_better - num_worse
    measure = next(iter(tests.values())).measure
    return Finding(
        topic=topic,
        sentence=f"Of {counted(num_all, 'comparison')} of one adaptive strategy with {BASELINE} on one data set and "
        f"model by the {measure.title}, {num_better} came out better, {num_worse} worse and {undecided} "
        "undecided, each corrected for the other strategies on the same data set and model.",
    )


def no_better_finding(tests: Mapping[CellKey, Verdicts], adaptive: frozenset[str]) -> Finding:
    """Name the data sets and models on which no adaptive strategy is shown to be better than the baseline."""
    without = {cell: test for cell, test in tests.items() if not any(one.strategy in adaptive for one in test.better())}
    if not without:
        sentence = f"On every data set and model at least one adaptive strategy is shown to be better than {BASELINE}."
        return Finding(topic="no better", sentence=sentence, evidence=_firsts(tests, adaptive))
    sentence = (
        f"Adapting the batch size is not shown to lower the validation loss on {len(without)} of "
        f"{counted(len(tests), 'pair')} of data set and model: {listed(list(map(str, without)))}."
    )
    hurt = [str(cell) for cell, test in without.items() if _all_worse(test, adaptive)]
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
        first = next((one for one in test.compared if one.strategy in adaptive), None)
        if first is not None:
            what = f"{first.strategy} against {BASELINE}, the best adaptive strategy on {cell}"
            found.append(Evidence(what=what, measure=test.measure, compared=first))
    return tuple(found)
