"""The text that ``plan`` and ``advise`` print."""

from __future__ import annotations

from .advise import Advice, Gain, caveats, recommend, snippet, verdict_of
from .compare import Comparison, Entry, Settings
from .histogram import make_bins, render_bars
from .measure import Measured, summary
from .screen import Screen, percent, render_table, times

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
