"""What a lab can run: cells of data set and model, plans made of them, and the presets, which are plans by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from .._checks import as_plain, as_whole
from ..errors import ArgumentError
from ._records import finite
from .datasets.dataset import Dataset
from .strategies.catalogue import HANDFUL
from .strategies.catalogue import get as get_strategy
from .strategies.catalogue import names as strategy_names
from .strategies.strategy import (
    BASELINE,
    LARGEST_FACTOR,
    OptimizerName,
    RunSettings,
    as_items,
    as_plains,
    plain,
    set_fields,
)
from .update_time import EAGER, UpdateTime

__all__ = ["Cell", "LabPlan", "get", "names"]

# Learning rates that every strategy tries first; the rounds after them go beyond an end, or between two. They reach
# beyond what the baseline needs: the best rates of the smallest and the largest batch lie more than a decade apart.
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.001, 0.01, 0.1, 1.0),
    "adam": (0.0001, 0.001, 0.01, 0.1),
}
# The largest batch makes a sixteenth of the baseline's updates: the baseline is validated where such a run ends.
NUM_POINTS = {"num_evaluations": LARGEST_FACTOR}
# Seeds from here on choose learning rates; those that are compared count from 0.
FIRST_TUNING_SEED = 1000


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
        lr: the learning rate of every strategy; None chooses one for each.
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

    Every strategy of a cell has its own learning rate, chosen by the measure that strategies are compared by, the final
    validation loss, on seeds that are not compared. All of them have the same number of runs for it: one per rate of
    the grid, then two further rates in each round. A round tries both sides of the best rate so far, or beyond it if it
    lies at an end. The rate is where a parabola through the best rate and its neighbours is lowest, so that it matters
    little where the grid lies. Beside a rate that diverged, or at an end, it is the best rate tried: there a strategy
    may lose by where the grid lies, and reports name such rates with how far apart rates were tried. A replay repeats
    the batch sizes that the run of the next seed recorded; it needs two seeds.

    Args:
        name: the name of the plan.
        cells: the data sets and models.
        strategies: the names of the strategies, including the baseline.
        seeds: the seeds of the runs.
        tuning_seeds: the seeds of the runs that choose the learning rates.
        grids: the learning rates to try first, by optimizer.
        tuning_rounds: how often every strategy tries two further rates.
        update_time: what an update would take on a GPU, for the simulated seconds.
    """

    name: str
    cells: tuple[Cell, ...]
    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...] = (FIRST_TUNING_SEED, FIRST_TUNING_SEED + 1)
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: dict(GRIDS))
    tuning_rounds: int = 2
    update_time: UpdateTime = EAGER

    def __post_init__(self) -> None:
        for name in ("seeds", "tuning_seeds"):
            seeds = as_items(name, getattr(self, name))
            set_fields(self, **{name: tuple(as_whole(name, seed, least=0) for seed in seeds)})
        grids = {name: as_plains(f"grids[{name!r}]", rates, above=0) for name, rates in self.grids.items()}
        set_fields(self, grids=grids, tuning_rounds=as_whole("tuning_rounds", self.tuning_rounds, least=0))
        if not isinstance(self.update_time, UpdateTime):
            raise ArgumentError(f"update_time must be an UpdateTime, got {self.update_time!r}")
        for what in ("cells", "strategies", "seeds", "tuning_seeds"):
            if not getattr(self, what):
                raise ArgumentError(f"{what} of a plan must not be empty")
        _refuse_repeated("cells", [str(cell) for cell in self.cells])
        _refuse_repeated("strategies", self.strategies)
        _refuse_repeated("seeds", self.seeds)
        _refuse_repeated("tuning_seeds", self.tuning_seeds)
        self._check_grids()
        if set(self.seeds) & set(self.tuning_seeds):
            raise ArgumentError(
                "seeds and tuning_seeds must differ, or strategies would be tuned on what is compared; "
                f"got {self.seeds} and {self.tuning_seeds}"
            )
        self._check_strategies()

    def _check_strategies(self) -> None:
        needed = {BASELINE, *(get_strategy(name).replays or BASELINE for name in self.strategies)}
        missing = sorted(needed - set(self.strategies))
        if missing:
            raise ArgumentError(f"these strategies need {', '.join(missing)} as well; add it to strategies")

    def _check_grids(self) -> None:
        for cell in self.cells:
            if cell.lr is None and not self.grids.get(cell.optimizer):
                raise ArgumentError(f"grids has no learning rate for {cell.optimizer}; give some, or give {cell} an lr")
        for name, rates in self.grids.items():
            _refuse_repeated(f"grids[{name!r}]", rates)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, which are the same after writing and reading them."""
        return dict(finite(asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabPlan:
        """Return the plan that ``to_dict`` wrote."""
        lists = {name: tuple(values[name]) for name in ("strategies", "seeds", "tuning_seeds")}
        grids = {name: tuple(grid) for name, grid in values["grids"].items()}
        cells = tuple(Cell(**cell) for cell in values["cells"])
        time = UpdateTime.from_dict(values["update_time"])
        rounds = values["tuning_rounds"]
        return cls(name=values["name"], cells=cells, grids=grids, tuning_rounds=rounds, update_time=time, **lists)


def names() -> tuple[str, ...]:
    """Return the names of the plans, the shortest first.

    >>> names()
    ('quick', 'course', 'full')
    """
    return tuple(_PRESETS)


def get(name: str) -> LabPlan:
    """Return a plan by its name.

    - ``quick``, a first look in about a minute: 3 cells of 3 small data sets, 6 strategies, 6 seeds;
    - ``course``, about 40 minutes on two processors: 9 cells of 9 data sets and 5 models, a strategy per idea, 5 seeds;
      needs Fashion-MNIST;
    - ``full``, for days: 20 cells of 13 data sets and 8 models, every strategy, 5 seeds; needs Fashion-MNIST.

    >>> plan = get("course")
    >>> len({cell.dataset for cell in plan.cells}), len({cell.model for cell in plan.cells}), plan.seeds
    (9, 5, (0, 1, 2, 3, 4))
    """
    if name not in _PRESETS:
        raise ArgumentError(f"no preset {name!r}; there are {', '.join(names())}")
    cells, strategies, num_seeds, num_tuning_seeds = _PRESETS[name]
    return LabPlan(
        name=name,
        cells=tuple(replace(cell, options={**NUM_POINTS, **cell.options}) for cell in cells),
        strategies=strategies(),
        seeds=tuple(range(num_seeds)),
        tuning_seeds=tuple(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + num_tuning_seeds)),
    )


def one_per_idea() -> tuple[str, ...]:
    """Return the strategies of the course: one for each idea, in the usual order.

    >>> one_per_idea()[:3]
    ('constant', 'constant_small', 'constant_large')
    """
    return tuple(name for name in strategy_names() if name in {*HANDFUL, *_MORE_IDEAS})


def _with_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with tuples where JSON has lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _refuse_repeated(what: str, values: Sequence[Any]) -> None:
    repeated = [str(value) for value in dict.fromkeys(values) if list(values).count(value) > 1]
    if repeated:
        raise ArgumentError(f"the {what} of a plan must differ, got {', '.join(repeated)} more than once")


_TEXT = {"limit": 600, "max_length": 48}
_WINDOWS = {"limit": 600}
_LARGE = {"limit": 5000}
_PARAGRAPHS = {"limit": 5000, "max_length": 64}
_QUICK = (
    Cell(dataset="digits", model="mlp", num_epochs=8),
    Cell(dataset="wine", model="mlp", num_epochs=12),
    Cell(dataset="diabetes", model="linear", num_epochs=8),
)
# Small and large, narrow and wide data of each kind, so that kind, size and dimension are not one split.
_COURSE = (
    Cell(dataset="digits", model="cnn", num_epochs=8),
    Cell(dataset="fashion_mnist", model="mlp", num_epochs=8, data=_LARGE),
    Cell(dataset="breast_cancer", model="logistic", num_epochs=16),
    Cell(dataset="waveform_wide", model="mlp", num_epochs=8, data=_LARGE),
    Cell(dataset="diabetes", model="mlp", num_epochs=16),
    Cell(dataset="friedman", model="mlp", num_epochs=8, data=_LARGE),
    Cell(dataset="python_docstrings", model="transformer", num_epochs=8, optimizer="adam", data=_TEXT),
    Cell(dataset="python_paragraphs", model="logistic", num_epochs=8, optimizer="adam", data=_PARAGRAPHS),
    Cell(dataset="python_chars", model="char_lm", num_epochs=8, optimizer="adam", data=_WINDOWS),
)
_FULL = (
    *(Cell(dataset="digits", model=model, num_epochs=16) for model in ("logistic", "mlp", "cnn")),
    *(Cell(dataset="breast_cancer", model=model, num_epochs=16) for model in ("logistic", "mlp")),
    Cell(dataset="wine", model="mlp", num_epochs=16),
    Cell(dataset="diabetes", model="linear", num_epochs=16),
    *(Cell(dataset=name, model="mlp", num_epochs=12) for name in ("diabetes", "friedman", "friedman_wide")),
    *(Cell(dataset=name, model="mlp", num_epochs=12) for name in ("waveform", "waveform_wide", "fashion_mnist_7x7")),
    Cell(dataset="fashion_mnist", model="cnn", num_epochs=8),
    *(
        Cell(dataset="python_docstrings", model=model, num_epochs=8, optimizer="adam", data={"max_length": 128})
        for model in ("logistic", "transformer", "gru")
    ),
    Cell(
        dataset="python_paragraphs", model="gru", num_epochs=8, optimizer="adam", data={"limit": 5000, "max_length": 64}
    ),
    Cell(dataset="python_chars", model="char_lm", num_epochs=8, optimizer="adam", data={"limit": 2500}),
    Cell(dataset="python_words", model="gru_lm", num_epochs=8, optimizer="adam", data={"limit": 2500}),
)
_FIRST_LOOK = ("constant", "constant_large", "exponential", "loss_difference_exponential", "noise", "curriculum")
# Beside the handful: sizes below the base size, steady losses, memory, and a decay in the rate or in the batch.
_MORE_IDEAS = ("constant_small", "loss_variance_exponential", "memory_batch", "lr_decay", "batch_ramp")
# Cells, strategies, the number of seeds, and of those that choose learning rates.
_PRESETS: dict[str, tuple[tuple[Cell, ...], Callable[[], tuple[str, ...]], int, int]] = {
    "quick": (_QUICK, lambda: _FIRST_LOOK, 6, 1),
    "course": (_COURSE, one_per_idea, 5, 2),
    "full": (_FULL, strategy_names, 5, 2),
}
