"""What a lab can run: cells of data set and model, plans made of them, and the presets, which are plans by name.

And what a plan asks for: its runs, and before them those that choose the learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, final

from .._checks import as_plain, as_whole
from ..errors import ArgumentError, BatchwrightError
from ._records import RunRecord, finite, run_id
from .datasets.dataset import Dataset
from .strategies.catalogue import get as get_strategy
from .strategies.catalogue import names as strategy_names
from .strategies.strategy import (
    BASELINE,
    OptimizerName,
    RunSettings,
    as_items,
    as_plains,
    plain,
    set_fields,
)

__all__ = ["Cell", "LabPlan", "get", "names"]

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
        num_epochs: passes over the training examples; with a multiple of 4 the milestones of a decay end an epoch.
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

    def __post_init__(self) -> None:
        set_fields(
            self,
            num_epochs=as_whole("num_epochs", self.num_epochs, least=1),
            data=plain(self.data),
            options=plain(self.options),
            lr=None if self.lr is None else as_plain("lr", self.lr, above=0),
        )

    def __str__(self) -> str:
        return f"{self.dataset} · {self.model}"

    def settings(self, dataset: Dataset) -> RunSettings:
        """Return the settings of its runs, at its learning rate if it has one."""
        rate = {} if self.lr is None else {"lr": self.lr}
        optimizer = {"optimizer": self.optimizer}
        return RunSettings.fit(
            len(dataset.train), num_epochs=self.num_epochs, **{**optimizer, **rate, **_with_tuples(self.options)}
        )


@final
@dataclass(frozen=True, kw_only=True)
class LabPlan:
    """What a lab runs: every strategy in every cell with every seed.

    All strategies of a cell have the same learning rate: the best of a grid for the baseline, on seeds that are not
    reported. A replay repeats the batch sizes that the run of the next seed recorded; it needs two seeds.

    Args:
        name: the name of the plan.
        cells: the data sets and models.
        strategies: the names of the strategies, including the baseline.
        seeds: the seeds of the runs.
        tuning_seeds: the seeds of the runs that choose the learning rate.
        grids: the learning rates to choose from, by optimizer.
    """

    name: str
    cells: tuple[Cell, ...]
    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...] = (1000, 1001)
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: dict(GRIDS))

    def __post_init__(self) -> None:
        for name in ("seeds", "tuning_seeds"):
            seeds = as_items(name, getattr(self, name))
            set_fields(self, **{name: tuple(as_whole(name, seed, least=0) for seed in seeds)})
        grids = {name: as_plains(f"grids[{name!r}]", rates, above=0) for name, rates in self.grids.items()}
        set_fields(self, grids=grids)
        for what in ("cells", "strategies", "seeds", "tuning_seeds"):
            if not getattr(self, what):
                raise ArgumentError(f"{what} of a plan must not be empty")
        _refuse_repeated("cells", [str(cell) for cell in self.cells])
        _refuse_repeated("strategies", self.strategies)
        _refuse_repeated("seeds", self.seeds)
        if set(self.seeds) & set(self.tuning_seeds):
            raise ArgumentError(
                "seeds and tuning_seeds must differ, or the baseline would be tuned on what is reported; "
                f"got {self.seeds} and {self.tuning_seeds}"
            )
        self._check_strategies()

    def _check_strategies(self) -> None:
        needed = {BASELINE, *(get_strategy(name).replays or BASELINE for name in self.strategies)}
        missing = sorted(needed - set(self.strategies))
        if missing:
            raise ArgumentError(f"these strategies need {', '.join(missing)} as well; add it to strategies")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, which are the same after writing and reading them."""
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
    """One run to make.

    Args:
        cell: the data set and the model.
        strategy: the name of the strategy.
        seed: the seed of the run.
        settings: the settings of the run.
        notes: further settings for the record.
        after: for a replay, the id of the run that it repeats.
    """

    cell: Cell
    strategy: str
    seed: int
    settings: RunSettings
    notes: Mapping[str, Any]
    after: str | None = None

    @property
    def id(self) -> str:
        """Return the id of its record."""
        return run_id(self.cell.dataset, self.cell.model, self.strategy, self.seed, self.all_settings)

    @property
    def all_settings(self) -> dict[str, Any]:
        """Return the settings and the notes, as the record holds them."""
        return {**self.settings.to_dict(), **self.notes}


