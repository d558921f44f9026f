"""The command line: ``batchwright plan FILE``, ``advise FILE``, ``doctor``, ``lab``, ``serve``, ``demo``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ._cli.advise import advise
from ._cli.compare import Settings, compare, default_max_tokens
from ._cli.measure import Measured, measure_file
from ._cli.options import make_parser
from ._cli.reading import Source
from ._cli.screen import Screen
from ._cli.show import (
    advice_lines,
    budget_line,
    comparison_lines,
    data_lines,
    histogram_lines,
    recommendation,
    summary_lines,
)
from ._cli.tokenizer import LENGTHS
from ._optional import require
from .errors import BatchwrightError, MissingDependencyError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit code: 0; 1 where an optional package is missing; 2 for unusable input; 130 after Ctrl-C.
    """
    arguments = make_parser(plan=_plan, advise=_advise, doctor=_doctor, demo=_demo).parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BatchwrightError as error:
        print(f"batchwright: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, MissingDependencyError) else 2
    return code


def _plan(arguments: argparse.Namespace) -> int:
    data, settings, reason = _inputs(arguments)
    comparison = compare(data.lengths, settings)
    if arguments.json:
        figures = {
            "data": data.to_dict(),
            **comparison.to_dict(),
            "recommendation": recommendation(comparison),
        }
        print(json.dumps(figures, indent=2))
        return 0
    screen = Screen.of_stdout()
    if not arguments.quiet:
        screen.show([*data_lines(arguments.file.name, data), ""])
        screen.show([*histogram_lines(data, screen), *summary_lines(data), ""])
        screen.show([budget_line(settings, reason), ""])
    screen.show(comparison_lines(comparison, screen, quiet=arguments.quiet))
    return 0


def _advise(arguments: argparse.Namespace) -> int:
    data, settings, reason = _inputs(arguments)
    advice = advise(data.lengths, settings)
    if arguments.json:
        print(json.dumps({"data": data.to_dict(), **advice.to_dict()}, indent=2))
        return 0
    screen = Screen.of_stdout()
    if not arguments.quiet:
        screen.show([*data_lines(arguments.file.name, data), *summary_lines(data)])
        screen.show([budget_line(settings, reason), ""])
    screen.show(advice_lines(advice, screen, unit=data.unit, quiet=arguments.quiet))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    require("torch", extra="torch")
    from ._doctor.advice import advise as advise_on
    from ._doctor.run import examine
    from ._doctor.show import advice_lines as numbered
    from ._doctor.show import findings_lines

    findings = examine(quick=arguments.quick, progress=sys.stderr.isatty() and not arguments.json)
    found = advise_on(findings)
    if arguments.json:
        print(json.dumps({**findings.to_dict(), "advice": [vars(advice) for advice in found]}, indent=2))
        return 0
    screen = Screen.of_stdout()
    screen.show([*findings_lines(findings, screen), *numbered(found, screen)])
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    require("torch", extra="torch")
    from ._demo.run import run_demo

    run_demo(arguments.output, quick=arguments.quick)
    return 0


def _inputs(arguments: argparse.Namespace) -> tuple[Measured, Settings, str]:
    """Read and measure the file, and settle the budget; the text says where a chosen budget comes from."""
    source = Source(
        path=arguments.file,
        field=arguments.field,
        pairs=arguments.pairs,
        limit=arguments.limit,
        holds_lengths=arguments.tokenizer == LENGTHS,
    )
    data = measure_file(
        source,
        tokenizer=arguments.tokenizer,
        max_length=arguments.max_length,
        progress=sys.stderr.isatty() and not arguments.quiet,
    )
    multiple = arguments.pad_multiple_of
    max_tokens, reason = arguments.max_tokens, ""
    if max_tokens is None:
        max_tokens, reason = default_max_tokens(data.lengths, pad_multiple_of=multiple)
    settings = Settings(
        max_tokens=max_tokens,
        max_items=arguments.max_items,
        pad_multiple_of=multiple,
        seed=arguments.seed,
        world_size=arguments.world_size,
    )
    return data, settings, reason
