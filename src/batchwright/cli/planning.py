"""The commands ``plan`` and ``advise``: read a file, measure it, compare groupings, print the answer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .advise import advise
from .compare import Settings, compare, default_max_tokens
from .measure import LENGTHS, Measured, measure_file
from .options import Commands, add_command, count, positive
from .reading import Source
from .screen import Screen
from .show import (
    advice_lines,
    budget_line,
    comparison_lines,
    data_lines,
    histogram_lines,
    recommendation,
    summary_lines,
)

_FILE = "FILE is .jsonl, .csv, .tsv or .txt, each also as .gz, with one example per line."

_PLAN = f"""\
Show how long the examples of a file are, and how each grouping would batch them under one budget:
how much padding it leaves, how many batches and shapes it makes, and how often examples meet again.

{_FILE}
"""

_PLAN_EXAMPLES = """\
  batchwright plan reviews.jsonl                       the field `text`, or the only text field
  batchwright plan reviews.csv --field body --max-tokens 16384
  batchwright plan en-de.tsv.gz --pairs                source and target in columns 1 and 2
  batchwright plan train.jsonl --tokenizer ./my-model --max-length 512 --pad-multiple-of 8
  batchwright plan lengths.txt --tokenizer lengths     one number per line
  batchwright plan train.jsonl --json > plan.json
"""

_ADVISE = f"""\
Say whether planned batches would pay off for a file, and print the lines to copy.

The baseline is the largest fixed batch size that can never exceed the budget. The expected speed-up is a
range: one end assumes that a step takes longer the more padded tokens it has (compute-bound), the other
that every step takes the same time (launch-bound).

{_FILE}
"""

_ADVISE_EXAMPLES = """\
  batchwright advise reviews.jsonl
  batchwright advise en-de.tsv.gz --pairs --tokenizer ./my-model --max-tokens 10240
  batchwright advise train.jsonl --max-tokens 16384 --json
"""


def add_planning(commands: Commands) -> None:
    """Add the commands ``plan`` and ``advise``, which take the same options."""
    plan = add_command(
        commands,
        "plan",
        summary="show the lengths of a file and how each grouping would batch them",
        description=_PLAN,
        examples=_PLAN_EXAMPLES,
    )
    advice = add_command(
        commands,
        "advise",
        summary="say whether planned batches would pay off for a file, and what to set",
        description=_ADVISE,
        examples=_ADVISE_EXAMPLES,
    )
    for command, run in ((plan, _plan), (advice, _advise)):
        _add_options(command)
        command.set_defaults(run=run)


def _add_options(command: argparse.ArgumentParser) -> None:
    """Add the options that both commands take."""
    command.add_argument("file", metavar="FILE", type=Path, help="the data: .jsonl, .csv, .tsv or .txt, also .gz")
    _add_reading_options(command)
    _add_budget_options(command)
    output = command.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    output.add_argument(
        "--quiet", action="store_true", help="print only the result: no histogram, notes or progress bar"
    )


def _add_reading_options(command: argparse.ArgumentParser) -> None:
    data = command.add_argument_group("what to read")
    data.add_argument(
        "--field",
        metavar="NAME",
        help="field (jsonl), column name (csv, tsv with a header) or column number from 1 (tsv); with "
        "--pairs two of them, source,target (default: `text` or the only text field; tsv: 1)",
    )
    data.add_argument("--pairs", action="store_true", help="each example has a source and a target, padded separately")
    data.add_argument("--limit", metavar="ROWS", type=positive, help="read only the first ROWS examples (default: all)")
    counting = command.add_argument_group("how to count")
    counting.add_argument(
        "--tokenizer",
        metavar="WHAT",
        default="words",
        help="words, chars or bytes; a tokenizer.json; a folder saved by transformers; module:function, "
        "called with a text; or lengths, if the field holds numbers or lists of token ids "
        "(default: %(default)s)",
    )
    counting.add_argument(
        "--max-length",
        metavar="N",
        type=positive,
        help="count longer texts as N, for a model that cuts them (default: no cut)",
    )


def _add_budget_options(command: argparse.ArgumentParser) -> None:
    budget = command.add_argument_group("the budget and the plan")
    budget.add_argument(
        "--max-tokens",
        metavar="N",
        type=positive,
        help="padded tokens per batch (default: 64 times the p99 length, less for small data)",
    )
    budget.add_argument("--max-items", metavar="N", type=positive, help="examples per batch (default: no limit)")
    budget.add_argument(
        "--pad-multiple-of",
        metavar="N",
        type=positive,
        default=1,
        help="pad lengths to a multiple of N (default: %(default)s)",
    )
    budget.add_argument(
        "--world-size",
        metavar="N",
        type=positive,
        default=1,
        help="number of ranks that share the batches (default: %(default)s)",
    )
    budget.add_argument(
        "--seed", metavar="N", type=count, default=0, help="seed of the shuffles (default: %(default)s)"
    )


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
