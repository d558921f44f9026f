"""Observe a lab: all findings in order, from what was run to what the numbers cannot say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from .._records import CellKey, RunRecord, diverged, finished, newest_records
from ..strategies.strategy import BASELINE
from ._effects import (
    CONVERGENCE,
    LOSS,
    METRIC,
    SECONDS,
    UPDATES,
    Effects,
    Measure,
    counted,
    effects,
    listed,
    p_text,
    paired,
    seed_means,
)
from ._ranking import Verdicts, best_finding, cell_tests, fixed_clause, rank
from ._slices import REPLAY, Halves, Slice, adaptive_of, by_halves, by_kind, by_model, fixed_of, groups_of, overall
from .evidence import Compared, Evidence, Finding, compare_all

# A loss that is at most this much higher counts as equally good.
MARGIN = 0.05
# With fewer seeds, intervals are so wide that only the largest effects show.
FEW_SEEDS = 5
_PREFIX = "replay_"
_TESTS = (
    "Each interval has a confidence of 95 %. p-values are corrected by Holm over all strategies of one question on one "
    "part of the data, but not over all questions of the page, so read the smallest first. The best strategy and those "
    "that tie with it include the truly best one in 95 of 100 cases."
)


def observe(records: Iterable[RunRecord]) -> list[Finding]:
    """Say what runs show: which strategy is best, on which data, at what cost, and where none is better.

    Strategies are compared with the strategy ``constant`` in pairs of runs with the same data set, model and seed, by
    the quotient of their final validation losses, which can be averaged over data sets. Tests are paired t tests over
    seeds, corrected by Holm over all strategies of the same question. Strategies that cannot be told apart are a tie.

    Args:
        records: runs as in ``runs.jsonl``.

    Returns:
        The findings, the most general first.

    >>> def run(strategy, seed, loss):
    ...     place = {"dataset": "wine", "model": "mlp", "strategy": strategy, "seed": seed, "status": "ok"}
    ...     return place | {"final": {"validation_loss": loss}}
    >>> runs = [run("constant", seed, 0.5 + seed / 100) for seed in range(5)]
    >>> runs += [run("linear", seed, 0.4 + seed / 99) for seed in range(5)]
    >>> print(observe(runs)[1].sentence.partition(" against")[0])
    On the data set wine (1 model), linear has the lowest final validation loss: −19 % (−20 to −18 %, p < 0.001)
    """
    runs = newest_records(records)
    first = scope(runs)
    losses = effects(runs, LOSS)
    if not any(len(changes) > 1 for changes in losses.values()):
        return [first, nothing_to_conclude(runs, losses), *failures(runs)]
    return [first, *_general(runs, losses), *_by_property(runs, losses), *_single(runs, losses), *limits(runs)]


def _general(runs: Sequence[RunRecord], losses: Effects) -> list[Finding]:
    whole = overall(runs)
    found = [
        _best(runs, whole, losses, LOSS),
        _best(runs, whole, effects(runs, CONVERGENCE), CONVERGENCE, topic="convergence"),
        cost_finding(runs, whole),
        replay_finding(runs, losses, whole),
    ]
    return [one for one in found if one is not None]


def _by_property(runs: Sequence[RunRecord], losses: Effects) -> list[Finding]:
    """Say what is best by type, dimensionality, size, noise and model; runs in two slices are judged once."""
    halves = by_halves(runs)
    contrasts = {half.topic: contrast_finding(losses, half) for half in halves}
    slices = [*by_kind(runs), *(part for half in halves for part in (half.low, half.high)), *by_model(runs)]
    seen: dict[tuple[object, ...], Slice] = {overall(runs).cells: overall(runs)}
    last_labels = {part.topic: part.label for part in slices}
    found: list[Finding | None] = []
    for part in slices:
        twin = seen.setdefault(part.cells, part)
        found.append(_best(runs, part, losses, LOSS) if twin is part else _same(part, twin))
        if part.label == last_labels[part.topic]:
            found.append(contrasts.get(part.topic))
    return [one for one in found if one is not None]


def _single(runs: Sequence[RunRecord], losses: Effects) -> list[Finding]:
    tests = cell_tests(losses, LOSS)
    adaptive = adaptive_of(runs)
    metrics = cell_tests(effects(runs, METRIC), METRIC)
    if not any(one.strategy in adaptive for test in tests.values() for one in test.compared):
        return []
    found = [no_better_finding(tests, adaptive), count_finding(tests, adaptive, topic="no better")]
    return [*found, *([count_finding(metrics, adaptive, topic="quality")] if metrics else [])]


def _best(
    runs: Sequence[RunRecord], part: Slice, found: Effects, measure: Measure, *, topic: str | None = None
) -> Finding | None:
    ranking = rank(found, part, measure)
    return None if ranking is None else best_finding(ranking, fixed_of(runs), topic=topic or part.topic)


def _same(part: Slice, twin: Slice) -> Finding:
    what = "the whole lab" if twin.topic == "overall" else f"the same runs as {twin.label}"
    text = str(part)
    return Finding(topic=part.topic, sentence=f"{text[0].upper()}{text[1:]}: {what}; see there.")


def scope(runs: Sequence[RunRecord]) -> Finding:
    """Say how much was run."""
    kinds = (("dataset", "data set"), ("model", "model"), ("strategy", "strategy"), ("seed", "seed"))
    datasets, models, strategies, seeds = (counted(len({run[key] for run in runs}), what) for key, what in kinds)
    ended = sum(1 for _ in finished(runs))
    return Finding(
        topic="scope",
        sentence=f"{counted(len(runs), 'run')}, of which {ended:,} ended well: {datasets}, {models} and {strategies}, "
        f"with {seeds}. Every strategy is compared with {BASELINE} on the same data set, model and seed.",
    )


def cost_finding(records: Sequence[RunRecord], part: Slice) -> Finding | None:
    """Name the strategies that need fewer updates and are shown to end within 5 % of the baseline's loss.

    "Shown" is a test of its own, that the loss is less than 5 % higher: a difference that was not found does not prove
    that there is none. None if no two seeds can be compared.
    """
    losses, updates, seconds = (seed_means(effects(records, one), part.cells) for one in (LOSS, UPDATES, SECONDS))
    # Tested against a loss that is higher by the margin.
    limit, margin = math.log1p(MARGIN), f"{100 * MARGIN:.0f} %"
    shifted = compare_all({name: {seed: x - limit for seed, x in changes.items()} for name, changes in losses.items()})
    if not shifted:
        return None
    as_good, fewer = (
        {one.strategy: one for one in tests if one.is_shown and one.mean < 0}
        for tests in (shifted, compare_all(updates))
    )
    saving = sorted(as_good.keys() & fewer.keys(), key=lambda name: (fewer[name].mean, name))
    if not saving:
        return Finding(
            topic="cost",
            sentence=f"Of {counted(len(shifted), 'strategy')} none is shown to need fewer updates than {BASELINE} and "
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
    interval = SECONDS.interval(test.low, test.high)
    return f"; its seconds are not shown to differ ({SECONDS.text(test.mean)}, {interval})"


def _brief(measure: Measure, one: Compared) -> str:
    interval = "" if math.isclose(one.low, one.high) else f" ({measure.interval(one.low, one.high)})"
    return measure.text(one.mean) + interval


def contrast_finding(found: Effects, halves: Halves) -> Finding | None:
    """Say whether the effect of any strategy differs between two halves of the data sets.

    Tested is the change on the upper half minus the change on the lower half, seed by seed, for every strategy; all
    are corrected together. None if no two seeds have both halves.
    """
    low, high = (seed_means(found, part.cells) for part in (halves.low, halves.high))
    differences = {name: paired(changes, low.get(name, {})) for name, changes in high.items()}
    compared = sorted(compare_all(differences), key=lambda one: (one.p_corrected, -abs(one.mean), one.strategy))
    if not compared:
        return None
    first, low_label, high_label = compared[0], halves.low.label, halves.high.label
    name, p = first.strategy, p_text(first.p_corrected)
    if first.is_shown:
        low_text, high_text = (LOSS.text(fmean(side[name][seed] for seed in differences[name])) for side in (low, high))
        num_shown = sum(one.is_shown for one in compared)
        sentence = (
            f"The effect of {name} on the validation loss depends on the {halves.topic} of the data: "
            f"{low_text} on {halves.low}, {high_text} on {halves.high}; {p}. "
            f"Such a difference is shown for {num_shown} of {counted(len(compared), 'strategy')}."
        )
    else:
        sentence = (
            f"No strategy's effect is shown to depend on the {halves.topic} of the data: among "
            f"{counted(len(compared), 'strategy')} the clearest difference between {low_label} and {high_label}, "
            f"for {name}, could be chance ({p})."
        )
    what = f"{name}: its change on {high_label} minus its change on {low_label}"
    evidence = Evidence(what=what, measure=LOSS, compared=first)
    return Finding(topic=halves.topic, sentence=sentence, evidence=(evidence,))


def replay_finding(records: Sequence[RunRecord], found: Effects, part: Slice) -> Finding | None:
    """Compare each strategy with a replay of its sizes from another seed; None if no two seeds have both.

    The replay grows as the strategy did and does not react: what remains between the two is the reaction.
    """
    means = seed_means(found, part.cells)
    replays = [name for name, group in groups_of(records).items() if group == REPLAY]
    sources = {name.removeprefix(_PREFIX): means.get(name, {}) for name in replays}
    differences = {source: paired(means.get(source, {}), replayed) for source, replayed in sources.items()}
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


def nothing_to_conclude(runs: Sequence[RunRecord], losses: Effects) -> Finding:
    """Say why no strategy can be called better: no baseline, nothing besides it, no pairs, or a single seed."""
    done = list(finished(runs))
    if not any(run["strategy"] == BASELINE for run in done):
        reason = f"no run of the baseline {BASELINE} has ended well, so there is nothing to compare with"
    elif all(run["strategy"] == BASELINE for run in done):
        reason = f"only {BASELINE} has runs that ended well, so there is nothing to compare it with"
    elif not losses:
        reason = (
            f"no run makes a pair with one of {BASELINE}; a pair needs the same data set, model, seed and number of "
            "examples, and losses above 0"
        )
    else:
        reason = "every comparison has only one seed, and one pair of runs cannot tell a difference from chance"
    return Finding(
        topic="overall",
        sentence=f"Nothing can be concluded: {reason}. Run the lab with {FEW_SEEDS} seeds or more.",
    )


def limits(runs: Sequence[RunRecord]) -> list[Finding]:
    """Say what the numbers cannot: failed runs, few seeds, properties that vary together, many tests."""
    parts = [_seeds(runs), _together(runs), _TESTS]
    return [*failures(runs), *(Finding(topic="limits", sentence=sentence) for sentence in parts if sentence)]


def failures(runs: Sequence[RunRecord]) -> list[Finding]:
    """Say how many runs failed or diverged, and what that means for the comparisons; empty if none did."""
    bad = Counter(run["strategy"] for run in runs if run["status"] != "ok" or diverged(run))
    if not bad:
        return []
    names = [f"{name} ({count})" for name, count in bad.most_common()]
    sentence = (
        f"{counted(sum(bad.values()), 'run')} failed or diverged: {listed(names)}. Their seeds are left out of the "
        "comparisons, which flatters a strategy that often fails."
    )
    return [Finding(topic="limits", sentence=sentence)]


def _seeds(runs: Sequence[RunRecord]) -> str:
    num_seeds = len({run["seed"] for run in finished(runs)})
    if not 1 < num_seeds < FEW_SEEDS:
        return ""
    return f"With {num_seeds} seeds the intervals are wide: a tie may hide a difference that more seeds would show."


def _together(runs: Sequence[RunRecord]) -> str:
    if not by_kind(runs) and not by_halves(runs):
        return ""
    num = len({run["dataset"] for run in runs})
    return (
        f"Type, dimensionality, size and noise vary together over {counted(num, 'data set')}: which of them explains a "
        "difference cannot be told. Averages are over exactly these data sets; intervals are about new seeds, not new "
        "data."
    )