def tuning_jobs(plan: LabPlan, cell: Cell, dataset: Dataset) -> list[Job]:
    """Return the runs of the baseline that choose the learning rate of a cell; empty if the cell has one."""
    if cell.lr is not None:
        return []
    settings, notes = cell.settings(dataset), {"data": dict(cell.data)}
    return [
        Job(cell=cell, strategy=BASELINE, seed=seed, settings=settings.with_lr(rate), notes=notes)
        for rate in plan.grids[cell.optimizer]
        for seed in plan.tuning_seeds
    ]


@final
@dataclass(frozen=True)
class Score:
    """How the baseline did at one learning rate: means over the tuning seeds, None if a run failed or diverged."""

    lr: float
    metric: float | None
    validation_loss: float | None

    @property
    def rank(self) -> tuple[float, float]:
        """Return what decides: the metric, and for equal metrics the loss; the larger, the better."""
        metric, loss = self.metric, self.validation_loss
        return -math.inf if metric is None else metric, -math.inf if loss is None else -loss


def score_rates(records: Iterable[RunRecord]) -> list[Score]:
    """Return the scores of the learning rates that runs of the baseline were made with."""
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for record in records:
        by_rate.setdefault(record["settings"]["lr"], []).append(record["final"] or {})
    return [Score(rate, _mean(finals, "metric"), _mean(finals, "validation_loss")) for rate, finals in by_rate.items()]


def best_rate(scores: Iterable[Score]) -> float:
    """Return the rate with the best metric, and among equal metrics the one with the lowest loss.

    >>> best_rate([Score(0.1, 0.9, 0.5), Score(0.01, 0.9, 0.4), Score(1.0, None, None)])
    0.01
    """
    best = max(scores, key=lambda score: score.rank)
    if best.metric is None:
        raise BatchwrightError(
            "the baseline failed or diverged at every learning rate of the grid; look into tuning.jsonl, "
            "or give the plan other grids or the cell an lr"
        )
    return best.lr


def _mean(finals: list[dict[str, Any]], name: str) -> float | None:
    values: list[Any] = [final.get(name) for final in finals]
    return None if None in values else sum(values) / len(values)


def plan_jobs(plan: LabPlan, datasets: Sequence[Dataset], rates: Sequence[float]) -> list[Job]:
    """Return all runs of a plan, one seed after another; the cells take turns, so that progress is even.

    Args:
        plan: the plan.
        datasets: the data set of each cell.
        rates: the learning rate of each cell.
    """
    cells = [
        (cell, dataset.num_classes, cell.settings(dataset).with_lr(rate))
        for cell, dataset, rate in zip(plan.cells, datasets, rates, strict=True)
    ]
    return [
        job
        for place in range(len(plan.seeds))
        for name in plan.strategies
        for cell, num_classes, settings in cells
        if get_strategy(name).fits(num_classes)
        for job in _jobs_of_strategy(plan, place, name, cell, settings)
    ]


def _jobs_of_strategy(plan: LabPlan, place: int, name: str, cell: Cell, settings: RunSettings) -> list[Job]:
    source, seeds, data = get_strategy(name).replays, plan.seeds, {"data": dict(cell.data)}
    note = {"lr_grid": None if cell.lr is not None else list(plan.grids[cell.optimizer])}
    job = partial(Job, cell=cell, settings=settings)
    if source is None:
        return [job(strategy=name, seed=seeds[place], notes={**note, **data})]
    if len(seeds) == 1:
        return []
    # Its own sizes would give the very same run; those of another seed tell whether adapting to this one mattered.
    other = job(strategy=source, seed=seeds[(place + 1) % len(seeds)], notes={**note, **data})
    replays = {"strategy": source, "seed": other.seed, "id": other.id}
    return [job(strategy=name, seed=seeds[place], notes={**note, "replays": replays, **data}, after=other.id)]


