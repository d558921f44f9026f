"""Runs that failed or diverged: which strategies and cells cannot be compared because of them, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from .._records import CellKey, RunRecord, cell_of, diverged, finished
from ..strategies.strategy import BASELINE

Place: TypeAlias = tuple[CellKey, str]
_MOST_NAMED = 6


@final
@dataclass(frozen=True, kw_only=True)
class Dropout:
    """How many runs of a strategy in a cell did not end well.

    Args:
        num_runs: its runs.
        num_diverged: those whose loss was no number at the end.
        num_failed: those that ended with an error.
    """

    num_runs: int
    num_diverged: int
    num_failed: int

    def __str__(self) -> str:
        words = [word for word, count in (("failed", self.num_failed), ("diverged", self.num_diverged)) if count]
        return f"{self.num_diverged + self.num_failed} of {self.num_runs} runs {' or '.join(words)}"


def partner_of(record: RunRecord) -> tuple[object, ...]:
    """Return what two runs must have in common to be compared."""
    return (*cell_of(record), record["seed"], (record.get("settings") or {}).get("num_examples"))


def dropouts(records: Iterable[RunRecord]) -> dict[Place, Dropout]:
    """Return the strategies, by cell, with a run that failed or diverged where the baseline ended well.

    What is left of such a strategy are the seeds that went well: compared by those, it would win by its failures.

    >>> def run(strategy, seed, loss):
    ...     place = {"dataset": "wine", "model": "mlp", "strategy": strategy, "seed": seed, "status": "ok"}
    ...     return place | {"final": {"validation_loss": loss}}
    >>> runs = [run("constant", 0, 0.5), run("constant", 1, 0.5), run("linear", 0, 0.4), run("linear", 1, None)]
    >>> {name: str(found) for (_, name), found in dropouts(runs).items()}
    {'linear': '1 of 2 runs diverged'}
    """
    runs = list(records)
    ended = {partner_of(run) for run in finished(runs) if run["strategy"] == BASELINE}
    places = {
        (cell_of(run), run["strategy"])
        for run in runs
        if run["strategy"] != BASELINE and not _is_finished(run) and partner_of(run) in ended
    }
    return _counted(runs, places)


def lost_cells(records: Iterable[RunRecord]) -> dict[CellKey, Dropout]:
    """Return the cells in which the baseline failed or diverged so often that nothing can be compared with it."""
    runs = [run for run in records if run["strategy"] == BASELINE]
    found = _counted(runs, {(cell_of(run), BASELINE) for run in runs if not _is_finished(run)})
    return {cell: one for (cell, _), one in found.items() if one.num_runs - one.num_diverged - one.num_failed < 2}


def dropout_text(records: Sequence[RunRecord]) -> str:
    """Say which strategies and cells are not compared because runs failed or diverged; empty if there are none."""
    lost = lost_cells(records)
    base = [run for run in records if run["strategy"] == BASELINE]
    partly = _counted(base, {(cell_of(run), BASELINE) for run in base if not _is_finished(run)})
    kept = {cell: one for (cell, _), one in partly.items() if cell not in lost}
    found = {place: one for place, one in dropouts(records).items() if place[0] not in lost}
    parts = []
    if lost:
        parts.append(f"Left out because {BASELINE}, the baseline, has no two runs that ended well: {_named(lost)}.")
    if kept:
        parts.append(f"Of {BASELINE} itself, {_named(kept)}; those seeds are left out.")
    if found:
        names = {f"{name} on {cell}": one for (cell, name), one in sorted(found.items())}
        parts.append(f"Not compared, since a strategy whose runs go wrong does not win by the others: {_named(names)}.")
    return " ".join(parts)


def _named(found: Mapping[CellKey, Dropout] | Mapping[str, Dropout]) -> str:
    texts = [f"{one} ({dropout})" for one, dropout in found.items()]
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + more


def _counted(runs: Iterable[RunRecord], places: set[Place]) -> dict[Place, Dropout]:
    by_place: dict[Place, list[RunRecord]] = {}
    for run in runs:
        if (place := (cell_of(run), run["strategy"])) in places:
            by_place.setdefault(place, []).append(run)
    return {
        place: Dropout(
            num_runs=len(some),
            num_diverged=sum(map(diverged, some)),
            num_failed=sum(run["status"] != "ok" for run in some),
        )
        for place, some in by_place.items()
    }


def _is_finished(run: RunRecord) -> bool:
    return run["status"] == "ok" and not diverged(run)
