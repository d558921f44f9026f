"""Which plan the options of ``batchwright lab run`` ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..lab.runner import LabPlan

_NUM_SEEDS = 3
# A run on a user's file sees about this many examples; its number of epochs is a multiple of 4 within these bounds.
_NUM_EXAMPLES = 200_000
_EPOCHS = (4, 16)


def make_plan(arguments: argparse.Namespace) -> LabPlan | None:
    """Return the plan that the options ask for, or None to continue the plan of the folder."""
    from ..lab import presets

    if arguments.preset is not None and arguments.data is not None:
        raise ArgumentError(f"give a preset or --data, not both; got {arguments.preset} and --data {arguments.data}")
    if arguments.data is not None:
        return _changed(_plan_of_file(arguments), arguments)
    _refuse_file_options(arguments)
    if arguments.preset is not None:
        return _changed(presets.get(arguments.preset), arguments)
    if arguments.seeds is not None or arguments.strategies is not None or not (arguments.folder / "lab.json").is_file():
        raise ArgumentError(
            f"nothing to run: name a preset, one of {', '.join(presets.names())}, or give a file of your own with "
            "--data FILE --target COLUMN"
        )
    return None


def chosen_strategies(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the strategies that names and groups stand for, in the usual order.

    A group is written ``group:NAME``, or just by its name if no strategy has that name. The baseline and the
    strategies that a replay needs are always added.

    >>> chosen_strategies(["linear", "replay_noise"])
    ('constant', 'linear', 'noise', 'replay_noise')
    """
    from ..lab.strategies import BASELINE, GROUPS, get, names

    found = {BASELINE}
    for name in wanted:
        group = name.removeprefix("group:")
        if group in GROUPS and (group != name or name not in names()):
            found.update(other for other in names() if get(other).group == group)
        elif name == "all":
            found.update(names())
        else:
            found.add(get(name).name)
    found.update(source for name in list(found) if (source := get(name).replays) is not None)
    order = {name: place for place, name in enumerate(names())}
    return tuple(sorted(found, key=lambda name: (order.get(name, len(order)), name)))


def _changed(plan: LabPlan, arguments: argparse.Namespace) -> LabPlan:
    """Return a plan with the strategies and seeds of the options."""
    if arguments.strategies is not None:
        plan = replace(plan, strategies=chosen_strategies(arguments.strategies))
    if arguments.seeds is not None:
        plan = replace(plan, seeds=tuple(range(arguments.seeds)))
    return plan


def _refuse_file_options(arguments: argparse.Namespace) -> None:
    given = [name for name in ("target", "columns", "task", "limit", "models", "epochs") if getattr(arguments, name)]
    if given:
        raise ArgumentError(f"--{given[0]} is for a file of your own; add --data FILE")


def _plan_of_file(arguments: argparse.Namespace) -> LabPlan:
    from ..lab import datasets
    from ..lab.models import models_for
    from ..lab.runner import Cell, LabPlan
    from ..lab.strategies import names

    if arguments.target is None:
        raise ArgumentError(f"--data {arguments.data} needs --target COLUMN, the column to predict")
    name = dataset_name(arguments.data, datasets.names())
    options = _load_options(arguments)
    # Loaded before anything is written: a wrong column must not leave a folder with a plan that cannot run.
    data = datasets.load(name, **options)
    fitting = models_for(data)
    unfit = [model for model in arguments.models or () if model not in fitting]
    if unfit:
        raise ArgumentError(f"--models {', '.join(unfit)}: {arguments.data.name} takes {', '.join(fitting)}")
    epochs = arguments.epochs or default_epochs(len(data.train))
    return LabPlan(
        name=name,
        cells=tuple(
            Cell(
                dataset=name,
                model=model,
                num_epochs=epochs,
                optimizer="adam" if model in ("gru", "transformer") else "sgd",
                data=options,
            )
            for model in dict.fromkeys(arguments.models or fitting)
        ),
        strategies=names(),
        seeds=tuple(range(_NUM_SEEDS)),
    )


def _load_options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {
        "path": str(arguments.data.expanduser().resolve()),
        "target": arguments.target,
        "columns": arguments.columns,
        "task": arguments.task,
        "limit": arguments.limit,
    }
    return {name: value for name, value in options.items() if value is not None}


def dataset_name(path: Path, taken: Sequence[str]) -> str:
    """Return the name of a file without its suffixes, made different from the built-in data sets.

    >>> dataset_name(Path("wine.csv.gz"), ["wine"])
    'wine_file'
    """
    name = path.name.partition(".")[0] or "data"
    return f"{name}_file" if name in taken else name


def default_epochs(num_train: int) -> int:
    """Return the number of epochs for a user's file: fewer for large data.

    >>> default_epochs(100), default_epochs(20_000)
    (16, 8)
    """
    least, most = _EPOCHS
    return min(most, max(least, _NUM_EXAMPLES // num_train // 4 * 4))
