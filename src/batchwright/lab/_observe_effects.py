"""What each strategy changed against the baseline, in pairs of runs with the same data set, model and seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np

from ._report_records import BASELINE, Cell, Record, cell_of, finished, number

# (cell, strategy) -> seed -> change against the baseline.
Effects: TypeAlias = Mapping[tuple[Cell, str], Mapping[int, float]]


@final
@dataclass(frozen=True, kw_only=True)
class Measure:
    """A figure of a run, and how two runs are compared by it.

    Args:
        name: the key of the measure.
        title: what it is, in words.
        change: ``"ratio"`` compares by the logarithm of the quotient, which has no unit and so can be averaged over
            data sets; ``"difference"`` subtracts.
        lower_is_better: which direction is the good one.
        of: takes a run, returns the figure, None where there is none.
    """

    name: str
    title: str
    change: Literal["ratio", "difference"]
    lower_is_better: bool
    of: Callable[[Record], float | None]

    def between(self, there: float | None, here: float | None) -> float | None:
        """Return the change from the baseline's figure to the other, None where it has no meaning."""
        if there is None or here is None:
            return None
        if self.change == "difference":
            return there - here
        return math.log(there / here) if there > 0 and here > 0 else None

    def gain(self, change: float) -> float:
        """Return a change with the sign that is positive where it is good."""
        return -change if self.lower_is_better else change


def mean_loss(record: Record) -> float | None:
    """Return the mean validation loss on the way: its integral over the examples seen, by their number.

    It is low for a run that falls early, whatever it ends at.

    >>> points = [{"examples": 0, "validation_loss": 2.0}, {"examples": 100, "validation_loss": 1.0}]
    >>> mean_loss({"curve": points})
    1.5
    """
    points = [
        (float(point["examples"]), loss)
        for point in record.get("curve") or ()
        if (loss := number(point.get("validation_loss"))) is not None
    ]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    examples, losses = np.array(points).T
    return float(((losses[1:] + losses[:-1]) / 2 * np.diff(examples)).sum() / (examples[-1] - examples[0]))


def _final(name: str) -> Callable[[Record], float | None]:
    return lambda record: number((record.get("final") or {}).get(name))


LOSS = Measure(
    name="loss",
    title="final validation loss",
    change="ratio",
    lower_is_better=True,
    of=_final("validation_loss"),
)
METRIC = Measure(
    name="metric",
    title="final quality (accuracy, R², or minus the loss)",
    change="difference",
    lower_is_better=False,
    of=_final("metric"),
)
CONVERGENCE = Measure(
    name="convergence",
    title="mean validation loss on the way",
    change="ratio",
    lower_is_better=True,
    of=mean_loss,
)
UPDATES = Measure(name="updates", title="updates", change="ratio", lower_is_better=True, of=_final("updates"))
SECONDS = Measure(
    name="seconds", title="seconds of training", change="ratio", lower_is_better=True, of=_final("seconds")
)
MEASURES = (LOSS, METRIC, CONVERGENCE, UPDATES, SECONDS)


def effects(records: Iterable[Record], measure: Measure) -> dict[tuple[Cell, str], dict[int, float]]:
    """Return the change of every strategy against the baseline, by data set and model, for each seed that both have.

    Runs over different numbers of examples make no pair.

    >>> def run(strategy, loss):
    ...     place = {"dataset": "wine", "model": "mlp", "strategy": strategy, "seed": 0, "status": "ok"}
    ...     return place | {"final": {"validation_loss": loss}}
    >>> effects([run("constant", 0.5), run("linear", 0.25)], LOSS)
    {(Cell(dataset='wine', model='mlp'), 'linear'): {0: -0.6931471805599453}}
    """
    runs = list(finished(records))
    baselines = {_partner(run): measure.of(run) for run in runs if run["strategy"] == BASELINE}
    found: dict[tuple[Cell, str], dict[int, float]] = {}
    for run in runs:
        if run["strategy"] != BASELINE:
            change = measure.between(measure.of(run), baselines.get(_partner(run)))
            if change is not None:
                found.setdefault((cell_of(run), run["strategy"]), {})[run["seed"]] = change
    return found


def seed_means(found: Effects, cells: Sequence[Cell], strategy: str) -> dict[int, float]:
    """Return the change of a strategy averaged over cells, for each seed that has all of them.

    The cells are taken as they are, not as a sample: a test over these means speaks of new seeds, not of new data.
    """
    parts = [found.get((cell, strategy), {}) for cell in cells]
    seeds = set(parts[0]).intersection(*parts[1:]) if parts else set()
    return {seed: math.fsum(part[seed] for part in parts) / len(parts) for seed in sorted(seeds)}


def _partner(record: Record) -> tuple[object, ...]:
    """Return what two runs must have in common to make a pair."""
    return (*cell_of(record), record["seed"], (record.get("settings") or {}).get("num_examples"))
