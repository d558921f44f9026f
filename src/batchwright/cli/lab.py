"""The commands ``batchwright lab run | report | show | list``, and the plan that the options of ``run`` ask for."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._optional import require
from ..errors import ArgumentError
from .options import Commands, add_command, add_option, count, names, port, positive, spelt_as_options
from .screen import Screen

if TYPE_CHECKING:
    from ..lab.runner import Cell, LabPlan

FOLDER = Path("lab_out")
# Enough that differences between strategies of about the spread between seeds are found.
_NUM_SEEDS = 6
# The model of a user's file, if several fit: the first of these.
_MODELS = ("mlp", "transformer", "char_lm")
# A run on a user's file sees about this many examples; its number of epochs is a multiple of 4 within these bounds.
_NUM_EXAMPLES = 200_000
_EPOCHS = (4, 16)

# What is printed of the observations if nothing could be compared; else the verdict says it all.
_WITHOUT_VERDICT = ("scope", "overall", "cost", "no better")

_LAB = """\
Compare batch-size strategies by training, also on your own data (needs torch).

A strategy is a way to set the batch size during training. The lab trains each of them several times, on
built-in data sets or on your own file, and reports which were better, by how much, and how sure that is.
Needs torch and scikit-learn: pip install 'batchwright[lab]'.
"""

_LAB_EXAMPLES = """\
  batchwright lab list                                what there is to train
  batchwright lab run quick                           a first look, about a minute
  batchwright lab run --data my.csv --target label
  batchwright lab show
"""

_RUN = """\
Train every strategy on data sets or on your own file, and write a report.

Choose what to train on:
  PRESET               quick, course or full; `batchwright lab list` says what each one trains
  --data and --target  your own file: a handful of strategies, one model that fits it
  neither              continue the lab of the folder where it stopped

A strategy is a way to set the batch size. `constant` keeps it fixed and is the baseline: every other
strategy is compared with it, on every data set and model, in pairs of runs with the same seed. First every
strategy gets its own learning rate: all of them by the same number of runs, by the final validation loss,
on seeds that are not compared. Before it starts, the lab says how many runs there are and about how many
minutes they take.

Each run is saved as soon as it ends; Ctrl-C loses only the runs in progress.
"""

_RUN_EXAMPLES = """\
  batchwright lab run quick                                   a first look, about a minute
  batchwright lab run course --seeds 9 --folder course_out    more seeds, narrower intervals
  batchwright lab run --data my.csv --target label            your own data, all other columns as features
  batchwright lab run --data reviews.jsonl --target stars --columns body --models gru
  batchwright lab run --data my.csv --target price --strategies linear,loss,group:entropy
                                                              a strategy and two whole groups
  batchwright lab run                                         continue the lab in lab_out
"""

_REPORT = """\
Write the report of a lab again.

Writes report.html, report.md and report.csv into the folder of the lab, from the runs it has so far.
report.html is one self-contained file: send it, open it offline, print it.
"""

_SHOW = """\
Show the report of a lab in the browser.

