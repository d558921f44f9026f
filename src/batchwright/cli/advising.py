"""The command ``advise``: yes or no and against what, the figures, the lines to copy, what to mind."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .advice import PROXY, WORTH, Advice, Gain, advise, gain_of, verdict_of
from .compare import Entry
from .lengths import Measured
from .options import Commands, add_command, add_option
from .planning import ABOUT_FILE, add_inputs, basics, budget_line, cost, data_line, read_inputs, summary_lines
from .screen import Screen, counted, percent, render_table, times

# With fewer batches, the last ones, only partly filled, distort every figure.
_FEW_BATCHES = 20

_FASTER_PACKED = "How much faster packed rows are than each of the others:"

_ENDS = {
    "train": (
        "compute-bound: the time of a step grows with its padded tokens (large models, large batches).",
        "launch-bound: every step takes the same time (small models or small batches on a GPU).",
        "Both are estimates from the lengths only. To find out which applies to you, time one step at two batch "
        "sizes: if twice the examples take the same time, you are launch-bound.",
    ),
    "generate": (
        "compute-bound: the time grows with padded tokens, in and out where the outputs are known.",
        "launch-bound: every step takes the same time; a batch takes one per token of its longest output.",
        "Both are estimates from the lengths only.",
    ),
}

_ADVISE = f"""\
Say whether planned batches would pay off for a file, against what, and print the lines to copy.

The baseline is the largest fixed batch size that can never exceed the budget, in random order or, with
--against sorted, sorted by length. The expected speed-up is a range: one end assumes that a step takes
longer the more padded tokens it has (compute-bound), the other that every step takes the same time
(launch-bound). The answer is yes only if the whole range is a gain of 10 % or more.

Two cases are answered apart. For a decoder-only model, packing several examples into a row may be better
(--model-kind decoder). When a model generates, the outputs cost more than the inputs, and the inputs may
not tell them (--task generate; with --pairs the second text is the output).

{ABOUT_FILE}
"""

_ADVISE_EXAMPLES = """\
  batchwright advise reviews.jsonl
  batchwright advise en-de.tsv.gz --pairs --tokenizer ./my-model --max-tokens 10240
  batchwright advise reviews.jsonl --against sorted
  batchwright advise chat.jsonl --pairs --field prompt,response --model-kind decoder
  batchwright advise chat.jsonl --pairs --field prompt,response --task generate
  batchwright advise train.jsonl --max-tokens 16384 --json
