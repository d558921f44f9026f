"""Observe a lab: all findings in order, from what was run to what the numbers cannot say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import TypeAlias

from .._records import RunRecord, cell_of, diverged, finished, newest_records
from ..strategies.strategy import BASELINE
from ._dropouts import dropout_text, lost_cells
from ._effects import (
    CONVERGENCE,
    LOSS,
    METRIC,
    Effects,
    counted,
    effects,
    listed,
    of_strategies,
    p_text,
    paired,
    seed_means,
)
from ._equal import EQUAL_EXAMPLES
from ._headline import Family, cost_finding, family_of, headline
from ._ranking import best_finding, cell_tests, count_finding, no_better_finding, rank, testable
from ._slices import REPLAY, Halves, Slice, adaptive_of, by_halves, by_kind, by_model, fixed_of, groups_of, overall
from ._tuning import tuning_findings
from .evidence import Compared, Evidence, Finding, compare_all, compare_family

SeedMeans: TypeAlias = Mapping[str, Mapping[int, float]]
_PREFIX = "replay_"

# With fewer seeds, intervals are so wide that only the largest effects show.
FEW_SEEDS = 5
# Two properties that agree on more than this share of the data sets cannot be told apart.
_ALIKE = 0.75
_READ = (
    "After equal updates or seconds the longer run is read where the shorter one ended, along straight lines between "
    "its validations (logarithms of both): a run that is read before its end has not had the rest of its schedule. "
    "How wrong such a reading may be is measured by leaving out the validations beside it: intervals are wider by that "
    "much, and only a change that is larger counts as shown."
)
_TESTS = (
    "Each interval has a confidence of 95 % by itself; changes are pooled within pairs of data set and model. p-values "
    "are corrected by Holm in families: all strategies on all bases of the headline; the way there; all parts of the "
    "data; all contrasts; each matrix. In each family at most 5 of 100 labs without any effect show one, so read the "
    "headline first. The best strategy and those that tie with it include the truly best one in 95 of 100 cases."
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
    >>> print(observe(runs)[1].sentence.partition(": ")[2])
    linear, −19 % (−20 to −18 %, n = 5, p < 0.001).
    """
    runs = newest_records(records)
    first = scope(runs)
    losses = effects(runs, LOSS)
    if not any(len(changes) > 1 for changes in losses.values()):
        return [first, nothing_to_conclude(runs, losses), *tuning_findings(runs), *failures(runs)]
    lost = lost_cells(runs)
    kept = [run for run in runs if cell_of(run) not in lost]
    whole = overall(runs)
    family = family_of(runs, whole)
    return [
        first,
        *headline(runs, whole, family),
        *_general(runs, whole, family),
        *_by_property(kept, losses),
        *_single(kept, losses),
        *tuning_findings(runs),
        *limits(runs),
    ]


def _general(runs: Sequence[RunRecord], whole: Slice, family: Family) -> list[Finding]:
    losses = family.found[LOSS.name]
    ranking = rank(losses, whole, LOSS, compared=family.on(EQUAL_EXAMPLES).compared)
    found = [
        None if ranking is None else best_finding(ranking, fixed_of(runs), topic="overall"),
        _on_the_way(runs, whole),
        cost_finding(runs, whole),
        replay_finding(runs, losses, whole),
    ]
    return [one for one in found if one is not None]


def _on_the_way(runs: Sequence[RunRecord], whole: Slice) -> Finding | None:
    ranking = rank(effects(runs, CONVERGENCE), whole, CONVERGENCE)
    return None if ranking is None else best_finding(ranking, fixed_of(runs), topic="convergence")


def _by_property(runs: Sequence[RunRecord], losses: Effects) -> list[Finding]:
    """Say what is best by type, dimensionality, size, noise and model; runs in two slices are judged once."""
    halves = by_halves(runs)
    contrasts = contrast_findings(losses, halves)
    slices = [*by_kind(runs), *(part for half in halves for part in (half.low, half.high)), *by_model(runs)]
    seen: dict[tuple[object, ...], Slice] = {overall(runs).cells: overall(runs)}
    twins = [seen.setdefault(part.cells, part) for part in slices]
    tests = _tests_of([part for part, twin in zip(slices, twins, strict=True) if part is twin], losses)
    last_labels = {part.topic: part.label for part in slices}
    found: list[Finding | None] = []
    for part, twin in zip(slices, twins, strict=True):
        found.append(_best(runs, part, losses, tests[part]) if twin is part else _same(part, twin))
        if part.label == last_labels[part.topic]:
            found.append(contrasts.get(part.topic))
    return [one for one in found if one is not None]


def _tests_of(parts: Sequence[Slice], losses: Effects) -> dict[Slice, list[Compared]]:
    """Test every strategy on every part; all parts and strategies are one family."""
    values = {(part, name): cells for part in parts for name, cells in testable(losses, part.cells).items()}
    found: dict[Slice, list[Compared]] = {part: [] for part in parts}
    for (part, _), one in compare_family(values).items():
        found[part].append(one)
    return found


