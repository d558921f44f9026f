"""Sentences about what was run, and about what the numbers cannot say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ._observe_effects import Effects
from ._observe_record import Observation
from ._observe_slices import by_halves, by_kind, cells_of
from ._observe_words import counted, listed
from ._report_records import BASELINE, Record, diverged, finished

# Below this many seeds an interval is too wide to find any but the largest effects.
FEW_SEEDS = 5


def scope(runs: Sequence[Record]) -> Observation:
    """Say how much was run."""
    names = {key: sorted({str(run[key]) for run in runs}) for key in ("dataset", "model", "strategy")}
    seeds = sorted({run["seed"] for run in runs})
    counts = (("data set", names["dataset"]), ("model", names["model"]), ("strategy", names["strategy"]))
    parts = [counted(len(values), what) for what, values in counts]
    ended = sum(1 for _ in finished(runs))
    return Observation(
        topic="scope",
        sentence=f"{counted(len(runs), 'run')}, of which {ended:,} ended well: {parts[0]}, {parts[1]} and {parts[2]}, "
        f"with {counted(len(seeds), 'seed')}. Every strategy is compared with {BASELINE} on the same data set, model "
        "and seed.",
    )


def nothing_to_conclude(runs: Sequence[Record], losses: Effects) -> Observation:
    """Say why no strategy can be called better: no baseline, nothing else, no pairs, or a single seed."""
    done = list(finished(runs))
    if not any(run["strategy"] == BASELINE for run in done):
        reason = f"no run of the baseline {BASELINE} has ended well, so there is nothing to compare with"
    elif all(run["strategy"] == BASELINE for run in done):
        reason = f"only {BASELINE} has runs that ended well, so there is nothing to compare it with"
    elif not losses:
        reason = (
            f"no run makes a pair with one of {BASELINE}, which takes the same data set, model, seed and number of "
            "examples, and losses above 0"
        )
    else:
        reason = "every comparison has one seed, and one pair of runs has no spread to tell a difference from chance"
    return Observation(
        topic="overall",
        sentence=f"Nothing can be concluded: {reason}. Run the lab with {FEW_SEEDS} seeds or more.",
    )


def limits(runs: Sequence[Record]) -> list[Observation]:
    """Say what the numbers cannot: failed runs, few seeds, properties that vary together, many tests."""
    parts = [_seeds(runs), _together(runs), _tests()]
    return [*failures(runs), *(Observation(topic="limits", sentence=sentence) for sentence in parts if sentence)]


def failures(runs: Sequence[Record]) -> list[Observation]:
    """Say how many runs failed or diverged, and what that does to the comparisons; empty where all ended well."""
    bad = Counter(run["strategy"] for run in runs if run["status"] != "ok" or diverged(run))
    if not bad:
        return []
    names = [f"{name} ({count})" for name, count in bad.most_common()]
    sentence = (
        f"{counted(sum(bad.values()), 'run')} failed or diverged: {listed(names)}. Their seeds are left out of the "
        "comparisons, which flatters a strategy that often fails."
    )
    return [Observation(topic="limits", sentence=sentence)]


def _seeds(runs: Sequence[Record]) -> str:
    num_seeds = len({run["seed"] for run in finished(runs)})
    if not 1 < num_seeds < FEW_SEEDS:
        return ""
    return f"With {num_seeds} seeds the intervals are wide: a tie may hide a difference that more seeds would show."


def _together(runs: Sequence[Record]) -> str:
    if not by_kind(runs) and not by_halves(runs):
        return ""
    num = len({cell.dataset for cell in cells_of(runs)})
    return (
        f"Type, dimensionality, size and noise vary together over {counted(num, 'data set')}: which of them is behind "
        "a difference cannot be told. Averages are over these data sets as they are; intervals speak of new seeds, "
        "not of new data."
    )


def _tests() -> str:
    return (
        "Intervals are 95 % each. p values are corrected by Holm over all strategies of one question, on one part of "
        "the data; over all questions of the page together they are not, so read the smallest first. The "
        "best strategy and those that tie with it hold the truly best one in 95 of 100 cases."
    )
