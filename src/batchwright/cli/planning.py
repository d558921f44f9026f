"""The commands ``plan`` and ``advise``: read a file, measure it, compare groupings, print the answer."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from .compare import (
    WORTH,
    Advice,
    Comparison,
    Entry,
    Gain,
    Settings,
    advise,
    compare,
    default_max_tokens,
    recommend,
    verdict_of,
)
from .lengths import LENGTHS, Measured, make_bins, measure_file, render_bars, summary
from .options import Commands, add_command, add_option, count, positive
from .reading import Source
from .screen import Screen, percent, render_table, times

# With fewer batches, the last ones, only partly filled, distort every figure.
_FEW_BATCHES = 20

_FILE = "FILE is .jsonl, .csv, .tsv or .txt, each also as .gz, with one example per line."

_PLAN = f"""\
Show the lengths of a file and how each grouping would batch them.

A grouping decides which examples share a batch. The budget is the most padded tokens that a batch may
hold, and all groupings get the same one. A table says how much padding each of them leaves, how many
batches and shapes it makes, and how often the same examples share a batch again.

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
    _add_options(add_command(commands, "plan", _PLAN, _PLAN_EXAMPLES, run=_plan))
    _add_options(add_command(commands, "advise", _ADVISE, _ADVISE_EXAMPLES, run=_advise))


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", type=Path, help="the data: .jsonl, .csv, .tsv or .txt, also .gz")
    data = command.add_argument_group("what to read")
    add_option(
        data,
        "--field NAME",
        "field (jsonl), column name (csv, tsv with a header) or column number from 1 (tsv); with --pairs two of "
        "them, source,target (default: `text` or the only text field; tsv: 1)",
    )
    add_option(data, "--pairs", "each example has a source and a target, padded separately")
    add_option(data, "--limit ROWS", "read only the first ROWS examples (default: all)", type=positive)
    counting = command.add_argument_group("how to count")
    add_option(
        counting,
        "--tokenizer WHAT",
        "words, chars or bytes; a tokenizer.json; a folder saved by transformers; module:function, called with a "
        "text; or lengths, if the field holds numbers or lists of token ids",
        default="words",
    )
    cut = "count longer texts as N, for a model that cuts them (default: no cut)"
    add_option(counting, "--max-length N", cut, type=positive)
    budget = command.add_argument_group("the budget and the plan")
    tokens = "padded tokens per batch (default: 64 times the p99 length, less for small data)"
    add_option(budget, "--max-tokens N", tokens, type=positive)
    add_option(budget, "--max-items N", "examples per batch (default: no limit)", type=positive)
    add_option(budget, "--pad-multiple-of N", "pad lengths to a multiple of N", type=positive, default=1)
    add_option(budget, "--world-size N", "number of ranks that share the batches", type=positive, default=1)
    add_option(budget, "--seed N", "seed of the shuffles", type=count, default=0)
    output = command.add_argument_group("output")
    add_option(output, "--json", "print one JSON object and nothing else")
    add_option(output, "--quiet", "print only the result: no histogram, notes or progress bar")


def _plan(arguments: argparse.Namespace) -> None:
    data, settings, reason = _inputs(arguments)
    comparison = compare(data.lengths, settings)
    if arguments.json:
        figures = {"data": data.to_dict(), **asdict(comparison), "recommendation": recommendation(comparison)}
        print(json.dumps(figures, indent=2))
        return
    screen = Screen.of_stdout()
    if not arguments.quiet:
        screen.show([data_line(arguments.file.name, data), ""])
        screen.show([*histogram_lines(data, screen), *summary_lines(data), ""])
        screen.show([budget_line(settings, reason), ""])
    screen.show(comparison_lines(comparison, screen, quiet=arguments.quiet))


def _advise(arguments: argparse.Namespace) -> None:
    data, settings, reason = _inputs(arguments)
    advice = advise(data.lengths, settings)
    if arguments.json:
        words = {"snippet": snippet(advice), "caveats": caveats(advice)}
        print(json.dumps({"data": data.to_dict(), **asdict(advice), **words}, indent=2))
        return
    screen = Screen.of_stdout()
    if not arguments.quiet:
        screen.show([data_line(arguments.file.name, data), *summary_lines(data)])
        screen.show([budget_line(settings, reason), ""])
    screen.show(advice_lines(advice, screen, unit=data.unit, quiet=arguments.quiet))


