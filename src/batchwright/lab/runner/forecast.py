"""Forecast: how many runs a plan has and about how long they take, measured by a short trial."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import final

from ..datasets.dataset import Dataset
from ..presets import Cell, LabPlan
from ..strategies.strategy import BASELINE, RunSettings
from ._training import run_one

# Updates of the two trials, a short one and a longer one.
_NUM_UPDATES = (8, 72)
_NUM_REPEATS = 3
# What starting processes takes, each of which imports torch.
_START_SECONDS = 4.0
# A run is validated before training, at each of its points, and at its end once more on the training examples.
_MORE_VALIDATIONS = 2


@final
@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a plan will take.

    Args:
        num_tuning_runs: runs left that choose learning rates.
        num_runs: runs left that are compared.
        seconds: about how long they take together.
        num_workers: how many processes make them.

    >>> print(Forecast(num_tuning_runs=98, num_runs=35, seconds=61.0, num_workers=2))
    98 runs to choose learning rates, then 35 to compare: about 1 minute with 2 processes
    """

    num_tuning_runs: int
    num_runs: int
    seconds: float
    num_workers: int

    def __str__(self) -> str:
        if not self.num_tuning_runs + self.num_runs:
            return "every run is recorded already"
        first = f"{self.num_tuning_runs:,} runs to choose learning rates, then " if self.num_tuning_runs else ""
        num = max(1, self.num_workers)
        return (
            f"{first}{self.num_runs:,} {'' if first else 'runs '}to compare: {about(self.seconds)} with "
            f"{num} {'process' if num == 1 else 'processes'}"
        )


def forecast(
    plan: LabPlan, datasets: Sequence[Dataset], num_tuning_runs: int, num_runs: int, num_workers: int
) -> Forecast:
    """Return what some runs of a plan will take, from trials in every cell.

    Most strategies grow the batch from the size of the baseline towards the largest, so the mean of trials with both
    sizes counts; those that measure noise take more. Each trial is made three times, and the median counts.

    Args:
        plan: the plan.
        datasets: the data set of each cell.
        num_tuning_runs: how many of its runs that choose learning rates are left.
        num_runs: how many of its runs that are compared are left.
        num_workers: how many processes make them.
    """
    seconds = 0.0
    if num_tuning_runs + num_runs:
        trials = [_mean_trial(cell, dataset) for cell, dataset in zip(plan.cells, datasets, strict=True)]
        tuning, compared = (sum(parts) / len(trials) for parts in zip(*trials, strict=True))
        shared = max(1, min(num_workers, num_tuning_runs + num_runs))
        seconds = (num_tuning_runs * tuning + num_runs * compared) / shared + (_START_SECONDS if num_workers else 0)
    return Forecast(num_tuning_runs=num_tuning_runs, num_runs=num_runs, seconds=seconds, num_workers=num_workers)


def _mean_trial(cell: Cell, dataset: Dataset) -> tuple[float, float]:
    """Return the mean seconds of runs with the smallest usual and the largest batch, as ``_trial`` does."""
    settings = cell.settings(dataset).with_lr(1e-6)  # so small that no trial diverges
    both = [settings, replace(settings, base_size=settings.max_size)]
    found = [[_trial(cell, dataset, one) for _ in range(_NUM_REPEATS)] for one in both]
    tuning, compared = (fmean(median(one[place] for one in repeats) for repeats in found) for place in (0, 1))
    return tuning, compared


def _trial(cell: Cell, dataset: Dataset, settings: RunSettings) -> tuple[float, float]:
    """Return the seconds of a run that chooses a rate, which is validated only at its end, and of one compared."""
    sizes = [min(settings.num_examples, num * settings.base_size) for num in _NUM_UPDATES]
    # The first run of a process is slow: memory is allocated, figures of the data set are computed.
    _run(cell, dataset, replace(settings, num_examples=sizes[0], num_evaluations=1))
    (few, validating), (many, _) = (
        _run(cell, dataset, replace(settings, num_examples=num, num_evaluations=1)) for num in sizes
    )
    # The first updates of a run are slower than the rest, so a difference tells more than a quotient.
    more = max(0.0, many - few) / max(1, sizes[1] - sizes[0])
    training = few + more * (settings.num_examples - sizes[0])
    per_validation = validating / (1 + _MORE_VALIDATIONS)
    return training + validating, training + (settings.num_evaluations + _MORE_VALIDATIONS) * per_validation


def _run(cell: Cell, dataset: Dataset, settings: RunSettings) -> tuple[float, float]:
    """Return the seconds that a run of the baseline trains, and the rest of its seconds."""
    start = time.perf_counter()
    seconds: float = run_one(dataset, cell.model, BASELINE, 0, settings)["final"]["seconds"]
    return seconds, max(0.0, time.perf_counter() - start - seconds)


def about(seconds: float) -> str:
    """Return a duration in words.

    >>> about(20), about(61), about(700)
    ('less than a minute', 'about 1 minute', 'about 12 minutes')
    """
    if seconds < 45:
        return "less than a minute"
    minutes = max(1, round(seconds / 60)) if seconds < 600 else math.ceil(seconds / 60)
    return f"about {minutes} minute{'' if minutes == 1 else 's'}"
