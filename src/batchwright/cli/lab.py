"""The commands ``batchwright lab run | report | show | list``; only ``run`` loads torch."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from .._optional import require
from .lab_plan import make_plan
from .options import Commands, add_command, count, names, positive
from .screen import Screen

if TYPE_CHECKING:
    from ..lab.runner import LabPlan

FOLDER = Path("lab_out")

_LAB = """\
Compare ways to set the batch size during training, on built-in data sets or on your own file.
Needs torch and scikit-learn: pip install 'batchwright[lab]'.
"""

_LAB_EXAMPLES = """\
  batchwright lab run --data my.csv --target label
  batchwright lab show
"""

_RUN = """\
Train every strategy on every data set and model, with several seeds, and write a report.

Choose what to train on:
  PRESET               quick, course or full; `batchwright lab list` says what each one trains
  --data and --target  your own file, with every model that fits it
  neither              continue the lab of the folder where it stopped

A strategy is a way to set the batch size. `constant` keeps it fixed and is the baseline: every other
strategy is compared with it in pairs of runs with the same seed. The learning rate is chosen first, for
the baseline, from a grid, and every strategy uses the same one.

Each run is saved as soon as it ends; Ctrl-C loses only the runs in progress.
"""

_RUN_EXAMPLES = """\
  batchwright lab run quick                                   a first look, a few minutes
  batchwright lab run course --seeds 5 --folder course_out    more seeds, narrower intervals
  batchwright lab run --data my.csv --target label            your own data, all other columns as features
  batchwright lab run --data reviews.jsonl --target stars --columns body --models gru
  batchwright lab run --data my.csv --target price --strategies linear,loss,group:entropy
                                                              two strategies and a whole group
  batchwright lab run                                         continue the lab in lab_out