def names() -> tuple[str, ...]:
    """Return the names of the plans, the shortest first.

    >>> names()
    ('quick', 'course', 'full')
    """
    return tuple(_PRESETS)


def get(name: str) -> LabPlan:
    """Return a plan with every strategy.

    - ``quick``, a first look: 3 cells of 3 small data sets, 2 seeds;
    - ``course``: 7 cells of 6 data sets and 5 models, 3 seeds;
    - ``full``: 12 cells of 7 data sets and all models, 5 seeds; needs Fashion-MNIST.

    >>> plan = get("course")
    >>> len({cell.dataset for cell in plan.cells}), len({cell.model for cell in plan.cells}), plan.seeds
    (6, 5, (0, 1, 2))
    """
    if name not in _PRESETS:
        raise ArgumentError(f"no preset {name!r}; there are {', '.join(names())}")
    cells, num_seeds = _PRESETS[name]
    # The first look spends less on the learning rate.
    tuning_seeds = (1000,) if name == "quick" else (1000, 1001)
    return LabPlan(
        name=name,
        cells=cells,
        strategies=strategy_names(),
        seeds=tuple(range(num_seeds)),
        tuning_seeds=tuning_seeds,
    )


def _with_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with tuples where JSON has lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _refuse_repeated(what: str, values: Sequence[Any]) -> None:
    repeated = [str(value) for value in dict.fromkeys(values) if list(values).count(value) > 1]
    if repeated:
        raise ArgumentError(f"the {what} of a plan must differ, got {', '.join(repeated)} more than once")


_TEXT = {"limit": 600, "max_length": 48}
_WINDOWS = {"limit": 600}
_QUICK = (
    Cell(dataset="digits", model="mlp", num_epochs=8, options={"num_evaluations": 8}),
    Cell(dataset="wine", model="mlp", num_epochs=12),
    Cell(dataset="diabetes", model="linear", num_epochs=8, options={"num_evaluations": 8}),
)
_COURSE = (
    Cell(dataset="digits", model="mlp", num_epochs=16),
    Cell(dataset="digits", model="cnn", num_epochs=12),
    Cell(dataset="breast_cancer", model="logistic", num_epochs=16),
    Cell(dataset="wine", model="mlp", num_epochs=16),
    Cell(dataset="diabetes", model="mlp", num_epochs=16),
    Cell(dataset="python_functions", model="transformer", num_epochs=12, optimizer="adam", data=_TEXT),
    Cell(dataset="python_chars", model="char_lm", num_epochs=8, optimizer="adam", data=_WINDOWS),
)
_FULL = (
    *(Cell(dataset="digits", model=model, num_epochs=24) for model in ("logistic", "mlp", "cnn")),
    *(
        Cell(dataset=name, model=model, num_epochs=24)
        for name in ("breast_cancer", "wine")
        for model in ("logistic", "mlp")
    ),
    *(Cell(dataset="diabetes", model=model, num_epochs=24) for model in ("linear", "mlp")),
    Cell(dataset="fashion_mnist", model="cnn", num_epochs=12, data={"limit": 12_500}),
    *(
        Cell(dataset="python_functions", model=model, num_epochs=16, optimizer="adam", data={"max_length": 128})
        for model in ("logistic", "transformer", "gru")
    ),
    Cell(dataset="python_chars", model="char_lm", num_epochs=16, optimizer="adam"),
)
_PRESETS = {"quick": (_QUICK, 2), "course": (_COURSE, 3), "full": (_FULL, 5)}
