"""How the learning rate of each strategy was chosen, as the records tell it: the budget, edges of grids, failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._records import CellKey, RunRecord, cell_of, number
from ._effects import counted, listed
from ._slices import REPLAY
from .evidence import Finding

TOPIC = "tuning"


def tuning_of(record: RunRecord) -> Mapping[str, Any] | None:
    """Return what a record says about its learning rate, None for records that do not."""
    found = record.get("tuning")
    return found if isinstance(found, Mapping) and "chosen" in found else None


def edge_rates(records: Iterable[RunRecord]) -> dict[tuple[CellKey, str], float]:
    """Return the chosen rate of each strategy whose best rate lay at the edge of its grid.

    >>> tuning = {"grid": [0.01, 0.1], "chosen": 0.1, "is_at_edge": True, "num_runs": 4}
    >>> run = {"dataset": "wine", "model": "mlp", "strategy": "linear", "tuning": tuning}
    >>> edge_rates([run])
    {(CellKey(dataset='wine', model='mlp'), 'linear'): 0.1}
    """
    return {
        (cell_of(run), run["strategy"]): rate
        for run in records
        if (tuning := tuning_of(run))
        and tuning.get("is_at_edge")
        and (rate := number(tuning.get("chosen"))) is not None
    }


def untuned(records: Iterable[RunRecord]) -> list[tuple[CellKey, str]]:
    """Return the strategies whose tuning failed: no rate of the grid was chosen."""
    found = {
        (cell_of(run), run["strategy"]): None
        for run in records
        if (tuning := tuning_of(run)) and number(tuning.get("chosen")) is None
    }
    return list(found)


def edge_note(rates: Mapping[tuple[CellKey, str], float], strategy: str) -> str:
    """Write the edges of one strategy, empty if it has none.

    >>> edge_note({(CellKey("wine", "mlp"), "linear"): 0.1}, "linear")
    'its best rate lay at the edge of the grid: 0.1 on wine · mlp'
    """
    mine = [f"{rate:g} on {cell}" for (cell, name), rate in rates.items() if name == strategy]
    return f"its best rate lay at the edge of the grid: {listed(mine, most=3)}" if mine else ""


def wall_note(records: Iterable[RunRecord], strategy: str) -> str:
    """Say where the best rate of a strategy lay beside rates that diverged, and how far apart rates were tried.

    >>> tuning = {"chosen": 0.1, "is_at_wall": True, "spacing": 1.78}
    >>> wall_note([{"dataset": "wine", "model": "mlp", "strategy": "linear", "tuning": tuning}], "linear")
    'its best rate lay beside one that diverged or doubled the loss, known to a factor of 1.8 on wine · mlp'
    """
    found = {
        cell_of(run): spacing
        for run in records
        if run["strategy"] == strategy
        and (tuning := tuning_of(run))
        and tuning.get("is_at_wall")
        and (spacing := number(tuning.get("spacing"))) is not None
    }
    places = [f"{spacing:.2g} on {cell}" for cell, spacing in sorted(found.items())]
    start = "its best rate lay beside one that diverged or doubled the loss, known to a factor of "
    return f"{start}{listed(places, most=3)}" if places else ""


def tuning_findings(runs: Sequence[RunRecord]) -> list[Finding]:
    """Say whether every strategy had the same budget for its rate, where the best lay at an edge, and what failed."""
    told = [run for run in runs if tuning_of(run)]
    sentences = [_missing(runs, told)]
    if told:
        sentences += [_budget(told), _edges(told), _failures(told)]
    return [Finding(topic=TOPIC, sentence=sentence) for sentence in sentences if sentence]


def _missing(runs: Sequence[RunRecord], told: Sequence[RunRecord]) -> str:
    if len(told) == len(runs):
        return ""
    which = "The records do" if not told else f"{counted(len(runs) - len(told), 'record')} of {len(runs):,} do"
    return (
        f"{which} not say how the learning rate of each strategy was chosen, so a strategy may be better or worse than "
        "another only by its rate. Run the lab again to tune every strategy alike."
    )


def _budget(told: Sequence[RunRecord]) -> str:
    budgets: dict[CellKey, dict[str, Any]] = {}
    for run in told:
        if run.get("group") != REPLAY:  # a replay has the rate of the strategy that it repeats
            budgets.setdefault(cell_of(run), {})[run["strategy"]] = (tuning_of(run) or {}).get("num_runs")
    unequal = sorted(cell for cell, found in budgets.items() if len(set(found.values())) > 1)
    if unequal:
        return (
            f"Tuning was not equal on {listed(unequal)}: some strategies had more runs to choose their learning rate "
            "than others, so a difference there may come from tuning."
        )
    numbers = sorted({value for found in budgets.values() for value in found.values() if value is not None})
    if not numbers:
        return "The records do not say how many runs chose each learning rate."
    if numbers[0] == 0:
        given = sorted(cell for cell, found in budgets.items() if 0 in found.values())
        return (
            f"On {listed(given)} the learning rate was given and not tuned, so a strategy may be better or worse there "
            "only by its rate."
        )
    span = counted(numbers[0], "run") if len(numbers) == 1 else f"{numbers[0]} to {counted(numbers[-1], 'run')}"
    return (
        "Every strategy had the same budget to choose its learning rate as all others on the same data set and model: "
        f"{span}."
    )


def _edges(told: Sequence[RunRecord]) -> str:
    rates = edge_rates(told)
    if not rates:
        return "No chosen learning rate lies at the edge of its grid."
    names = sorted({name for _, name in rates})
    some = [f"{name} ({', '.join(_places(rates, name))})" for name in names]
    num_all = len({(cell_of(run), run["strategy"]) for run in told})
    return (
        f"At the edge of the grid lay {len(rates)} of {num_all:,} chosen learning rates, so a better one may lie "
        f"beyond it: {listed(some, most=8)}."
    )


def _places(rates: Mapping[tuple[CellKey, str], float], name: str) -> list[str]:
    return [f"{rate:g} on {cell}" for (cell, other), rate in sorted(rates.items()) if other == name]


def _failures(told: Sequence[RunRecord]) -> str:
    found = [f"{name} on {cell}" for cell, name in sorted(untuned(told))]
    if not found:
        return ""
    return f"Tuning failed, so there is no result: {listed(found, most=8)}. No rate of the grid worked."
