"""Plans by name: a first look, a course, and everything."""

from __future__ import annotations

from ..errors import ArgumentError
from ._matrix import Cell, LabPlan
from .strategies import names as strategy_names

__all__ = ["get", "names"]

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


def names() -> tuple[str, ...]:
    """Return the names of the plans, the shortest first.

    >>> names()
    ('quick', 'course', 'full')
    """
    return ("quick", "course", "full")


def get(name: str) -> LabPlan:
    """Return a plan; every one has every strategy.

    - ``quick``: 3 cells of 3 small data sets, 2 seeds;
    - ``course``: 7 cells of 6 data sets and 5 models, 3 seeds;
    - ``full``: 12 cells of 7 data sets and all models, 5 seeds; needs Fashion-MNIST.

    >>> plan = get("course")
    >>> len({cell.dataset for cell in plan.cells}), len({cell.model for cell in plan.cells}), plan.seeds
    (6, 5, (0, 1, 2))
    """
    plans = {"quick": (_QUICK, 2), "course": (_COURSE, 3), "full": (_FULL, 5)}
    if name not in plans:
        raise ArgumentError(f"no preset {name!r}; there are {', '.join(names())}")
    cells, num_seeds = plans[name]
    # The first look spends less on the learning rate.
    tuning_seeds = (1000,) if name == "quick" else (1000, 1001)
    return LabPlan(
        name=name,
        cells=cells,
        strategies=strategy_names(),
        seeds=tuple(range(num_seeds)),
        tuning_seeds=tuning_seeds,
    )