"""

_REPORT = """\
Write report.html, report.md and report.csv into the folder of a lab, from the runs it has so far.
report.html is one self-contained file: send it, open it offline, print it.
"""

_SHOW = """\
Serve the report of a folder, only to this machine, and open it in the browser if there is one. While
the lab is running, the page follows it. Ctrl-C ends it.
"""

DATASETS = {
    "breast_cancer": "569 tumours, 30 columns, 2 classes",
    "diabetes": "442 patients, 10 columns; predict the progress of the disease after one year, a number",
    "digits": "1,797 handwritten digits of 8 by 8 pixels, 10 classes",
    "fashion_mnist": "70,000 pictures of clothes, 10 classes; needs the Debian package dataset-fashion-mnist",
    "python_chars": "the source of Python's standard library; predict the next character",
    "python_functions": "functions of Python's standard library; predict which of 8 groups of modules one is from",
    "wine": "178 wines, 13 columns, 3 classes",
}

MODELS = {
    "linear": "linear regression",
    "logistic": "logistic regression; for texts, on the mean of their tokens",
    "mlp": "a network of dense layers, for tables and images",
    "cnn": "a small convolutional network, for images",
    "gru": "a recurrent network, for texts",
    "transformer": "a small transformer, for texts",
    "char_lm": "a small transformer that predicts the next character",
}

_CHOOSING = """\
--strategies takes names of strategies and of groups, separated by commas: linear,loss,cyclical. The group of
a strategy is in the second column. Write group:entropy for the group entropy, because a strategy has the same name."""


def add_lab(commands: Commands) -> None:
    """Add the command ``lab`` and its own commands."""
    command = add_command(
        commands,
        "lab",
        summary="compare batch-size strategies by training, also on your own data (needs torch)",
        description=_LAB,
        examples=_LAB_EXAMPLES,
    )
    parts = command.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(parts)
    report = add_command(parts, "report", summary="write the report of a folder again", description=_REPORT)
    _add_folder(report)
    report.set_defaults(run=_report)
    _add_show(parts)
    listing = add_command(
        parts,
        "list",
        summary="list the data sets, models, strategies and presets",
        description="List the data sets, models, strategies and presets that a lab can run.",
    )
    listing.set_defaults(run=_list)


def _add_run(parts: Commands) -> None:
    command = add_command(
        parts,
        "run",
        summary="train every strategy on data sets or on your own file",
        description=_RUN,
        examples=_RUN_EXAMPLES,
    )
    command.add_argument("preset", metavar="PRESET", nargs="?", help="quick, course or full")
    _add_data_options(command)
    matrix = command.add_argument_group("what to compare")
    matrix.add_argument(
        "--strategies",
        metavar="NAMES",
        type=names,
        help="names of strategies or groups, separated by commas; group:NAME is always a group "
        "(default: all; constant is always included)",
    )
    matrix.add_argument(
        "--seeds",
        metavar="N",
        type=positive,
        help="runs of each strategy; at least 2 for a comparison (default: 3, or the number of the preset)",
    )
    work = command.add_argument_group("how to run")
    work.add_argument(
        "--folder", metavar="DIR", type=Path, default=FOLDER, help="folder for the results (default: %(default)s)"
    )
    work.add_argument(
        "--workers",
        metavar="N",
        type=count,
        help="processes; 0 runs everything in this one (default: one per processor)",
    )
    work.add_argument("--retry-failed", action="store_true", help="repeat runs that failed")
    work.add_argument("--quiet", action="store_true", help="print only the result: no progress bar")
    command.set_defaults(run=_run)


def _add_data_options(command: argparse.ArgumentParser) -> None:
    data = command.add_argument_group("a file of your own")
    data.add_argument("--data", metavar="FILE", type=Path, help=".csv, .tsv, .jsonl or .npz; all but .npz also as .gz")
    data.add_argument("--target", metavar="COLUMN", help="the column to predict")
    data.add_argument(
        "--columns",
        metavar="NAMES",
        type=names,
        help="columns to learn from, separated by commas: numbers, or one text (default: a text column called "
        "`text`, else all but the target)",
    )
    data.add_argument(
        "--task",
        choices=("classification", "regression"),
        help="what the target is (default: classes if it holds texts or at most 20 different whole numbers)",
    )
    data.add_argument(
        "--limit", metavar="ROWS", type=positive, help="use only ROWS rows, chosen at random (default: all)"
    )
    data.add_argument("--models", metavar="NAMES", type=names, help="models to train (default: all that fit)")
    data.add_argument(
        "--epochs", metavar="N", type=positive, help="passes over the data (default: 4 to 16, fewer for large data)"
    )


def _add_show(parts: Commands) -> None:
    command = add_command(parts, "show", summary="serve the report to this machine", description=_SHOW)
    _add_folder(command)
    command.add_argument("--port", metavar="N", type=count, default=0, help="port of the page (default: any free one)")
    command.add_argument("--no-browser", action="store_true", help="print the address without opening it")
    command.set_defaults(run=_show)


def _add_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, default=FOLDER, help="folder of a lab (default: %(default)s)"
    )


def _run(arguments: argparse.Namespace) -> int:
    """Train, record and report."""
    require("torch", extra="lab")
    from ..lab.runner import Lab

    plan = make_plan(arguments)
    lab = Lab(arguments.folder)
    try:
        lab.run(
            plan,
            num_workers=arguments.workers,
            progress=not arguments.quiet,
            retry_failed=arguments.retry_failed,
        )
    except KeyboardInterrupt:
        option = "" if arguments.folder == FOLDER else f" --folder {arguments.folder}"
        print(f"\nstopped; to continue: batchwright lab run{option}", file=sys.stderr)
        raise
    return _report(arguments)


def _report(arguments: argparse.Namespace) -> int:
    """Write the report of a folder and print its main observations."""
    from ..lab.observations import observe
    from ..lab.report import read_lab, write_report

    files = write_report(arguments.folder)
    observations = observe(read_lab(arguments.folder).records)
    lead = [one.sentence for one in observations if one.topic in ("scope", "overall", "cost", "no better")]
    folder = "" if arguments.folder == FOLDER else f" {arguments.folder}"
    screen = Screen.of_stdout()
    screen.show(
        [
            *(line for sentence in lead for line in ["", *screen.wrap(sentence)]),
            "",
            f"{files.html}   the page ({files.html.stat().st_size / 1e6:.1f} MB)",
            f"{files.markdown}     the same as text",
            f"{files.csv}    one line per run",
            f"to look at it: batchwright lab show{folder}",
        ]
    )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    from ..lab.report import HOST, make_server

    with make_server(arguments.folder, port=arguments.port) as server:
        address = f"http://{HOST}:{server.server_port}/"
        print(f"{address}   Ctrl-C ends it", flush=True)
        if not arguments.no_browser and _has_display():
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def _list(arguments: argparse.Namespace) -> int:
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
    return 0


def _describe(plan: LabPlan) -> str:
    cells = ", ".join(f"{cell.dataset} with {cell.model}" for cell in plan.cells)
    return f"{len(plan.strategies)} strategies, {len(plan.seeds)} seeds: {cells}"


def _has_display() -> bool:
    """Say whether a browser window can open; a browser in the terminal of a server would take it over."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