"""


def add_advising(commands: Commands) -> None:
    """Add the command ``advise``."""
    command = add_command(commands, "advise", _ADVISE, _ADVISE_EXAMPLES, run=_advise)
    add_inputs(command)
    baseline = command.add_argument_group("the comparison")
    what = "the fixed-size batches to compare with: shuffled or sorted by length"
    add_option(baseline, "--against ORDER", what, choices=("shuffled", "sorted"), default="shuffled")


def _advise(arguments: argparse.Namespace) -> None:
    inputs = read_inputs(arguments)
    data, rounded_tokens = inputs.data, inputs.tokens_if_rounded(8)
    advice = advise(
        data.lengths, inputs.settings, inputs.question, rounded_tokens=rounded_tokens, progress=inputs.progress
    )
    if arguments.json:
        words = {"snippet": snippet(advice, data), "caveats": caveats(advice, data)}
        print(json.dumps({"data": data.to_dict(), **asdict(advice), **words}, indent=2))
        return
    screen = Screen.of_stdout()
    if not arguments.quiet:
        screen.show([data_line(inputs.name, data), *summary_lines(data), *inputs.notes])
        screen.show([budget_line(inputs.settings, inputs.reason), ""])
    screen.show(advice_lines(advice, screen, data, quiet=arguments.quiet))


def advice_lines(advice: Advice, screen: Screen, data: Measured | None = None, *, quiet: bool) -> list[str]:
    """Answer whether planned batches pay off, with the figures and what to set.

    Args:
        advice: the answer.
        screen: where it is printed.
        data: how the lengths were counted; None if that is not known.
        quiet: whether to leave out what explains the figures.
    """
    lines = [*screen.wrap(answer(advice)), "", *_table(advice), ""]
    if not quiet:
        lines += [line for end in _ENDS[advice.question.task] for line in screen.wrap(end)] + [""]
    lines += ["What to set:", "", *(f"    {line}".rstrip() for line in snippet(advice, data).split("\n"))]
    notes = caveats(advice, data)
    if notes and not quiet:
        lines += ["", *(line for note in notes for line in screen.wrap(f"- {note}", indent="  "))]
    return lines


def _table(advice: Advice) -> list[str]:
    fixed = [(advice.shuffled, advice.against_shuffled), (advice.sorted, advice.against_sorted)]
    best = advice.used
    if advice.verdict == "pack":
        fixed = [(entry, gain_of(entry, best)) for entry in (advice.shuffled, advice.sorted, advice.planned)]
    rows = [[*basics(entry), times(gain.compute_bound), times(gain.launch_bound)] for entry, gain in fixed]
    rows.append([*basics(best), "", ""])
    table = render_table(["", "padding", "batches", "if compute-bound", "if launch-bound"], rows)
    return [f"How much faster {best.name} is than each fixed size:" if len(rows) == 3 else _FASTER_PACKED, *table]


def answer(advice: Advice) -> str:
    """Say in two or three sentences whether planned batches pay off, and against what."""
    if advice.verdict == "no":
        return _no(advice)
    if advice.verdict == "pack" and advice.packed is not None:
        return _pack(advice, advice.packed)
    other = _of_the_other(advice)
    if advice.verdict == "yes":
        return (
            f"Yes, against {against(advice)}: an epoch should be {_span(advice.gain)} as fast, by an estimate from "
            f"the lengths. {other}"
        )
    gain = advice.gain
    if verdict_of(gain) == "yes":  # only the outputs speak against it
        return (
            f"It depends on the outputs. Against {against(advice)}, an epoch should be {_span(gain)} as fast by the "
            f"lengths; {_doubt(advice)}."
        )
    ends = ("compute-bound", "launch-bound")
    low, high = ends if gain.compute_bound < gain.launch_bound else reversed(ends)
    little = "no gain" if gain.low < 1.005 else f"less than {percent(WORTH - 1)} faster"
    return (
        f"It depends on what a step costs. Against {against(advice)}, an epoch should be {times(gain.high)} as fast if "
        f"your steps are {high}, but only {times(gain.low)}, which is {little}, if they are {low}. {other}"
    )


def against(advice: Advice) -> str:
    """Name what the plan is compared with."""
    size = counted(advice.fixed_size, "example")
    if advice.question.against == "shuffled":
        return f"fixed-size batches of {size} in random order (the largest size that always fits)"
    return f"fixed-size batches of {size} sorted by length (the largest size that always fits)"


def _of_the_other(advice: Advice) -> str:
    """Give the range against the other fixed size, so that no one takes one for the other."""
    is_random = advice.question.against == "shuffled"
    gain, order = (advice.against_sorted, "sorted by length") if is_random else (advice.against_shuffled, "shuffled")
    depends = ": there it depends on what a step costs" if is_random and verdict_of(gain) == "depends" else ""
    return f"Against the same size {order} it is {_span(gain)}{depends}."


def _no(advice: Advice) -> str:
    fixed, planned = advice.baseline, advice.planned
    if fixed.num_batches == 1:
        return (
            f"No. All examples fit in one batch of {advice.settings.max_tokens:,} padded tokens, so there is nothing "
            "to plan; lower --max-tokens or give more data."
        )
    keep = f"keep DataLoader(batch_size={advice.fixed_size})"
    if advice.question.against == "sorted":
        keep = f"keep your batches of {counted(advice.fixed_size, 'example')} sorted by length"
    if advice.lengths_hardly_vary:
        why = f"The lengths hardly vary: {keep}."
    else:
        why = f"Planned batches gain less than {percent(WORTH - 1)}: {keep}."
    costs = f"The fixed size has {cost(fixed)}; planned batches would have {cost(planned)}."
    return f"No, not against {against(advice)}. {why} {costs}"


def _pack(advice: Advice, packed: Entry) -> str:
    capacity = packed.capacity
    gain = gain_of(advice.baseline, packed)
    return (
        f"Pack instead. A decoder-only model can read several examples in one row: {packed.name} fills "
        f"{counted(packed.padded_tokens // capacity, 'row')} of {capacity:,} with {percent(packed.padding)} padding, "
        f"where planned batches leave {percent(advice.planned.padding)}. Against {against(advice)}, an epoch of packed "
        f"rows should be {_span(gain)} as fast."
    )


def _doubt(advice: Advice) -> str:
    """Say why input lengths do not settle the cost of generation."""
    outputs = advice.outputs
    if outputs is None:
        return (
            "but the inputs do not tell how long the outputs get, and the output's KV cache grows with the number of "
            "examples whatever the input length. Give the outputs as a second column (--pairs) to see how they go "
            "together"
        )
    reasons = []
    if outputs.correlation is not None and outputs.correlation < PROXY:
        reasons.append(
            f"input length is a poor proxy for the output (rank correlation {outputs.correlation:.2f}, under {PROXY})"
        )
    if outputs.cache_ratio > 1:
        reasons.append(
            f"the largest planned batch needs a KV cache {times(outputs.cache_ratio)} as large as the largest fixed "
            "one, because the output's cache grows with the number of examples whatever the input length"
        )
    return "but " + ", and ".join(reasons)


def snippet(advice: Advice, data: Measured | None = None) -> str:
    """Return the lines to copy into a script.

    Args:
        advice: the answer.
        data: how the lengths were counted, which the lines then do too.
    """
    if advice.verdict == "no" and advice.question.against == "shuffled":
        return _plain_loader(advice)
    if advice.verdict != "no" and advice.question.task == "generate":
        return (
            "from batchwright.step import generate\n"
            "\n"
            "# Batches of similar length; the output counts, and the memory of each batch decides the next size.\n"
            "outputs = generate(model, examples, max_new_tokens=256)"
        )
    return _planned_loader(advice, data)


def _plain_loader(advice: Advice) -> str:
    names, order = "DataLoader", "shuffle=True"
    if advice.settings.world_size > 1:
        names = "DataLoader, DistributedSampler"
        order = f"sampler=DistributedSampler(dataset, num_replicas={advice.settings.world_size}, rank=rank)"
    return (
        f"from torch.utils.data import {names}\n"
        "\n"
        f"loader = DataLoader(dataset, batch_size={advice.fixed_size}, {order}, collate_fn=collate)"
    )


def _planned_loader(advice: Advice, data: Measured | None) -> str:
    """Return the lines that make the recommended batches, or the sorted ones where those are to be kept."""
    packs = advice.verdict == "pack"
    has_pairs = advice.packed is None if data is None else data.lengths.ndim == 2 and advice.question.task == "train"
    # A decoder-only model reads both texts as one.
    planned = "lengths.sum(axis=1)" if has_pairs and advice.packed is not None else "lengths"
    has_empty = data is not None and data.num_empty + data.num_blank > 0
    cut = "" if data is None or data.max_length is None else f", max_length={data.max_length}"
    arguments = advice.settings.code(advice.used.name)
    if advice.verdict == "no":
        arguments = advice.settings.code("Sorted()", fixed_size=advice.fixed_size)
    lines = ["import batchwright as bw", f"from torch.utils.data import DataLoader{', Subset' if has_empty else ''}"]
    lines += ["from batchwright.step import PackCollator"] if packs else []
    lines += ["", f"lengths = bw.measure_lengths({'pairs' if has_pairs else 'texts'}, tokenizer{cut})"]
    if has_empty:
        lines += [
            f"kept = lengths{'.all(axis=1)' if has_pairs else ''}.nonzero()[0]  # leaves out empty texts",
            "dataset, lengths = Subset(dataset, kept.tolist()), lengths[kept]",
        ]
    data_set, collate = ("bw.Rows(dataset)", "PackCollator()") if packs else ("dataset", "collate")
    lines += [
        f"sampler = bw.BatchSampler({planned}, {arguments})",
        f"loader = DataLoader({data_set}, batch_sampler=sampler, collate_fn={collate})",
    ]
    return "\n".join(lines)


def caveats(advice: Advice, data: Measured | None = None) -> list[str]:
    """Return what the figures do not say, as sentences.

    Args:
        advice: the answer.
        data: how the lengths were counted; None if that is not known.
    """
    notes = [*_about_counting(advice, data), *_about_few_batches(advice), *_about_the_model(advice)]
    if advice.verdict == "no" or advice.question.task == "generate":
        return notes
    planned, fixed = advice.used.num_batches, advice.baseline.num_batches
    if fixed > WORTH * planned:
        notes.append(
            f"An epoch becomes {planned:,} larger updates instead of {fixed:,}: tune the learning rate "
            "again, or lower MaxTokens until the number of updates suits you."
        )
    by_length, gain = advice.sorted.padding, advice.against_sorted
    if advice.question.against == "shuffled" and by_length < advice.shuffled.padding and gain.compute_bound < WORTH:
        fewer = gain.launch_bound >= WORTH
        notes.append(
            f"Sorting by length at the fixed size already reduces padding to {percent(by_length)}; "
            "compared with that, "
            + ("only the smaller number of steps is a gain." if fewer else f"they gain less than {percent(WORTH - 1)}.")
        )
    if advice.settings.pad_multiple_of > 1:
        notes.append(
            f"Your collate function must pad to a multiple of {advice.settings.pad_multiple_of}, as the plan does."
        )
    elif advice.rounded is not None and advice.verdict != "pack":
        notes.append(
            f"GPUs prefer lengths in multiples of 8: --pad-multiple-of 8 has {cost(advice.rounded)}. Your collate "
            "function must then pad to multiples of 8 too."
        )
    return notes


def _about_counting(advice: Advice, data: Measured | None) -> list[str]:
    notes: list[str] = []
    if data is None or advice.verdict == "no":
        return notes
    if data.unit != "tokens":
        notes.append(f"Counted in {data.unit}: pass your own --tokenizer before you copy the number.")
    if data.num_cut:
        notes.append(f"Your data set must cut texts to {data.max_length:,} {data.unit}, as --max-length counts them.")
    return notes


def _about_few_batches(advice: Advice) -> list[str]:
    num_batches = advice.used.num_batches
    if num_batches >= _FEW_BATCHES:
        return []
    poorly = "" if advice.question.task == "generate" else ", and this few updates train poorly"
    return [
        f"Only {counted(num_batches, 'batch', 'batches')} per epoch: the figures are rough{poorly}. Lower --max-tokens."
    ]


def _about_the_model(advice: Advice) -> list[str]:
    """Say what depends on the kind of the model and on the task."""
    kind, packed, outputs = advice.question.model_kind, advice.packed, advice.outputs
    if advice.question.task == "generate":
        return [] if outputs is None or outputs.correlation is None else [_correlation(outputs.correlation)]
    if advice.verdict == "pack":
        note = "The examples of a row must not see each other: PackCollator restarts positions and masks attention."
        return [note] if advice.settings.max_items is None else [note, "--max-items counts packed rows, not examples."]
    if kind == "seq2seq" and packed is not None:  # one axis: the targets are not known
        return ["A seq2seq model pads targets too; give both sides with --pairs, and they are planned together."]
    if kind == "decoder" and packed is not None:
        return [f"Packing is not clearly better than planned batches here: {packed.name} has {cost(packed)}."]
    if kind is not None:
        return []
    if packed is None:
        return ["Is the model decoder-only? Then packing may be better: ask again with --model-kind decoder."]
    return [
        f"Is the model decoder-only? Then packing may be better: {packed.name} has {cost(packed)}. Ask again with "
        "--model-kind decoder, or say --model-kind encoder or seq2seq."
    ]


def _correlation(value: float) -> str:
    meaning = "a fair" if value >= PROXY else "a poor"
    return f"Input and output lengths have a rank correlation of {value:.2f}: inputs are {meaning} proxy for the cost."


def _span(gain: Gain) -> str:
    return f"{times(gain.low)} to {times(gain.high)}"