def _inputs(arguments: argparse.Namespace) -> tuple[Measured, Settings, str]:
    """Read and measure the file, and settle the budget; the text says where a chosen budget comes from."""
    source = Source(
        path=arguments.file,
        field=arguments.field,
        pairs=arguments.pairs,
        limit=arguments.limit,
        holds_lengths=arguments.tokenizer == LENGTHS,
    )
    progress = sys.stderr.isatty() and not arguments.quiet
    data = measure_file(source, tokenizer=arguments.tokenizer, max_length=arguments.max_length, progress=progress)
    max_tokens, reason = arguments.max_tokens, ""
    if max_tokens is None:
        max_tokens, reason = default_max_tokens(data.lengths, pad_multiple_of=arguments.pad_multiple_of)
    settings = Settings(
        max_tokens=max_tokens,
        max_items=arguments.max_items,
        pad_multiple_of=arguments.pad_multiple_of,
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


def data_line(name: str, data: Measured) -> str:
    """Say what was read and what was left out."""
    counts = {
        "blank lines skipped": data.num_blank,
        "empty examples skipped": data.num_empty,
        "cut to --max-length": data.num_cut,
    }
    left_out = ", ".join(f"{number:,} {what}" for what, number in counts.items() if number)
    return f"{name}: {len(data.lengths):,} examples{f' ({left_out})' if left_out else ''}"


def summary_lines(data: Measured) -> list[str]:
    """Give median, p90, p99 and maximum, one line per text of an example."""
    lines = []
    for what, lengths in data.axes.items():
        figures = summary(lengths)
        lines.append(f"{what}: " + " · ".join(f"{key} {figures[key]:,}" for key in ("median", "p90", "p99", "max")))
    return lines


def histogram_lines(data: Measured, screen: Screen) -> list[str]:
    """Draw a histogram for each text of an example."""
    lines: list[str] = []
    for what, lengths in data.axes.items():
        lines += [f"{what} per example", "", *render_bars(make_bins(lengths), width=min(screen.width, 100)), ""]
    return lines


def budget_line(settings: Settings, reason: str) -> str:
    """Say which budget is used, and where it comes from if the user set none."""
    items = "" if settings.max_items is None else f" and {settings.max_items:,} examples"
    source = f" ({reason}; set your own with --max-tokens)" if reason else ""
    return f"budget: {settings.max_tokens:,} padded tokens{items} per batch{source}"


def comparison_lines(comparison: Comparison, screen: Screen, *, quiet: bool) -> list[str]:
    """Lay the groupings out side by side and recommend one."""
    header = ["grouping", "padding", "batches", "shapes", "budget used", "recurrence", "ranks wait"]
    rows = [
        [*_basics(entry), f"{entry.num_shapes:,}"]
        + [percent(share) for share in (entry.budget_used, entry.recurrence, entry.straggler_waste)]
        for entry in comparison.entries
    ]
    legend = _LEGEND + " ranks wait: the share of time lost to the slowest rank."
    if comparison.settings.world_size == 1:  # nobody waits
        header, rows, legend = header[:-1], [row[:-1] for row in rows], _LEGEND
    notes = [] if quiet else [*screen.wrap(legend), ""]
    return [*render_table(header, rows), "", *notes, *screen.wrap(recommendation(comparison))]


def recommendation(comparison: Comparison) -> str:
    """Say in one or two sentences which grouping to use and why."""
    best, shuffled = recommend(comparison), comparison.shuffled
    if verdict_of(shuffled, best) == "no":
        return (
            f"The lengths hardly vary: a fixed size of {comparison.fixed_size:,} is just as good ({_cost(shuffled)})."
        )
    few = comparison["Buckets(count=16)"]
    text = (
        f"Use {best.name}: {_cost(best)}. The largest safe fixed size, {comparison.fixed_size:,}, has "
        f"{_cost(shuffled)}."
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
    fixed = ((advice.shuffled, advice.against_shuffled), (advice.sorted, advice.against_sorted))
    rows = [[*_basics(entry), times(gain.compute_bound), times(gain.launch_bound)] for entry, gain in fixed]
    rows.append([*_basics(advice.planned), "1", "1"])
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
            f"No. The lengths hardly vary: keep DataLoader(batch_size={size}). It has {_cost(advice.shuffled)}; "
            f"planned batches would have {_cost(advice.planned)}."
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


def snippet(advice: Advice) -> str:
    """Return the lines to copy into a training script."""
    if advice.verdict == "no":
        return f"loader = DataLoader(dataset, batch_size={advice.fixed_size}, shuffle=True)"
    settings = advice.settings
    budget = f"bw.MaxTokens({settings.max_tokens})"
    if settings.max_items is not None:
        budget += f" & bw.MaxItems({settings.max_items})"
    options = [] if advice.planned.name == "WindowSort()" else [f"grouping=bw.{advice.planned.name}"]
    if settings.pad_multiple_of > 1:
        options.append(f"pad_multiple_of={settings.pad_multiple_of}")
    if settings.world_size > 1:
        options.append(f"rank=rank, world_size={settings.world_size}")
    else:
        options.append("balance_over=1")  # one device waits for nobody, so the order may be entirely random
    return (
        "import batchwright as bw\n"
        "from torch.utils.data import DataLoader\n"
        "\n"
        "lengths = bw.measure_lengths(texts, tokenizer)\n"
        f"sampler = bw.BatchSampler({', '.join(['lengths', budget, *options])})\n"
        "loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)"
    )


def caveats(advice: Advice) -> list[str]:
    """Return what the figures do not say, as sentences."""
    notes = []
    planned, fixed = advice.planned.num_batches, advice.shuffled.num_batches
    if planned < _FEW_BATCHES:
        notes.append(
            f"Only {planned} batches per epoch: the figures are rough, and this few updates train poorly. "
            "Lower --max-tokens."
        )
    if advice.verdict == "no":
        return notes
    if fixed > WORTH * planned:
        notes.append(
            f"An epoch becomes {planned:,} larger updates instead of {fixed:,}: tune the learning rate "
            "again, or lower MaxTokens until the number of updates suits you."
        )
    if advice.against_sorted.compute_bound < WORTH:
        notes.append(
            f"Sorting by length at the fixed size already reduces padding to {percent(advice.sorted.padding)}; "
            "compared with that, only the smaller number of steps is a gain."
        )
    if advice.settings.pad_multiple_of > 1:
        notes.append(
            f"Your collate function must pad to a multiple of {advice.settings.pad_multiple_of}, as the plan does."
        )
    return notes


def _span(gain: Gain) -> str:
    low, high = sorted((gain.compute_bound, gain.launch_bound))
    return f"{times(low)} to {times(high)}"


def _basics(entry: Entry) -> list[str]:
    return [entry.name, percent(entry.padding), f"{entry.num_batches:,}"]


def _cost(entry: Entry) -> str:
    return f"{percent(entry.padding)} padding in {entry.num_batches:,} batches"