Serves the page only to this machine, and opens it if there is a browser. While the lab is running, the
page follows it. Ctrl-C ends it.
"""

_LIST = "List the data sets, models, strategies and presets that a lab can run."

DATASETS = {
    "breast_cancer": "569 tumours, 30 columns, 2 classes",
    "diabetes": "442 patients, 10 columns; predict the progress of the disease after one year, a number",
    "digits": "1,797 handwritten digits of 8 by 8 pixels, 10 classes",
    "fashion_mnist": "12,500 of 70,000 pictures of clothes, 10 classes; needs the Debian package dataset-fashion-mnist",
    "fashion_mnist_7x7": "the same pictures in 7 by 7 pixels",
    "friedman": "10,000 rows of a formula, 10 columns of which 5 count; predict a number",
    "friedman_wide": "the same rows and numbers with 490 more columns of noise",
    "python_chars": "the source of Python's standard library; predict the next character",
    "python_docstrings": "docstrings of Python's standard library; predict which of 8 groups of modules one is from",
    "python_functions": "functions of Python's standard library; predict which of 8 groups of modules one is from",
    "python_paragraphs": "paragraphs of Python's standard library as characters; predict which of 8 groups",
    "python_words": "the source of Python's standard library; predict the next name, number or symbol",
    "waveform": "10,000 rows of a formula, 21 columns, 3 classes that overlap",
    "waveform_wide": "the same rows and classes with 479 more columns of noise",
    "wine": "178 wines, 13 columns, 3 classes",
}

MODELS = {
    "linear": "linear regression",
    "logistic": "logistic regression; for texts, on the mean of their tokens",
    "mlp": "a network of dense layers, for tables and images",
    "cnn": "a small convolutional network, for images",
    "cnn_batchnorm": "the same with BatchNorm, so that examples of a batch depend on each other",
    "gru": "a recurrent network, for texts",
    "transformer": "a small transformer, for texts",
    "char_lm": "a small transformer that predicts the next character or word",
    "gru_lm": "a recurrent network that predicts the next character or word",
}

_CHOOSING = """\
--strategies takes names of strategies and of groups, separated by commas: linear,loss,cyclical. The group of
a strategy is in the second column. Write group:entropy for the group entropy, because a strategy has the same name."""


def add_lab(commands: Commands) -> None:
    """Add the command ``lab`` and its own commands."""
    command = add_command(commands, "lab", _LAB, _LAB_EXAMPLES)
    parts = command.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run_options(add_command(parts, "run", _RUN, _RUN_EXAMPLES, run=_run))
    report = add_command(parts, "report", _REPORT, run=_report)
    show = add_command(parts, "show", _SHOW, run=_show)
    for one in (report, show):
        about = f"folder of a lab (default: {FOLDER})"
        one.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=FOLDER, help=about)
    add_option(show, "--port N", "port of the page; 0 takes any free one", type=port, default=0)
    add_option(show, "--no-browser", "print the address without opening it")
    add_command(parts, "list", _LIST, run=_list)


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "preset", metavar="PRESET", nargs="?", help="a ready-made choice of data sets and models: quick, course or full"
    )
    data = command.add_argument_group("a file of your own")
    add_option(data, "--data FILE", ".csv, .tsv, .jsonl or .npz; all but .npz also as .gz", type=Path)
    add_option(data, "--target COLUMN", "the column to predict")
    columns = (
        "columns to learn from, separated by commas: numbers, or one text (default: a text column called `text`, "
        "else all but the target)"
    )
    add_option(data, "--columns NAMES", columns, type=names)
    task = "what the target is (default: classes if it holds texts or at most 20 different whole numbers)"
    data.add_argument("--task", choices=("classification", "regression"), help=task)
    add_option(data, "--limit ROWS", "use only ROWS rows, chosen at random (default: all)", type=positive)
    add_option(
        data, "--models NAMES", "models to train, separated by commas, or all (default: one that fits)", type=names
    )
    add_option(data, "--epochs N", "passes over the data (default: 4 to 16, fewer for large data)", type=positive)
    matrix = command.add_argument_group("what to compare")
    chosen = (
        "names of strategies or groups, separated by commas; group:NAME is always a group (default: those of the "
        "preset, or a handful for a file; constant is always included)"
    )
    add_option(matrix, "--strategies NAMES", chosen, type=names)
    add_option(matrix, "--leave-out NAMES", "data sets of the preset to leave out, separated by commas", type=names)
    seeds = "runs of each strategy; at least 2 for a comparison (default: 6, or the number of the preset)"
    add_option(matrix, "--seeds N", seeds, type=positive)
    times = (
        "what an update takes on a GPU, for simulated seconds: eager, graphs, or milliseconds per update and per "
        "example, e.g. 70,0.08 (default: eager)"
    )
    add_option(matrix, "--time-model NAME", times)
    work = command.add_argument_group("how to run")
    add_option(work, "--folder DIR", "folder for the results", type=Path, default=FOLDER)
    add_option(work, "--workers N", "processes; 0 runs everything in this one (default: one per processor)", type=count)
    add_option(work, "--retry-failed", "repeat runs that failed")
    add_option(work, "--quiet", "print only the result: no progress bar")


def _run(arguments: argparse.Namespace) -> None:
    """Train, record and report."""
    require("torch", extra="lab")
    from ..lab.runner import Lab

    plan, progress = make_plan(arguments), not arguments.quiet
    lab, work = Lab(arguments.folder), {"num_workers": arguments.workers, "retry_failed": arguments.retry_failed}
    if progress:
        print(f"lab: {lab.forecast(plan, **work)}", file=sys.stderr, flush=True)
    try:
        lab.run(plan, progress=progress, **work)
    except KeyboardInterrupt:
        option = "" if arguments.folder == FOLDER else f" --folder {arguments.folder}"
        print(f"\nstopped; to continue: batchwright lab run{option}", file=sys.stderr)
        raise
    _report(arguments)


def _report(arguments: argparse.Namespace) -> None:
    """Write the report of a folder and print its main observations."""
    from ..lab.observations import observe
    from ..lab.report import read_lab, write_report

    files = write_report(arguments.folder)
    screen = Screen.of_stdout()
    found = observe(read_lab(arguments.folder).records)
    sentences = [one.sentence for one in found if one.topic in _WITHOUT_VERDICT]
    for sentence in files.verdict if any(one.topic == "headline" for one in found) else sentences:
        screen.show(["", *screen.wrap(sentence)])
    folder = "" if arguments.folder == FOLDER else f" {arguments.folder}"
    screen.show(
        [
            "",
            f"{files.html}   the page ({files.html.stat().st_size / 1e6:.1f} MB)",
            f"{files.markdown}     the same as text, with intervals and p-values",
            f"{files.csv}    one line per run",
            f"to look at it: batchwright lab show{folder}",
        ]
    )


def _show(arguments: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    from ..lab.report import HOST, make_server

    with make_server(arguments.folder, port=arguments.port) as server, suppress(KeyboardInterrupt):
        address = f"http://{HOST}:{server.server_port}/"
        print(f"{address}   Ctrl-C ends it", flush=True)
        if not arguments.no_browser and _has_display():
            webbrowser.open(address)
        server.serve_forever()


def _list(arguments: argparse.Namespace) -> None:
    """Print everything that a lab can run, one line each."""
    from ..lab import presets, strategies

    found = [strategies.get(name) for name in strategies.names()]
    sections = {
        "data sets": DATASETS,
        "models": MODELS,
        "strategies": {one.name: f"{one.group:<12}{one.about}" for one in found},
        "presets": {name: _describe(presets.get(name)) for name in presets.names()},
    }
    screen = Screen.of_stdout()
    for title, rows in sections.items():
        width = max(map(len, rows))
        screen.show([title, "─" * len(title)])
        for name, text in rows.items():
            screen.show(screen.wrap(f"{name:<{width}}  {text}", indent=" " * (width + 2)))
        screen.show([""])
    screen.show(screen.wrap(_CHOOSING))


def _describe(plan: LabPlan) -> str:
    cells = ", ".join(f"{cell.dataset} with {cell.model}" for cell in plan.cells)
    return f"{len(plan.strategies)} strategies, {len(plan.seeds)} seeds: {cells}"


def _has_display() -> bool:
    """Say whether a browser window can open; a browser in the terminal of a server would take it over."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


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
    given = (arguments.seeds, arguments.strategies, arguments.time_model, arguments.leave_out)
    if any(one is not None for one in given) or not (arguments.folder / "lab.json").is_file():
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
    from ..lab.strategies import BASELINE, GROUPS, get
    from ..lab.strategies import names as all_names

    known = all_names()
    found = {BASELINE}
    for name in wanted:
        group = name.removeprefix("group:")
        if group in GROUPS and (group != name or name not in known):
            found.update(other for other in known if get(other).group == group)
        elif name == "all":
            found.update(known)
        elif group != name:
            raise ArgumentError(f"no group {group!r}; there are {', '.join(GROUPS)}")
        else:
            found.add(get(name).name)
    found.update(source for name in list(found) if (source := get(name).replays) is not None)
    order = {name: place for place, name in enumerate(known)}
    return tuple(sorted(found, key=lambda name: (order.get(name, len(order)), name)))


