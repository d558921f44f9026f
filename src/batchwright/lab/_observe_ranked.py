"""Sentences about which strategy is best on a part of a lab."""

from __future__ import annotations

from ._observe_best import Compared, Ranking
from ._observe_groups import fixed_clause
from ._observe_record import Evidence, Observation
from ._observe_words import change_text, counted, interval_text, listed, p_text
from ._report_records import BASELINE


def best_observation(ranking: Ranking, fixed: frozenset[str]) -> Observation:
    """Say which strategy is best on a slice, which ones tie with it, or that none is better than the baseline.

    Args:
        ranking: of the slice.
        fixed: strategies whose batch size never changes.
    """
    better = [one.strategy for one in ranking.better()]
    sentence = _winner(ranking, fixed) if better else _no_winner(ranking)
    leaders = (better[0], *(name for name in ranking.ties if name != better[0])) if better else ()
    if ranking.left_out:
        sentence += f" Without a place, since not run on all of it: {listed(ranking.left_out)}."
    return Observation(
        topic=ranking.slice.topic,
        sentence=sentence,
        evidence=tuple(_evidence(ranking)),
        strategies=leaders,
    )


def _winner(ranking: Ranking, fixed: frozenset[str]) -> str:
    first = ranking.first
    if not first.is_shown:
        return _second_winner(ranking, fixed)
    sentence = (
        f"On {ranking.slice}, {first.strategy} has the lowest {ranking.measure.title}: {_figures(ranking, first)} "
        f"against {BASELINE}"
    )
    if not ranking.ties:
        ahead = "" if len(ranking.compared) == 1 else f", and ahead of all {len(ranking.compared) - 1} others"
        sentence += f"{ahead}."
    else:
        sentence += (
            f". It is a tie: {listed(ranking.ties)} cannot be told apart from it with "
            f"{counted(first.num_pairs, 'seed')}."
        )
    return sentence + _elsewhere(ranking) + fixed_clause(first.strategy, fixed)


def _second_winner(ranking: Ranking, fixed: frozenset[str]) -> str:
    """Name the best strategy that is shown to be better, where another has the best mean and is not."""
    best, first = ranking.better()[0], ranking.first
    return (
        f"On {ranking.slice}, {best.strategy} is shown to be better than {BASELINE} by the {ranking.measure.title}: "
        f"{_figures(ranking, best)}. The mean of {first.strategy} is lower still, but could be chance: "
        f"{_figures(ranking, first)}.{fixed_clause(best.strategy, fixed)}"
    )


def _elsewhere(ranking: Ranking) -> str:
    """Name the cells where the mean of the best strategy is on the wrong side: an average must not hide them."""
    if not ranking.against:
        return ""
    return f" Not everywhere: its mean is worse than that of {BASELINE} on {listed(list(map(str, ranking.against)))}."


def _no_winner(ranking: Ranking) -> str:
    worse, num_all, first = ranking.worse(), len(ranking.compared), ranking.first
    place = f"On {ranking.slice}, "
    if len(worse) == num_all:
        which = f"the only strategy, {first.strategy}, is" if num_all == 1 else f"all {num_all} strategies are"
        return (
            f"{place}{which} worse than {BASELINE} by the {ranking.measure.title}; nearest comes {first.strategy} "
            f"with {_figures(ranking, first)}."
        )
    sentence = f"{place}no strategy is shown to be better than {BASELINE} by the {ranking.measure.title}: "
    if ranking.measure.gain(first.mean) > 0:
        sentence += f"the best mean, {_figures(ranking, first)} of {first.strategy}, could be chance."
    else:
        sentence += f"even the best mean, {_figures(ranking, first)} of {first.strategy}, is no gain."
    if worse:
        sentence += f" Shown to be worse: {listed([one.strategy for one in worse])}."
    return sentence


def _figures(ranking: Ranking, one: Compared) -> str:
    return (
        f"{change_text(ranking.measure, one.mean)} ({interval_text(ranking.measure, one.low, one.high)}, "
        f"{p_text(one.p_corrected)})"
    )


def _evidence(ranking: Ranking) -> list[Evidence]:
    """Return the tests of the strategies that the sentence names, and the nearest one that is told apart."""
    better = ranking.better()
    named = {ranking.first.strategy, *(one.strategy for one in better[:1] or ranking.worse())}
    named |= set(ranking.ties if better and ranking.first.is_shown else ())
    where = str(ranking.slice)
    found = [
        Evidence(what=f"{one.strategy} against {BASELINE}, {where}", measure=ranking.measure, compared=one)
        for one in ranking.compared
        if one.strategy in named
    ]
    if ranking.closest is not None and better and ranking.first.is_shown:
        what = f"{ranking.first.strategy} against {ranking.closest.strategy}, {where}"
        found.append(Evidence(what=what, measure=ranking.measure, compared=ranking.closest))
    return found
