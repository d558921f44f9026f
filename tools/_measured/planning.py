"""Planning: how long a plan takes beside its peers, and what its batches waste."""

from __future__ import annotations

from statistics import median

from .reading import Record, StaleResult, read
from .tables import named, number, percent, raw, short, table

DISTRIBUTIONS = ("short", "chat", "audio")
ARMS = {
    "numpy-sort": "NumPy sort + greedy",
    "hf": "transformers, group by length, safe fixed size",
    "speechbrain": "SpeechBrain, 60 buckets",
    "lhotse": "Lhotse, 30 buckets",
    "trl-bfd": "TRL packing, one call",
    "window-sort": "**`WindowSort()`**",
    "buckets-64": "**`Buckets(64)`**",
    "packed": "**`Packed(budget)`**, numba",
    "packed-plain": "`Packed(budget)` without numba",
}
HARD = {
    "pairs": "two axes, pairs of short texts",
    "pairs-audio": "two axes, audio and target",
    "ones": "batches of one example",
    "few": "batches of 1 to 35",
    "pairs-ones": "two axes, batches of one",
}
HARD_ARMS = {
    "window-sort": "`WindowSort()`",
    "buckets-64": "`Buckets(64)`",
    "sorted": "`Sorted()`",
    "in-order": "`InOrder()`",
}


def render() -> str:
    """Return the section."""
    results = read("planning.json")
    constant = {row["arm"]: row for row in results.rows(distribution="constant")}
    if not {"random", "window-sort"} <= constant.keys():
        raise StaleResult("planning.json: the control 'constant' lacks random or window-sort; run planning.py again")
    fixed, ours = constant["random"], constant["window-sort"]
    return f"""\
## Planning

A million lengths, three distributions (short texts / chat / audio), every arm in one run on two cores
({results["cpu"]}).
Times are divided by that of `np.argsort` on the same lengths, medians of {results["repeats"]} turns in which all
arms plan
one after the other. `make bench`; raw: {raw("planning.json")}.

{_peers(results)}

Slow peers had 20,000 to 100,000 lengths, and their time is per example. transformers has no token budget; it runs at
the
largest fixed size that never exceeds it, so it has more batches.

**Where we do not win.** All lengths equal: padding is 0 for every arm, and a fixed size plans a
million of them in {_ms(fixed)} ms, `WindowSort()` in {_ms(ours)} ms. Two axes and very small batches take longer
({raw("planning_two_axes.json")} is a later run of `Buckets`, which chooses at most 64 shapes in all, rows included):

{_hard(results)}

Planning 100,000 lengths through the names of dynabatch ({raw("dynabatch_planning.json")},
`python benchmarks/dynabatch_planning.py`): {_dynabatch("batchwright")} s, dynabatch itself {_dynabatch("dynabatch")} s.
"""


def _peers(results: Record) -> str:
    rows = []
    for arm, name in ARMS.items():
        found = [results.row(arm=arm, distribution=distribution) for distribution in DISTRIBUTIONS]
        rows.append([
            name,
            " / ".join(short(row["argsort_ratio"]) for row in found),
            " / ".join(percent(row["padding"], 2) for row in found),
            " / ".join(percent(row["straggler_waste"]) for row in found),
            " / ".join(number(row["largest"], 2) for row in found),
        ])  # fmt: skip
    return table(["", "time ÷ argsort", "padding", "8 ranks wait", "largest batch ÷ budget"], rows)


def _hard(results: Record) -> str:
    later = read("planning_two_axes.json")
    rows = []
    for distribution, name in HARD.items():
        cells = []
        for arm in HARD_ARMS:
            found = later if arm == "buckets-64" else results
            cells.append(short(found.row(arm=arm, distribution=distribution)["argsort_ratio"]))
        rows.append([name, *cells])
    return table(["time ÷ argsort", *(named(HARD_ARMS, arm) for arm in HARD_ARMS)], rows)


def _ms(row: Record) -> str:
    return short(1000 * row["plan_seconds"])


def _dynabatch(arm: str) -> str:
    return short(median(read("dynabatch_planning.json").row(arm=arm)["wall_seconds"]))