def _best(runs: Sequence[RunRecord], part: Slice, losses: Effects, tests: Sequence[Compared]) -> Finding | None:
    ranking = rank(losses, part, LOSS, compared=tests)
    return None if ranking is None else best_finding(ranking, fixed_of(runs), topic=part.topic)


def _single(runs: Sequence[RunRecord], losses: Effects) -> list[Finding]:
    tests = cell_tests(losses, LOSS)
    adaptive = adaptive_of(runs)
    metrics = cell_tests(effects(runs, METRIC), METRIC)
    if not any(one.strategy in adaptive for test in tests.values() for one in test.compared):
        return []
    found = [no_better_finding(tests, adaptive), count_finding(tests, adaptive, topic="no better")]
    return [*found, *([count_finding(metrics, adaptive, topic="quality")] if metrics else [])]


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


def nothing_to_conclude(runs: Sequence[RunRecord], losses: Effects) -> Finding:
    """Say why no strategy can be called better: no baseline, nothing besides it, no pairs, or a single seed."""
    done, gone = list(finished(runs)), dropout_text(runs)
    advice = f"Run the lab with {FEW_SEEDS} seeds or more."
    if gone:
        advice = f"{gone} Look at what failed in the report; --retry-failed repeats runs that failed."
    if not any(run["strategy"] == BASELINE for run in done):
        reason = f"no run of the baseline {BASELINE} has ended well, so there is nothing to compare with"
    elif all(run["strategy"] == BASELINE for run in done):
        reason = f"only {BASELINE} has runs that ended well, so there is nothing to compare it with"
    elif gone and not any(len(changes) > 1 for changes in losses.values()):
        reason = "runs failed or diverged, and no strategy has two pairs of runs left"
    elif not losses:
        reason = (
            f"no run makes a pair with one of {BASELINE}; a pair needs the same data set, model, seed and number of "
            "examples, and losses of 0 or more"
        )
    else:
        reason = "every comparison has only one seed, and one pair of runs cannot tell a difference from chance"
    return Finding(
        topic="overall",
        sentence=f"Nothing can be concluded: {reason}. {advice}",
    )


def limits(runs: Sequence[RunRecord]) -> list[Finding]:
    """Say what the numbers cannot: failed runs, few seeds, properties that vary together, many tests."""
    parts = [_seeds(runs), _together(runs), _READ, _TESTS]
    return [*failures(runs), *(Finding(topic="limits", sentence=sentence) for sentence in parts if sentence)]


def failures(runs: Sequence[RunRecord]) -> list[Finding]:
    """Say how many runs failed or diverged, and what that means for the comparisons; empty if none did."""
    bad = Counter(run["strategy"] for run in runs if run["status"] != "ok" or diverged(run))
    if not bad:
        return []
    names = [f"{name} ({count})" for name, count in bad.most_common()]
    sentence = (
        f"{counted(sum(bad.values()), 'run')} failed or diverged: {listed(names)}. A strategy with such a run is "
        f"not compared on that data set and model; where {BASELINE} itself has one, its seed is left out."
    )
    return [Finding(topic="limits", sentence=sentence)]


def _seeds(runs: Sequence[RunRecord]) -> str:
    num_seeds = len({run["seed"] for run in finished(runs)})
    if not 1 < num_seeds < FEW_SEEDS:
        return ""
    return f"With {num_seeds} seeds the intervals are wide: a tie may hide a difference that more seeds would show."


def _together(runs: Sequence[RunRecord]) -> str:
    """Name the properties that split the data sets almost alike, so that their effects cannot be told apart."""
    halves = by_halves(runs)
    if not by_kind(runs) and not halves:
        return ""
    alike = [
        f"{one.topic} and {other.topic}" for one, other in combinations(halves, 2) if _agreement(one, other) > _ALIKE
    ]
    about = "Averages are over exactly these data sets; intervals are about new seeds, not new data."
    if not alike:
        return f"No two of dimensionality, size and noise split the data sets alike. {about}"
    num = counted(len({run["dataset"] for run in runs}), "data set")
    return f"Over {num}, these vary together: {listed(alike)}; which of them explains a difference is unknown. {about}"


def _agreement(one: Halves, other: Halves) -> float:
    """Return the share of data sets in both splits that are on the same side of both, or on opposite sides."""
    highs, all_of = [set(half.high.datasets) for half in (one, other)], set(one.high.datasets + one.low.datasets)
    common = all_of & set(other.high.datasets + other.low.datasets)
    if not common:
        return 0.0
    same = sum((name in highs[0]) == (name in highs[1]) for name in common) / len(common)
    return max(same, 1 - same)
