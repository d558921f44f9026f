"""The command ``plan``: read a file, measure it, compare groupings; ``advise`` starts the same way."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from .._lengths import as_lengths
from .._types import IntArray
from .advice import WORTH, Baseline, Question, gain_of, packs_better, verdict_of
from .compare import Comparison, Entry, Settings, check_fits, compare, default_max_tokens
from .lengths import LENGTHS, Measured, make_bins, measure_file, summary
from .options import Commands, add_command, add_option, count, positive
from .reading import Source
from .screen import Screen, counted, percent, render_bars, render_table
from .sources import STDIN_FORMATS

ABOUT_FILE = """\
FILE is .jsonl, .csv, .tsv or .txt, each also as .gz, with one example per line; or .parquet (needs
pyarrow). A folder holds parts of one format, taken by name, or .txt files with one text each. A dash is
standard input, with --format.\
"""

_PLAN = f"""\
Show the lengths of a file and how each grouping would batch them.

A grouping decides which examples share a batch. The budget is the most padded tokens that a batch may
hold, and all groupings get the same one. A table says how much padding each of them leaves, how many
batches and shapes it makes, and how often the same examples share a batch again.

{ABOUT_FILE}
"""

_PLAN_EXAMPLES = """\
  batchwright plan reviews.jsonl                       the field `text`, or the only text field
  batchwright plan reviews.csv --field body --max-tokens 16384
  batchwright plan en-de.tsv.gz --pairs                source and target in columns 1 and 2
  batchwright plan train.jsonl --tokenizer ./my-model --max-length 512 --pad-multiple-of 8
  batchwright plan lengths.txt --tokenizer lengths     one number per line
  batchwright plan part-0.parquet --field body         columns are fields; a folder of parts works too
  zcat reviews.jsonl.gz | batchwright plan - --format jsonl
  batchwright plan train.jsonl --json > plan.json
