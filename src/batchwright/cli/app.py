"""The entry point: every command under one parser, and errors as one line with an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import BatchwrightError, MissingDependencyError
from .advising import add_advising
from .demo.command import add_demo
from .doctor.command import add_doctor
from .lab import add_lab
from .options import Parser
from .planning import add_planning
from .serve import add_serve

_DESCRIPTION = """\
The right batch at every step: batches of variable-length data with little padding.

Start with your own file:
  batchwright plan train.jsonl      how long the examples are, and how each grouping would batch them
  batchwright advise train.jsonl    whether planned batches pay off, against what, and the lines to copy
  batchwright doctor                what this machine means for batches
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 if an optional package is missing, 2 for unusable input, 130 after Ctrl-C.
    """
    arguments = make_parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BatchwrightError as error:
        # A message that quotes another package may have several lines.
        print("batchwright: error:", " ".join(str(error).split()), file=sys.stderr)
        return 1 if isinstance(error, MissingDependencyError) else 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; each command leaves the function that runs it in ``run``."""
    parser = Parser(
        prog="batchwright",
        description=_DESCRIPTION,
        epilog="`batchwright COMMAND --help` shows the options and examples of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"batchwright {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_planning, add_advising, add_doctor, add_lab, add_serve, add_demo):
        add(commands)
    return parser
