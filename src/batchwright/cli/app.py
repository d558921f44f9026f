"""The entry point: every command under one parser, and errors as one line with an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from .._version import __version__
from ..errors import ArgumentError, BatchwrightError, MissingDependencyError
from .advising import add_advising
from .demo.command import add_demo
from .doctor import add_doctor
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

No file at hand? `batchwright demo` trains a small model with and without planned batches.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 if an optional package is missing or nothing more can be printed, 2 for
        unusable input, 130 after Ctrl-C.
    """
    try:
        _check_streams()
        parser = make_parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help()
            return 0
        arguments = parser.parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough, as in `| head`
        _drop_output()
        return 1
    except BatchwrightError as error:
        _complain(error)
        return 1 if isinstance(error, MissingDependencyError) else 2
    except OSError as error:  # mostly a full disk behind standard output
        _drop_output()
        _complain(f"{error.filename or 'reading or writing failed'}: {error.strerror or error}")
        return 1
    return 0


def _check_streams() -> None:
    """Refuse a closed standard output, whose place the next file that is opened would take."""
    if sys.stderr is None:  # print would fall back on standard output
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        raise ArgumentError("standard output is closed; send it to a file, or to /dev/null")


def _complain(problem: object) -> None:
    # A message that quotes another package may have several lines.
    print("batchwright: error:", " ".join(str(problem).split()), file=sys.stderr)


def _drop_output() -> None:
    """Send what cannot be printed nowhere, or Python would try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # a stand-in for standard output has no number
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
