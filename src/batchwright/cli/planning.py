"""The commands ``plan`` and ``advise``: read a file, measure it, compare groupings, print the answer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .advise import Advice, Gain, advise, caveats, recommend, snippet, verdict_of
from .compare import Comparison, Entry, Settings, compare, default_max_tokens
from .histogram import make_bins, render_bars
from .measure import LENGTHS, Measured, measure_file, summary
from .options import Commands, add_command, count, positive
from .reading import Source
from .screen import Screen, percent, render_table, times

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


_LEGEND = (
    "padding: the share of padded tokens that is padding. shapes: the number of different (examples, padded "
    "length). budget used: the mean over all batches. recurrence: the chance that two examples of a batch share "
    "one again in the next epoch."
)
_ENDS = (
    "compute-bound: the time of a step grows with its padded tokens (large models, large batches).",
    "launch-bound: every step takes the same time (small models or small batches on a GPU).",
    "Both are estimates from the lengths only. To find out which applies to you, time one step at two batch sizes: "
    "if twice the examples take the same time, you are launch-bound.",
)


def data_lines(name: str, data: Measured) -> list[str]:
    """Say what was read and what was left out."""
    left_out = [
        f"{count:,} {what}"
        for count, what in (
            (data.num_blank, "blank lines skipped"),
            (data.num_empty, "empty examples skipped"),
            (data.num_cut, "cut to --max-length"),
        )
        if count
    ]
    extra = f" ({', '.join(left_out)})" if left_out else ""
    return [f"{name}: {len(data.lengths):,} examples{extra}"]


def summary_lines(data: Measured) -> list[str]:
    """Give median, p90, p99 and maximum, one line per text of an example."""
    lines = []
    for name, lengths in data.axes.items():
        figures = summary(lengths)
        text = " · ".join(f"{key} {figures[key]:,}" for key in ("median", "p90", "p99", "max"))
        lines.append(f"{name + ' ' if name else ''}{data.unit}: {text}")
    return lines


def histogram_lines(data: Measured, screen: Screen) -> list[str]:
    """Draw a histogram for each text of an example."""
    lines: list[str] = []
    for name, lengths in data.axes.items():
        lines += [f"{name + ' ' if name else ''}length in {data.unit}", ""]
        lines += [*render_bars(make_bins(lengths), width=min(screen.width, 100)), ""]
    return lines


def budget_line(settings: Settings, reason: str) -> str:
    """Say which budget is used, and where it comes from if the user set none."""
    items = "" if settings.max_items is None else f" and {settings.max_items:,} examples"
    source = f" ({reason}; set your own with --max-tokens)" if reason else ""
    return f"budget: {settings.max_tokens:,} padded tokens{items} per batch{source}"


def comparison_lines(comparison: Comparison, screen: Screen, *, quiet: bool) -> list[str]:
    """Lay the groupings out side by side and recommend one."""
    ranks = comparison.settings.world_size > 1
    header = ["grouping", "padding", "batches", "shapes", "budget used", "recurrence"]
    header += ["ranks wait"] if ranks else []
    rows = [_row(entry, ranks) for entry in comparison.entries]
    lines = [*render_table(header, rows), ""]
    if not quiet:
        legend = _LEGEND + (" ranks wait: the share of time lost to the slowest rank." if ranks else "")
        lines += [*screen.wrap(legend), ""]
    return [*lines, *screen.wrap(recommendation(comparison))]


def recommendation(comparison: Comparison) -> str:
    """Say in one or two sentences which grouping to use and why."""
    best, shuffled = recommend(comparison), comparison.shuffled
    if verdict_of(shuffled, best) == "no":
        return (
            f"The lengths hardly vary: a fixed size of {comparison.fixed_size:,} is just as good "
            f"({percent(shuffled.padding)} padding in {shuffled.num_batches:,} batches)."
        )
    few = comparison["Buckets(count=16)"]
    text = (
        f"Use {best.name}: {percent(best.padding)} padding in {best.num_batches:,} batches. The largest safe "
        f"fixed size, {comparison.fixed_size:,}, has {percent(shuffled.padding)} in {shuffled.num_batches:,}."
    )
    frozen = comparison["Sorted()"]
    if frozen.padding < best.padding - 0.02 and best.recurrence < 0.5:
        text += f" {frozen.name} pads less, {percent(frozen.padding)}, but the same examples always share a batch."
    if few.num_shapes < best.num_shapes / 2:
        text += (
            f" If each new shape costs time (torch.compile, CUDA graphs), use {few.name}: "
            f"{few.num_shapes:,} shapes at {percent(few.padding)} padding."
        )
    return text


def advice_lines(advice: Advice, screen: Screen, *, unit: str, quiet: bool) -> list[str]:
    """Answer whether planned batches pay off, with the figures and what to set."""
    lines = [*screen.wrap(answer(advice)), ""]
    rows = [
        _gain_row(advice.shuffled, advice.against_shuffled),
        _gain_row(advice.sorted, advice.against_sorted),
        _gain_row(advice.planned, None),
    ]
    header = ["", "padding", "batches", "gain if compute-bound", "if launch-bound"]
    lines += [*render_table(header, rows), ""]
    if not quiet:
        lines += [line for end in _ENDS for line in screen.wrap(end)] + [""]
    lines += ["What to set:", "", *(f"    {line}".rstrip() for line in snippet(advice).split("\n"))]
    notes = caveats(advice)
    if unit != "tokens" and advice.verdict != "no":
        notes.insert(0, f"Counted in {unit}: pass your own --tokenizer before you copy the number.")
    if notes and not quiet:
        lines += ["", *(line for note in notes for line in screen.wrap(f"- {note}", indent="  "))]
    return lines


def answer(advice: Advice) -> str:
    """Say yes or no in one sentence."""
    gain, other, size = advice.against_shuffled, advice.against_sorted, advice.fixed_size
    if advice.verdict == "no":
        return (
            f"No. The lengths hardly vary: keep DataLoader(batch_size={size}). It has "
            f"{percent(advice.shuffled.padding)} padding in {advice.shuffled.num_batches:,} batches; planned "
            f"batches would have {percent(advice.planned.padding)} in {advice.planned.num_batches:,}."
        )
    if advice.verdict == "fewer steps only":
        return (
            f"Only if your steps are launch-bound. A fixed size of {size:,} already pads little; planned batches "
            f"use the budget better, and an epoch should be {_span(gain)} as fast. This is an estimate."
        )
    return (
        f"Yes. An epoch should be {_span(gain)} as fast as with shuffled batches of {size:,}, the largest safe "
        f"fixed size, and {_span(other)} as fast as with that size sorted by length. Both are estimates."
    )


def _span(gain: Gain) -> str:
    return f"{times(gain.low)} to {times(gain.high)}"


def _row(entry: Entry, ranks: bool) -> list[str]:
    row = [
        entry.name,
        percent(entry.padding),
        f"{entry.num_batches:,}",
        f"{entry.num_shapes:,}",
        percent(entry.budget_used),
        percent(entry.recurrence),
    ]
    return [*row, percent(entry.straggler_waste)] if ranks else row


def _gain_row(entry: Entry, gain: Gain | None) -> list[str]:
    gains = ["1", "1"] if gain is None else [times(gain.compute_bound), times(gain.launch_bound)]
    return [entry.name, percent(entry.padding), f"{entry.num_batches:,}", *gains]
