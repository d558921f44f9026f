"""What ``batchwright lab run|report|show|list`` does; torch is loaded by ``run`` alone."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._optional import require
from ..errors import ArgumentError
from .lab_names import DATASETS, MODELS
from .screen import Screen

if TYPE_CHECKING:
    from ..lab.runner import LabPlan

DEFAULT_SEEDS = 3
# Examples that a run on a user's file sees, about; a whole number of epochs from 4 to 16, a multiple of 4.
_NUM_EXAMPLES = 200_000
_EPOCHS = (4, 16)
_PLAIN = str.maketrans({"−": "-", "×": "x", "±": "+-", "²": "2", "→": "->", "¹": "^1", "³": "3"})  # noqa: RUF001


def run(arguments: argparse.Namespace) -> int:
    """Train, record and report."""
    require("torch", extra="lab")
    from ..lab.runner import Lab

    plan = _plan(arguments)
    lab = Lab(arguments.folder)
    try:
        lab.run(
            plan,
            num_workers=arguments.workers,
            progress=not arguments.quiet,
            retry_failed=arguments.retry_failed,
        )
    except KeyboardInterrupt:
        print(f"\nstopped; to go on: batchwright lab run{_folder_option(arguments.folder)}", file=sys.stderr)
        raise
    return report(arguments)


def report(arguments: argparse.Namespace) -> int:
    """Write the report of a folder and print what it says first."""
    from ..lab.observations import observe
    from ..lab.report import read_lab, write_report

    files = write_report(arguments.folder)
    observations = observe(read_lab(arguments.folder).records)
    lead = [one.sentence for one in observations if one.topic in ("scope", "overall", "cost", "no better")]
    _show(
        [
            *(line for sentence in lead for line in ["", *_screen().wrap(sentence)]),
            "",
            f"{files.html}   the page ({files.html.stat().st_size / 1e6:.1f} MB)",
            f"{files.markdown}     the same as text",
            f"{files.csv}    one line a run",
            f"to look at it: batchwright lab show{_folder_argument(arguments.folder)}",
        ]
    )
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    from ..lab.report import HOST, make_server

    with make_server(arguments.folder, port=arguments.port) as server:
        address = f"http://{HOST}:{server.server_port}/"
        _show([f"{address}   Ctrl-C ends it"])
        sys.stdout.flush()
        if not arguments.no_browser and _has_screen():
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def list_all(arguments: argparse.Namespace) -> int:
    """Print what there is, one line each."""
    from ..lab import presets, strategies

    found = [strategies.get(name) for name in strategies.names()]
    plans = [presets.get(name) for name in presets.names()]
    sections: list[tuple[str, Sequence[Sequence[str]]]] = [
        ("data sets", [[name, text] for name, text in DATASETS.items()]),
        ("models", [[name, text] for name, text in MODELS.items()]),
        ("strategies", [[one.name, f"{one.group:<12}{one.about}"] for one in found]),
        ("presets", [[plan.name, _describe(plan)] for plan in plans]),
    ]
    for title, rows in sections:
        _show([*_listed(title, rows), ""])
    _show(["for --strategies: names, a group as it stands after the names, or group:entropy where a name is the same"])
    return 0


def _listed(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    width = max(len(row[0]) for row in rows)
    lines = [title, "─" * len(title)]
    for name, text in rows:
        wrapped = _screen().wrap(f"{name:<{width}}  {text}", indent=" " * (width + 2))
        lines += wrapped
    return lines


def _plan(arguments: argparse.Namespace) -> LabPlan | None:
    """Return the plan that the options ask for, None to go on with the folder's own."""
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
    name = _dataset_name(arguments.data, datasets.names())
    options = _load_options(arguments)
    # Loaded before anything is written: a wrong column must not leave a folder with a plan that cannot run.
    data = datasets.load(name, **options)
    fitting = models_for(data)
    unfit = [model for model in arguments.models or () if model not in fitting]
    if unfit:
        raise ArgumentError(f"--models {', '.join(unfit)}: {arguments.data.name} takes {', '.join(fitting)}")
    epochs = arguments.epochs or _num_epochs(len(data.train))
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
        seeds=tuple(range(DEFAULT_SEEDS)),
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


def _dataset_name(path: Path, taken: Sequence[str]) -> str:
    """Return the name of a file without its endings; one that is built in gets another."""
    name = path.name.partition(".")[0] or "data"
    return f"{name}_file" if name in taken else name


def _num_epochs(num_train: int) -> int:
    least, most = _EPOCHS
    return min(most, max(least, _NUM_EXAMPLES // num_train // 4 * 4))


def _changed(plan: LabPlan, arguments: argparse.Namespace) -> LabPlan:
    """Return a plan with the strategies and seeds that were asked for."""
    if arguments.strategies is not None:
        plan = replace(plan, strategies=_chosen(arguments.strategies))
    if arguments.seeds is not None:
        plan = replace(plan, seeds=tuple(range(arguments.seeds)))
    return plan


def _chosen(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return strategies out of names and groups, with the baseline and what replays need, in the usual order.

    A name wins over a group of the same name; ``group:entropy`` is the group.

    >>> _chosen(["linear", "replay_noise"])
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


def _describe(plan: LabPlan) -> str:
    cells = ", ".join(f"{cell.dataset} with {cell.model}" for cell in plan.cells)
    return f"{len(plan.strategies)} strategies, {len(plan.seeds)} seeds: {cells}"


def _screen() -> Screen:
    return Screen.of_stdout()


def _show(lines: Sequence[str]) -> None:
    screen = _screen()
    screen.show([line.translate(_PLAIN) for line in lines] if screen.ascii_only else lines)


def _has_screen() -> bool:
    """Say whether a browser window could open; on a server one in the terminal would take it over."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _folder_option(folder: Path) -> str:
    return "" if folder == Path("lab_out") else f" --folder {folder}"


def _folder_argument(folder: Path) -> str:
    return "" if folder == Path("lab_out") else f" {folder}"