"""


def add_planning(commands: Commands) -> None:
    """Add the command ``plan``."""
    add_inputs(add_command(commands, "plan", _PLAN, _PLAN_EXAMPLES, run=_plan))


def add_inputs(command: argparse.ArgumentParser) -> None:
    """Add what ``plan`` and ``advise`` have in common: the file, how to count, the purpose and the budget."""
    about = "the data: .jsonl, .csv, .tsv or .txt, also .gz; .parquet; a folder of them; - for standard input"
    command.add_argument("file", metavar="FILE", type=_path, help=about)
    data = command.add_argument_group("what to read")
    formats = f"format of standard input: {', '.join(STDIN_FORMATS)}"
    add_option(data, "--format FORMAT", formats, choices=STDIN_FORMATS)
    add_option(
        data,
        "--field NAME",
        "field (jsonl), column name (csv, tsv with a header) or column number from 1 (tsv); with --pairs two of "
        "them, source,target (default: `text` or the only text field; tsv: 1)",
    )
    add_option(data, "--pairs", "each example has a source and a target, padded separately; --field names them")
    add_option(data, "--limit ROWS", "read only the first ROWS examples (default: all)", type=positive)
    counting = command.add_argument_group("how to count")
    add_option(
        counting,
        "--tokenizer WHAT",
        "words, chars or bytes; a tokenizer.json; a folder saved by save_pretrained; a model of the Hub that was "
        "downloaded before; module:function, called with a text; or lengths, if the field holds numbers or lists of "
        "token ids",
        default="words",
    )
    cut = "count longer texts as N, for a model that cuts them (default: no cut)"
    add_option(counting, "--max-length N", cut, type=positive)
    purpose = command.add_argument_group("what the batches are for")
    kind = "encoder, decoder or seq2seq; a decoder reads both texts of a pair as one (default: not known)"
    add_option(purpose, "--model-kind KIND", kind, choices=("encoder", "decoder", "seq2seq"))
    task = "train, or generate: only the inputs are planned, the second text of a pair is the output"
    add_option(purpose, "--task TASK", task, choices=("train", "generate"), default="train")
    budget = command.add_argument_group("the budget and the plan")
    tokens = "padded tokens per batch (default: 64 times the p99 length, less for small data)"
    add_option(budget, "--max-tokens N", tokens, type=positive)
    add_option(budget, "--max-items N", "examples per batch, or rows of Packed (default: no limit)", type=positive)
    add_option(budget, "--pad-multiple-of N", "pad lengths to a multiple of N", type=positive, default=1)
    add_option(budget, "--world-size N", "number of ranks that share the batches", type=positive, default=1)
    add_option(budget, "--seed N", "seed of the shuffles", type=count, default=0)
    output = command.add_argument_group("output")
    add_option(output, "--json", "print one JSON object and nothing else")
    add_option(output, "--quiet", "print only the result: no histogram, notes or progress bar")


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("needs a file, a folder or - for standard input, got ''")
    return Path(text)


def _plan(arguments: argparse.Namespace) -> None:
    inputs = read_inputs(arguments)
    comparison = compare(inputs.planned, inputs.settings, progress=inputs.progress)
    if arguments.json:
        words = {"recommendation": recommendation(comparison, inputs.question)}
        figures = {"data": inputs.data.to_dict(), **asdict(comparison), **words}
        print(json.dumps(figures, indent=2))
        return
    screen = Screen.of_stdout()
    if not arguments.quiet:
        screen.show([data_line(inputs.name, inputs.data), ""])
        screen.show([*histogram_lines(inputs.data, screen), *summary_lines(inputs.data), *inputs.notes, ""])
        screen.show([budget_line(inputs.settings, inputs.reason), ""])
    screen.show(comparison_lines(comparison, screen, inputs.question, quiet=arguments.quiet))


@final
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What both commands start from.

    Args:
        name: what the user calls the data.
        data: the lengths of its texts.
        settings: the budget and the other options.
        question: what the batches are for.
        reason: where a budget that the user did not name comes from.
        progress: whether to show progress.
    """

    name: str
    data: Measured
    settings: Settings
    question: Question
    reason: str
    progress: bool

    @property
    def planned(self) -> IntArray:
        """Return the lengths that batches are planned by."""
        return self.question.planned(self.data.lengths)

    def tokens_if_rounded(self, multiple: int) -> int | None:
        """Return the budget that ``--pad-multiple-of`` would come with; None if the user named one."""
        return default_max_tokens(self.planned, pad_multiple_of=multiple)[0] if self.reason else None

    @property
    def notes(self) -> list[str]:
        """Say which lengths of a pair are planned, if it is not both."""
        if self.data.lengths.ndim == 1 or self.planned.ndim == 2:
            return []
        if self.question.task == "generate":
            return ["planned by the source; the target is the output"]
        return ["planned by source and target together, as a decoder-only model reads them"]


def read_inputs(arguments: argparse.Namespace) -> Inputs:
    """Read and measure the file, and settle the budget."""
    source = Source(
        path=arguments.file,
        field=arguments.field,
        pairs=arguments.pairs,
        limit=arguments.limit,
        holds_lengths=arguments.tokenizer == LENGTHS,
        stdin_format=arguments.format,
    )
    progress = sys.stderr.isatty() and not arguments.quiet
    data = measure_file(source, tokenizer=arguments.tokenizer, max_length=arguments.max_length, progress=progress)
    against: Baseline = getattr(arguments, "against", "shuffled")  # `plan` does not ask
    question = Question(model_kind=arguments.model_kind, task=arguments.task, against=against)
    max_tokens, reason = arguments.max_tokens, ""
    if max_tokens is None:
        lengths = question.planned(data.lengths)
        max_tokens, reason = default_max_tokens(lengths, pad_multiple_of=arguments.pad_multiple_of)
    settings = Settings(
        max_tokens=max_tokens,
        max_items=arguments.max_items,
        pad_multiple_of=arguments.pad_multiple_of,
        seed=arguments.seed,
        world_size=arguments.world_size,
    )
    # Cut, each text of a pair leaves half of the budget to the other, if both are planned.
    num_texts = 1 if arguments.task == "generate" else data.lengths.ndim
    check_fits(as_lengths(question.planned(data.lengths)), settings, num_texts=num_texts)
    return Inputs(name=source.name, data=data, settings=settings, question=question, reason=reason, progress=progress)


