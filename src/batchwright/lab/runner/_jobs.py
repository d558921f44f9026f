"""What a plan asks for: its arms, which are strategies in cells, and the runs of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

from .._records import run_id
from ..datasets.dataset import Dataset
from ..presets import Cell, LabPlan
from ..strategies.catalogue import get as get_strategy
from ..strategies.strategy import RunSettings
from ..update_time import EAGER, UpdateTime
from ._choice import Choice


class Arm(NamedTuple):
    """A strategy in a cell, given by its place in the plan."""

    cell: int
    strategy: str


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to make.

    Args:
        cell: the data set and the model.
        strategy: the name of the strategy.
        seed: the seed of the run.
        settings: the settings of the run.
        notes: further settings for the record.
        after: for a replay, the id of the run that it repeats.
        update_time: for the simulated seconds.
        choice: how its learning rate was chosen; None for the runs that choose it.
        digest: the fingerprint of the data that the lab began with; a process that finds other data makes no run.
    """

    cell: Cell
    strategy: str
    seed: int
    settings: RunSettings
    notes: Mapping[str, Any]
    after: str | None = None
    update_time: UpdateTime = EAGER
    choice: Choice | None = None
    digest: str | None = None

    @property
    def id(self) -> str:
        """Return the id of its record."""
        return run_id(self.cell.dataset, self.cell.model, self.strategy, self.seed, self.all_settings)

    @property
    def all_settings(self) -> dict[str, Any]:
        """Return the settings and the notes, as the record holds them."""
        return {**self.settings.to_dict(), **self.notes}


def arms_of(plan: LabPlan, datasets: Sequence[Dataset]) -> list[Arm]:
    """Return the arms of a plan, strategy by strategy; those that cannot run in a cell are left out.

    Entropy needs classes, cycles need several epochs, and a replay needs two seeds: its own sizes would give the very
    same run.
    """
    return [
        Arm(place, name)
        for name in plan.strategies
        for place, (cell, dataset) in enumerate(zip(plan.cells, datasets, strict=True))
        if get_strategy(name).fits(dataset.num_classes, num_epochs=cell.num_epochs)
        and (len(plan.seeds) > 1 or get_strategy(name).replays is None)
    ]


def plan_jobs(plan: LabPlan, datasets: Sequence[Dataset], choices: Mapping[Arm, Choice]) -> list[Job]:
    """Return all runs that are compared, one seed after another; the cells take turns, so that progress is even.

    Args:
        plan: the plan.
        datasets: the data set of each cell.
        choices: the learning rate of each arm.
    """
    settings = [cell.settings(dataset) for cell, dataset in zip(plan.cells, datasets, strict=True)]
    digests = [dataset.digest for dataset in datasets]
    arms = arms_of(plan, datasets)
    return [
        job
        for place in range(len(plan.seeds))
        for arm in arms
        for job in _jobs_of_arm(plan, place, arm, settings[arm.cell], choices, digests[arm.cell])
    ]


def _jobs_of_arm(
    plan: LabPlan, place: int, arm: Arm, settings: RunSettings, choices: Mapping[Arm, Choice], digest: str
) -> Iterator[Job]:
    cell, seeds = plan.cells[arm.cell], plan.seeds
    note = {"lr_grid": None if cell.lr is not None else list(plan.grids[cell.optimizer])}
    data = {"data": dict(cell.data)}
    job = partial(Job, cell=cell, update_time=plan.update_time, digest=digest)
    mine, source = choices[arm], get_strategy(arm.strategy).replays
    at_rate = settings if mine.lr is None else settings.with_lr(mine.lr)
    if source is None:
        notes = {**note, **data}
        yield job(strategy=arm.strategy, seed=seeds[place], settings=at_rate, notes=notes, choice=mine)
        return
    # The sizes of another seed tell whether adapting to this one mattered.
    [other] = _jobs_of_arm(plan, (place + 1) % len(seeds), Arm(arm.cell, source), settings, choices, digest)
    replays = {"strategy": source, "seed": other.seed, "id": other.id}
    notes = {**note, "replays": replays, **data}
    yield job(strategy=arm.strategy, seed=seeds[place], settings=at_rate, notes=notes, after=other.id, choice=mine)
