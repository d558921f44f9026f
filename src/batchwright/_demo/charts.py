"""The charts of the page."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from .._cli.compare import Entry
from .._cli.histogram import make_bins
from .._cli.table import percent
from .._types import IntArray
from .results import ArmResult, Check
from .svg import Frame, Scale, figure, hover, marker, tag, text

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 14, 30, 46


def length_histogram(lengths: IntArray) -> str:
    """Draw how many examples have which length; the bins widen with the length."""
    bins = make_bins(lengths)
    most = max(b.count for b in bins)
    every = 2 if len(bins) > 10 else 1  # bounds to write out; all of them would touch
    x = Scale(low=0, high=len(bins), start=_LEFT, stop=WIDTH - _RIGHT)
    y = Scale(low=0, high=most, start=HEIGHT - _BOTTOM, stop=_TOP)
    frame = Frame(x=x, y=y, x_label="tokens in a function (from)", y_label="functions")
    parts = [frame.draw_y()]
    for i, b in enumerate(bins):
        box = {"x": x(i) + 1, "y": y(b.count), "width": x(1) - x(0) - 2, "height": y(0) - y(b.count)}
        parts.append(tag("rect", hover(f"{b.label} tokens: {b.count:,} functions"), class_="bar", **box))
        if i % every == 0:
            parts.append(text(f"{b.low}", x(i), y(0) + 18, class_="tick middle"))
    parts.append(frame.draw_labels())
    return figure("".join(parts), width=WIDTH, height=HEIGHT, title="Histogram of lengths")


def padding_bars(entries: Sequence[Entry]) -> str:
    """Draw the padding of each grouping as a bar."""
    left, row = 164, 29
    height = row * len(entries) + 40
    x = Scale(low=0, high=1, start=left, stop=WIDTH - 52)
    parts = []
    for i, entry in enumerate(entries):
        y = 8 + i * row
        shade = "bar fixed" if entry.name.startswith("fixed") else "bar"
        what = f"{entry.name}: {percent(entry.padding)} padding in {entry.num_batches:,} batches"
        parts += [
            text(entry.name, left - 8, y + 16, class_="tick end"),
            tag(
                "rect",
                hover(what),
                x=left,
                y=y + 3,
                width=max(x(entry.padding) - left, 1.0),
                height=row - 9,
                class_=shade,
            ),
            text(percent(entry.padding), x(entry.padding) + 6, y + 16, class_="tick"),
        ]
    parts.append(tag("line", x1=left, x2=left, y1=4, y2=height - 34, class_="axis"))
    parts.append(
        text(
            "share of the padded tokens that is padding",
            left,
            height - 10,
            class_="label",
        )
    )
    return figure("".join(parts), width=WIDTH, height=height, title="Padding by grouping")


def loss_by_seconds(results: Sequence[ArmResult]) -> str:
    """Draw the validation loss of each arm over the seconds it trained."""
    return _loss_lines(results, lambda check: check.seconds, "processor seconds of training", "Loss by seconds", "s")


def loss_by_examples(results: Sequence[ArmResult]) -> str:
    """Draw the validation loss of each arm over the examples it saw."""
    return _loss_lines(results, lambda check: check.num_examples, "examples seen", "Loss by examples", "examples")


def batch_shapes(results: Sequence[ArmResult], max_tokens: int) -> str:
    """Draw every batch by its padded length and its number of examples, with the line of the budget."""
    shapes = [shape for result in results for shape in result.shapes]
    longest, most = max(length for _, length in shapes), max(items for items, _ in shapes)
    shortest = min(length for _, length in shapes)
    x = Scale(low=shortest * 0.9, high=longest * 1.1, start=_LEFT, stop=WIDTH - _RIGHT, log=True)
    y = Scale(low=0.8, high=most * 1.25, start=HEIGHT - _BOTTOM, stop=_TOP, log=True)
    parts = [Frame(x=x, y=y, x_label="padded length of the batch (log)", y_label="examples in the batch (log)").draw()]
    start = max(x.low, max_tokens / y.high)
    line = {"x1": x(start), "y1": y(max_tokens / start), "x2": x(x.high), "y2": y(max_tokens / x.high)}
    parts.append(tag("line", hover(f"{max_tokens:,} padded tokens"), class_="budget", **line))
    for kind, result in reversed(list(enumerate(results))):  # the first arm has the fewest marks: on top
        for items, length in sorted(set(result.shapes)):
            what = hover(f"{result.name}: {items} of {length} = {items * length:,} padded tokens")
            parts.append(marker(kind, x(length), y(items), what, size=3.2, class_=f"dot faint s{kind}"))
    return figure("".join(parts), width=WIDTH, height=HEIGHT, title="Shapes of the batches")


def work_bars(results: Sequence[ArmResult]) -> str:
    """Draw what each arm computed: real tokens, and padding after them."""
    left, row = 164, 42
    height = row * len(results) + 52
    most = max(result.padded_tokens for result in results)
    x = Scale(low=0, high=most, start=left, stop=WIDTH - _RIGHT)
    bottom = row * len(results) + 8
    parts = []
    for tick in x.ticks(4):
        parts.append(tag("line", x1=x(tick), x2=x(tick), y1=4, y2=bottom, class_="grid"))
        parts.append(text(f"{tick / 1000:,.0f}k" if tick else "0", x(tick), bottom + 18, class_="tick middle"))
    for kind, result in enumerate(results):
        y = 8 + kind * row
        real, all_ = x(result.num_tokens), x(result.padded_tokens)
        box = {"y": y, "height": row - 14}
        wasted = result.padded_tokens - result.num_tokens
        parts += [
            text(result.name, left - 8, y + 19, class_="tick end"),
            tag(
                "rect",
                hover(f"{result.name}: {result.num_tokens:,} real tokens"),
                x=left,
                width=real - left,
                class_=f"dot s{kind}",
                **box,
            ),
            tag(
                "rect",
                hover(f"{result.name}: {wasted:,} of padding"),
                x=real,
                width=all_ - real,
                class_=f"dot waste s{kind}",
                **box,
            ),
        ]
    parts.append(text("tokens computed", (left + WIDTH) / 2, bottom + 38, class_="label middle"))
    return figure("".join(parts), width=WIDTH, height=height, title="Tokens computed by each arm")


def legend(names: Sequence[str], *, extra: str = "") -> str:
    """Return the marks and names of the arms as a list."""
    items = [
        f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{marker(kind, 7, 7, class_=f"dot s{kind}")}</svg>'
        f"{html.escape(name)}</li>"
        for kind, name in enumerate(names)
    ]
    return f'<ul class="legend">{"".join(items)}{extra}</ul>'


def _loss_lines(results: Sequence[ArmResult], at: Callable[[Check], float], x_label: str, title: str, unit: str) -> str:
    # The first check of an arm is still on the steep part; it may lie above the frame, where the line comes from.
    losses = [check.loss for result in results for check in (result.checks[1:] or result.checks)]
    furthest = max(at(check) for result in results for check in result.checks)
    x = Scale(low=0, high=furthest * 1.03, start=_LEFT, stop=WIDTH - _RIGHT)
    room = 0.08 * (max(losses) - min(losses)) or 0.1
    y = Scale(low=min(losses) - room, high=max(losses) + 2 * room, start=HEIGHT - _BOTTOM, stop=_TOP)
    lines, marks = [], []
    for kind, result in enumerate(results):
        points = " ".join(f"{x(at(check)):.1f},{y(check.loss):.1f}" for check in result.checks)
        lines.append(tag("polyline", points=points, class_=f"line s{kind}"))
        for check in result.checks:
            if check.loss <= y.high:
                what = hover(f"{result.name}: loss {check.loss:.3f} after {at(check):,.0f} {unit}")
                marks.append(marker(kind, x(at(check)), y(check.loss), what, class_=f"dot s{kind}"))
    parts = [
        Frame(x=x, y=y, x_label=x_label, y_label="validation loss a token").draw(),
        _clip("".join(lines), title.lower().replace(" ", "-")),
        *marks,
    ]
    return figure("".join(parts), width=WIDTH, height=HEIGHT, title=title)


def _clip(body: str, name: str) -> str:
    """Hide what a drawing has above the frame."""
    window = tag("clipPath", tag("rect", x=0, y=_TOP, width=WIDTH, height=HEIGHT - _TOP), id=name)
    return window + tag("g", body, clip_path=f"url(#{name})")