_LEGEND = (
    "padding: the share of padded tokens that is padding. shapes: the number of different (examples, padded "
    "length). budget used: the mean over all batches. recurrence: the chance that two examples of a batch share "
    "one again in the next epoch."
)


def data_line(name: str, data: Measured) -> str:
    """Say what was read and what was left out."""
    counts = [
        f"{counted(data.num_blank, 'blank line')} skipped" if data.num_blank else "",
        f"{counted(data.num_empty, 'empty example')} skipped" if data.num_empty else "",
        f"{data.num_cut:,} cut to --max-length" if data.num_cut else "",
    ]
    left_out = ", ".join(filter(None, counts))
    return f"{name}: {counted(len(data.lengths), 'example')}{f' ({left_out})' if left_out else ''}"


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
    items = "" if settings.max_items is None else f" and {settings.max_items:,} examples (rows of Packed)"
    source = f" ({reason}; set your own with --max-tokens)" if reason else ""
    return f"budget: {settings.max_tokens:,} padded tokens{items} per batch{source}"


def comparison_lines(comparison: Comparison, screen: Screen, question: Question, *, quiet: bool) -> list[str]:
    """Lay the groupings out side by side and recommend one."""
    header = ["grouping", "padding", "batches", "shapes", "budget used", "recurrence", "ranks wait"]
    rows = [
        [*basics(entry), f"{entry.num_shapes:,}"]
        + [percent(share) for share in (entry.budget_used, entry.recurrence, entry.straggler_waste)]
        for entry in comparison.entries
    ]
    legend = _LEGEND + " ranks wait: the share of time lost to the slowest rank."
    if comparison.settings.world_size == 1:  # nobody waits
        header, rows, legend = header[:-1], [row[:-1] for row in rows], _LEGEND
    notes = [] if quiet else [*screen.wrap(legend), ""]
    return [*render_table(header, rows), "", *notes, *screen.wrap(recommendation(comparison, question))]


def recommendation(comparison: Comparison, question: Question) -> str:
    """Say in one or two sentences which grouping to use and why; ``advise`` says the same."""
    best, shuffled = comparison.recommended, comparison.shuffled
    if shuffled.num_batches == 1:
        return (
            f"All examples fit in one batch of {comparison.settings.max_tokens:,} padded tokens: there is nothing to "
            "plan. Lower --max-tokens or give more data."
        )
    fixed = f"The largest safe fixed size, {comparison.fixed_size:,}, has {cost(shuffled)} in random order."
    if comparison.packed is not None and packs_better(comparison, question):
        return f"Use {comparison.packed.name}, several examples per row: {cost(comparison.packed)}. {fixed}"
    if verdict_of(gain_of(shuffled, best)) == "no":
        return (
            f"Planned batches gain less than {percent(WORTH - 1)} here: keep a fixed size of "
            f"{comparison.fixed_size:,} ({cost(shuffled)})."
        )
    few = comparison.get("Buckets(count=16)")
    text = f"Use {best.name}: {cost(best)}. {fixed}"
    frozen = comparison["Sorted()"]
    if frozen.padding < best.padding - 0.02 and best.recurrence < 0.5:
        text += f" {frozen.name} pads less, {percent(frozen.padding)}, but the same examples always share a batch."
    if best.recurrence >= 0.5 and best.name == "WindowSort()":
        text += (
            f" So few batches fill one window, and mostly the same examples share a batch in every epoch; "
            f"WindowSort({max(1, best.num_batches // 4)}) pads more and gives new neighbours."
        )
    if few is not None and few.num_shapes < best.num_shapes / 2:
        text += (
            f" If each new shape costs time (torch.compile, CUDA graphs), use {few.name}: "
            f"{few.num_shapes:,} shapes at {percent(few.padding)} padding."
        )
    return text


def basics(entry: Entry) -> list[str]:
    """Return the name of a plan, its padding and its batches, as cells of a table."""
    return [entry.name, percent(entry.padding), f"{entry.num_batches:,}"]


def cost(entry: Entry) -> str:
    """Write the padding and the batches of a plan."""
    return f"{percent(entry.padding)} padding in {counted(entry.num_batches, 'batch', 'batches')}"
