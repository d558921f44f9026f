"""The matrix of a lab: data sets and models, strategies, seeds, and the jobs they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from ..errors import ArgumentError
from ._records import Dataset
from ._run_record import finite, run_id
from ._run_settings import OptimizerName, RunSettings
from .strategies import BASELINE, get

# Learning rates to choose from, about three times apart.
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.001, 0.003, 0.01, 0.03, 0.1),
    "adam": (0.0003, 0.001, 0.003, 0.01),
}


@final
@dataclass(frozen=True, kw_only=True)
class Cell:
    """A data set and a model that is trained on it.

    Args:
        dataset: a name for ``datasets.load``.
        model: one of the models that fit it.
        num_epochs: passes over the training examples; a multiple of 4 puts the milestones of a decay on whole epochs.
        optimizer: ``"sgd"`` or ``"adam"``.
        data: further options of ``load``, e.g. ``{"limit": 600}``.
        options: further settings of a run, e.g. ``{"base_size": 8}``.
        lr: the learning rate; None chooses it from the grid of the optimizer.
    """

    dataset: str
    model: str
    num_epochs: int
    optimizer: OptimizerName = "sgd"
    data: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float | None = None

    def __str__(self) -> str:
        return f"{self.dataset} · {self.model}"

    def settings(self, dataset: Dataset) -> RunSettings:
        """Return the settings of its runs, at the given learning rate where there is one."""
        rate = {} if self.lr is None else {"lr": self.lr}
        optimizer = {"optimizer": self.optimizer}
        return RunSettings.fit(
            len(dataset.train), num_epochs=self.num_epochs, **{**optimizer, **rate, **_with_tuples(self.options)}
        )


@final
@dataclass(frozen=True, kw_only=True)
class LabPlan:
    """What a lab runs: every strategy in every cell with every seed.

    The learning rate of a cell is the best of a grid for the baseline, on seeds that are not reported, and the same for
    all strategies. A replay plays the batch sizes that the next seed's run recorded; it needs two seeds.

    Args:
        name: of the plan.
        cells: the data sets and models.
        strategies: names of strategies, the baseline among them.
        seeds: of the runs.
        tuning_seeds: of the runs that choose the learning rate.
        grids: the learning rates to choose from, by optimizer.
    """

    name: str
    cells: tuple[Cell, ...]
    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...] = (1000, 1001)
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: dict(GRIDS))

    def __post_init__(self) -> None:
        for what in ("cells", "strategies", "seeds", "tuning_seeds"):
            if not getattr(self, what):
                raise ArgumentError(f"a plan needs at least one of its {what}, got none")
        _refuse_repeated("cells", [str(cell) for cell in self.cells])
        _refuse_repeated("strategies", self.strategies)
        _refuse_repeated("seeds", self.seeds)
        if set(self.seeds) & set(self.tuning_seeds):
            raise ArgumentError(
                f"tuning_seeds must not be among the seeds, or the baseline is tuned on what is reported; "
                f"got {self.tuning_seeds} and {self.seeds}"
            )
        self._check_strategies()

    def _check_strategies(self) -> None:
        needed = {BASELINE, *(get(name).replays or BASELINE for name in self.strategies)}
        missing = sorted(needed - set(self.strategies))
        if missing:
            raise ArgumentError(f"these strategies need {', '.join(missing)} beside them; add it to strategies")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, the same before and after it was written."""
        return dict(finite(asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabPlan:
        """Return the plan that ``to_dict`` wrote."""
        lists = {name: tuple(values[name]) for name in ("strategies", "seeds", "tuning_seeds")}
        grids = {name: tuple(grid) for name, grid in values["grids"].items()}
        cells = tuple(Cell(**cell) for cell in values["cells"])
        return cls(name=values["name"], cells=cells, grids=grids, **lists)


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to be made.

    Args:
        dataset: a name for ``datasets.load``.
        data: further options of ``load``.
        model: the name of the model.
        strategy: the name of the strategy.
        seed: of the run.
        settings: of the run.
        notes: further settings for the record.
        after: the id of the run that it replays.
    """

    dataset: str
    data: Mapping[str, Any]
    model: str
    strategy: str
    seed: int
    settings: RunSettings
    notes: Mapping[str, Any]
    after: str | None = None

    @property
    def id(self) -> str:
        """Return the id of its record."""
        return run_id(self.dataset, self.model, self.strategy, self.seed, self.all_settings)

    @property
    def all_settings(self) -> dict[str, Any]:
        """Return the settings and the notes, as the record has them."""
        return {**self.settings.to_dict(), **self.notes}


def tuning_jobs(plan: LabPlan, cell: Cell, dataset: Dataset) -> list[Job]:
    """Return the runs of the baseline that a cell's learning rate is chosen by; none where it is given."""
    if cell.lr is not None:
        return []
    settings = cell.settings(dataset)
    return [
        _job(cell, BASELINE, seed, settings.with_lr(rate), {})
        for rate in plan.grids[cell.optimizer]
        for seed in plan.tuning_seeds
    ]


def plan_jobs(plan: LabPlan, datasets: Sequence[Dataset], rates: Sequence[float]) -> list[Job]:
    """Return all runs of a plan, one seed after another, the cells taking turns so that time runs evenly.

    Args:
        plan: the plan.
        datasets: the data set of each cell.
        rates: the learning rate of each cell.
    """
    cells = [
        (cell, dataset.num_classes, cell.settings(dataset).with_lr(rate), _grid_note(plan, cell))
        for cell, dataset, rate in zip(plan.cells, datasets, rates, strict=True)
    ]
    return [
        job
        for place in range(len(plan.seeds))
        for name in plan.strategies
        for cell, num_classes, settings, note in cells
        if get(name).fits(num_classes)
        for job in _jobs_of_strategy(plan, place, name, cell, settings, note)
    ]


def _jobs_of_strategy(
    plan: LabPlan, place: int, name: str, cell: Cell, settings: RunSettings, note: Mapping[str, Any]
) -> list[Job]:
    seed, source = plan.seeds[place], get(name).replays
    if source is None:
        return [_job(cell, name, seed, settings, note)]
    if len(plan.seeds) == 1:
        return []
    # Its own sizes would give the very same run; those of another seed ask whether adapting to this one mattered.
    other = _job(cell, source, plan.seeds[(place + 1) % len(plan.seeds)], settings, note)
    replays = {"strategy": source, "seed": other.seed, "id": other.id}
    return [_job(cell, name, seed, settings, {**note, "replays": replays}, after=other.id)]


def _job(
    cell: Cell, strategy: str, seed: int, settings: RunSettings, note: Mapping[str, Any], after: str | None = None
) -> Job:
    notes = {**note, "data": dict(cell.data)}
    return Job(
        dataset=cell.dataset,
        data=cell.data,
        model=cell.model,
        strategy=strategy,
        seed=seed,
        settings=settings,
        notes=notes,
        after=after,
    )


def _grid_note(plan: LabPlan, cell: Cell) -> dict[str, Any]:
    return {"lr_grid": None if cell.lr is not None else list(plan.grids[cell.optimizer])}


def _with_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with tuples where JSON has lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _refuse_repeated(what: str, values: Sequence[Any]) -> None:
    repeated = [str(value) for value in dict.fromkeys(values) if list(values).count(value) > 1]
    if repeated:
        raise ArgumentError(f"the {what} of a plan must differ, got {', '.join(repeated)} more than once")
