"""The options of the command line, with help that teaches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import batchwright as bw

from .lab_options import add_lab
from .numbers import count as _count
from .numbers import positive as _positive
from .serve import add_serve

Run: TypeAlias = Callable[[argparse.Namespace], int]

_DESCRIPTION = """\
The right batch at every step: batches of variable-length data without the padding.

  plan     show the lengths of a file and how each grouping would batch them
  advise   say whether planned batches would pay for a file, and what to set
  doctor   measure this machine: what a new shape costs, which batches are too small (needs torch)
  lab      compare batch-size strategies by training, on your own data too (needs torch)
  serve    put a function behind HTTP and run its requests in batches
  demo     train a small model with and without planned batches (needs torch)
"""

_PLAN = """\
Show the lengths of a file and how each grouping would batch them under one budget.

FILE is .jsonl, .csv, .tsv or .txt, each also .gz: one example a line.
"""

_PLAN_EXAMPLES = """\
examples:
  batchwright plan reviews.jsonl                       the field `text`, or the only text field
  batchwright plan reviews.csv --field body --max-tokens 16384
  batchwright plan en-de.tsv.gz --pairs                source and target in columns 1 and 2
  batchwright plan train.jsonl --tokenizer ./my-model --max-length 512 --pad-multiple-of 8
  batchwright plan lengths.txt --tokenizer lengths     one number a line
  batchwright plan train.jsonl --json > plan.json
"""

_ADVISE = """\
Say whether planned batches would pay for this data: the expected speed-up against the largest fixed
batch size that cannot exceed the budget, as a range from a compute-bound to a launch-bound estimate,
and the lines to copy.

FILE is .jsonl, .csv, .tsv or .txt, each also .gz: one example a line.
"""

_ADVISE_EXAMPLES = """\
examples:
  batchwright advise reviews.jsonl
  batchwright advise en-de.tsv.gz --pairs --tokenizer ./my-model --max-tokens 10240
  batchwright advise train.jsonl --max-tokens 16384 --json
"""

_DOCTOR = """\
Measure this machine and say what that means for batches:

  memory      what this process can have, and what holds the rest
  attention   which kernels run here, and what the first step of a new batch shape costs with each;
              some plan anew for every shape, and then few shapes or another kernel pay
  sizes       the batch below which a step takes as long as its kernels take to launch, and the one
              above which throughput hardly grows

About half a minute on a GPU and on a CPU. It trains small models of its own and changes nothing.
"""

_DOCTOR_EXAMPLES = """\
examples:
  batchwright doctor
  batchwright doctor --quick            a few seconds, rougher numbers
  batchwright doctor --json > machine.json
"""

_DEMO = """\
Train a small language model on the functions of Python's standard library with fixed-size and with
planned batches, and write one page that compares them. Needs torch, no network; about two minutes.
"""


def make_parser(*, plan: Run, advise: Run, doctor: Run, demo: Run) -> argparse.ArgumentParser:
    """Return the parser; each command leaves its function in ``run``."""
    parser = argparse.ArgumentParser(
        prog="batchwright",
        description=_DESCRIPTION,
        epilog="`batchwright COMMAND --help` shows the options and examples of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"batchwright {bw.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, run, description, examples, line in (
        ("plan", plan, _PLAN, _PLAN_EXAMPLES, "compare groupings of a file under one budget"),
        ("advise", advise, _ADVISE, _ADVISE_EXAMPLES, "say whether planned batches would pay for a file"),
    ):
        command = commands.add_parser(
            name,
            help=line,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_input_options(command)
        command.set_defaults(run=run)
    _add_doctor(commands, doctor)
    add_lab(commands)
    add_serve(commands)
    _add_demo(commands, demo)
    return parser


def _add_input_options(command: argparse.ArgumentParser) -> None:
    """Add the options that say what to read, how to count it, and the budget."""
    command.add_argument("file", metavar="FILE", type=Path, help="the data: .jsonl, .csv, .tsv or .txt, also .gz")
    data = command.add_argument_group("what to read")
    data.add_argument(
        "--field",
        metavar="NAME",
        help="field (jsonl), column name (csv, tsv with a header) or column number from 1 (tsv); with "
        "--pairs two of them, source,target (default: `text` or the only text field; tsv: 1)",
    )
    data.add_argument("--pairs", action="store_true", help="an example is a source and a target, padded separately")
    data.add_argument("--limit", metavar="ROWS", type=_positive, help="read the first ROWS examples (default: all)")
    count = command.add_argument_group("how to count")
    count.add_argument(
        "--tokenizer",
        metavar="WHAT",
        default="words",
        help="words, chars, bytes; a tokenizer.json; a folder saved by transformers; module:function, "
        "called with a text; or lengths, where the field holds numbers or lists of token ids "
        "(default: %(default)s)",
    )
    count.add_argument(
        "--max-length",
        metavar="N",
        type=_positive,
        help="count longer texts as N, as a model that cuts them (default: no cut)",
    )
    budget = command.add_argument_group("the budget and the plan")
    budget.add_argument(
        "--max-tokens",
        metavar="N",
        type=_positive,
        help="padded tokens a batch may hold (default: 64 times the p99 length, less for small data)",
    )
    budget.add_argument(
        "--max-items", metavar="N", type=_positive, help="examples a batch may hold (default: no limit)"
    )
    budget.add_argument(
        "--pad-multiple-of",
        metavar="N",
        type=_positive,
        default=1,
        help="pad lengths to a multiple of N (default: %(default)s)",
    )
    budget.add_argument(
        "--world-size",
        metavar="N",
        type=_positive,
        default=1,
        help="ranks that share the batches (default: %(default)s)",
    )
    budget.add_argument(
        "--seed", metavar="N", type=_count, default=0, help="seed of the shuffles (default: %(default)s)"
    )
    output = command.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    output.add_argument("--quiet", action="store_true", help="print the result only: no histogram, notes or progress")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser], doctor: Run) -> None:
    command = commands.add_parser(
        "doctor",
        help="measure this machine and say what to set (needs torch)",
        description=_DOCTOR,
        epilog=_DOCTOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--quick", action="store_true", help="fewer shapes and sizes: a few seconds")
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    command.set_defaults(run=doctor)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser], demo: Run) -> None:
    command = commands.add_parser(
        "demo",
        help="train a small model with and without planned batches (needs torch)",
        description=_DEMO,
        epilog="examples:\n  batchwright demo\n  batchwright demo --quick --output /tmp/demo\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("demo_out"),
        help="folder for index.html (default: %(default)s)",
    )
    command.add_argument("--quick", action="store_true", help="a few seconds of training, to see that it runs")
    command.set_defaults(run=demo)