def _changed(plan: LabPlan, arguments: argparse.Namespace) -> LabPlan:
    """Return a plan with the data sets, strategies, seeds and time model of the options."""
    from ..lab.update_time import named

    if arguments.leave_out is not None:
        plan = replace(plan, cells=_without(plan.cells, arguments.leave_out))
    if arguments.strategies is not None:
        plan = replace(plan, strategies=chosen_strategies(arguments.strategies))
    if arguments.seeds is not None:
        plan = replace(plan, seeds=tuple(range(arguments.seeds)))
    if arguments.time_model is not None:
        plan = replace(plan, update_time=named(arguments.time_model))
    return plan


def _without(cells: tuple[Cell, ...], names: Sequence[str]) -> tuple[Cell, ...]:
    there = dict.fromkeys(cell.dataset for cell in cells)
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ArgumentError(f"--leave-out {', '.join(unknown)}: the data sets are {', '.join(there)}")
    return tuple(cell for cell in cells if cell.dataset not in names)


def _refuse_file_options(arguments: argparse.Namespace) -> None:
    given = [name for name in ("target", "columns", "task", "limit", "models", "epochs") if getattr(arguments, name)]
    if given:
        raise ArgumentError(f"--{given[0]} is for a file of your own; add --data FILE")


def _plan_of_file(arguments: argparse.Namespace) -> LabPlan:
    from ..lab import datasets, strategies
    from ..lab.models import models_for
    from ..lab.presets import NUM_POINTS
    from ..lab.runner import Cell, LabPlan

    if arguments.target is None:
        raise ArgumentError(f"--data {arguments.data} needs --target COLUMN, the column to predict")
    name = dataset_name(arguments.data, datasets.names())
    options: dict[str, Any] = {"path": str(arguments.data.expanduser().resolve())}
    for option in ("target", "columns", "task", "limit"):
        if (value := getattr(arguments, option)) is not None:
            options[option] = value
    # Loaded before anything is written: a wrong column must not leave a folder with a plan that cannot run.
    with spelt_as_options():
        data = datasets.load(name, **options)
    fitting = models_for(data)
    wanted = arguments.models or [next((name for name in _MODELS if name in fitting), fitting[0])]
    wanted = fitting if wanted == ["all"] else wanted
    unfit = [model for model in wanted if model not in fitting]
    if unfit:
        raise ArgumentError(f"--models {', '.join(unfit)}: {arguments.data.name} takes {', '.join(fitting)}")
    epochs = arguments.epochs or default_epochs(len(data.train))
    cells = tuple(
        Cell(
            dataset=name,
            model=model,
            num_epochs=epochs,
            optimizer="sgd" if model in ("linear", "logistic", "mlp") else "adam",
            data=options,
            options=NUM_POINTS,
        )
        for model in dict.fromkeys(wanted)
    )
    return LabPlan(name=name, cells=cells, strategies=strategies.HANDFUL, seeds=tuple(range(_NUM_SEEDS)))


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
