"""The options of ``batchwright lab``, with help that teaches."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import lab
from .numbers import count, positive

FOLDER = Path("lab_out")

_LAB = """\
Compare ways to set the batch size during training, on ready data sets or on a file of your own.
Needs torch and scikit-learn: pip install 'batchwright[lab]'.

  run      train every strategy on every data set and model, with several seeds
  report   write the report of a folder again: report.html, report.md, report.csv
  show     serve the report on this machine, also while the lab is at work
  list     name the data sets, models, strategies and presets
"""

_LAB_EXAMPLES = """\
from your own file to a report:
  batchwright lab run --data my.csv --target label
  batchwright lab show
"""

_RUN = """\
Train every strategy on every data set and model with several seeds, and write a report.

PRESET is quick, course or full (see `batchwright lab list`). Without one, give --data and --target: the
models that fit your file are trained. Without either, the lab of the folder goes on where it stopped.
Each run is recorded as it ends; Ctrl-C loses no more than the runs at work.

The strategy `constant` keeps the batch size and is what all others are compared with, in pairs of runs
with the same seed. Its learning rate is chosen first, from a grid, and is the same for every strategy.
"""

_RUN_EXAMPLES = """\
examples:
  batchwright lab run quick                                   a first look, a few minutes
  batchwright lab run course --seeds 5 --folder course_out    more seeds, narrower intervals
  batchwright lab run --data my.csv --target label            your own data, all other columns as features
  batchwright lab run --data reviews.jsonl --target stars --columns body --models gru
  batchwright lab run --data my.csv --target price --strategies linear,loss,group:entropy
                                                              names of strategies, or of whole groups
  batchwright lab run                                         go on with the lab in lab_out
"""

_REPORT = """\
Write report.html, report.md and report.csv into the folder of a lab, from the runs it has so far.
report.html needs nothing else: send it, open it without a network, print it.
"""

_SHOW = """\
Serve the report of a folder on this machine alone, and open it where there is a browser. While the lab
is at work the page follows it. Ctrl-C ends it.
"""


def add_lab(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``lab`` and what follows it."""
    command = _add(commands, "lab", "compare batch-size strategies by training (needs torch)", _LAB, _LAB_EXAMPLES)
    parts = command.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(parts)
    report = _add(parts, "report", "write the report of a folder again", _REPORT, "")
    _add_folder(report)
    report.set_defaults(run=lab.report)
    _add_show(parts)
    listing = _add(parts, "list", "name the data sets, models, strategies and presets", "What a lab can run.", "")
    listing.set_defaults(run=lab.list_all)


def _add_run(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _add(parts, "run", "train every strategy on data sets or on a file", _RUN, _RUN_EXAMPLES)
    command.add_argument("preset", metavar="PRESET", nargs="?", help="quick, course or full")
    data = command.add_argument_group("a file of your own")
    data.add_argument("--data", metavar="FILE", type=Path, help=".csv, .tsv, .jsonl or .npz; all but .npz also .gz")
    data.add_argument("--target", metavar="COLUMN", help="the column to predict")
    data.add_argument(
        "--columns",
        metavar="NAMES",
        type=_names,
        help="columns to learn from, with commas between: numbers, or one text (default: a text column called "
        "`text`, else all but the target)",
    )
    data.add_argument(
        "--task",
        choices=("classification", "regression"),
        help="what the target is (default: texts and up to 20 whole numbers are classes)",
    )
    data.add_argument("--limit", metavar="ROWS", type=positive, help="take so many rows, at random (default: all)")
    data.add_argument("--models", metavar="NAMES", type=_names, help="models to train (default: all that fit)")
    data.add_argument(
        "--epochs", metavar="N", type=positive, help="passes over the data (default: 4 to 16, fewer for large data)"
    )
    matrix = command.add_argument_group("what to compare")
    matrix.add_argument(
        "--strategies",
        metavar="NAMES",
        type=_names,
        help="strategies or groups of them, with commas between, e.g. linear,loss,group:entropy; constant is always "
        "there (default: all)",
    )
    matrix.add_argument(
        "--seeds",
        metavar="N",
        type=positive,
        help="runs of each, 2 or more to tell anything (default: 3, or the preset's)",
    )
    work = command.add_argument_group("how to run")
    work.add_argument(
        "--folder", metavar="DIR", type=Path, default=FOLDER, help="for the results (default: %(default)s)"
    )
    work.add_argument(
        "--workers", metavar="N", type=count, help="processes; 0 runs all in this one (default: one a processor)"
    )
    work.add_argument("--retry-failed", action="store_true", help="make runs again that failed")
    work.add_argument("--quiet", action="store_true", help="print the result only: no progress")
    command.set_defaults(run=lab.run)


def _add_show(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _add(parts, "show", "serve the report on this machine", _SHOW, "")
    _add_folder(command)
    command.add_argument(
        "--port", metavar="N", type=count, default=0, help="port of the page (default: any that is free)"
    )
    command.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    command.set_defaults(run=lab.show)


def _add_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, default=FOLDER, help="of a lab (default: %(default)s)"
    )


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, line: str, text: str, examples: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=line, description=text, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _names(text: str) -> list[str]:
    """Read names with commas between them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"needs names with commas between, got {text!r}")
    return names
