"""One self-contained page about a run: figures, charts, table, settings."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

from ..._charts import page
from ..._charts.page import Markup, render_table
from ..._charts.svg import Frame, Scale, clip, figure, hover, legend, marker, swatch, tag, text
from ..._types import IntArray
from ..compare import Comparison, Entry
from ..lengths import make_bins
from ..screen import percent, times
from .records import ArmResult, Check, DemoSettings


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the page shows.

    Args:
        settings: the settings of the demo.
        lengths: the lengths of the training examples.
        comparison: the groupings of those lengths under the budget.
        results: what each arm did; the others are compared with the first.
        num_parameters: the parameters of the model.
        versions: the names and versions of what the run used.
        seconds: how long the whole demo took.
    """

    settings: DemoSettings
    lengths: IntArray
    comparison: Comparison
    results: Sequence[ArmResult]
    num_parameters: int
    versions: Mapping[str, str | None]
    seconds: float


def render_page(run: Run) -> str:
    """Return the page as HTML that needs nothing else: no script, no font, no picture from elsewhere."""
    body = [
        _opening(run),
        f"<h2>The arms</h2>{_table(run.results)}",
        _reading(run),
        f'<h2>Charts</h2><div class="charts">{"".join(_charts(run))}</div>',
        _settings(run),
    ]
    return page.render_page("batchwright demo", "\n".join(body))


def result_rows(results: Sequence[ArmResult]) -> list[list[str]]:
    """Return name, real tokens per second, ratio, padding, updates, seconds and loss of each arm.

    The ratio is to the first arm.
    """
    return [
        [
            result.name,
            f"{result.tokens_per_second:,.0f}",
            _speed(result, results[0]),
            percent(result.padding),
            f"{result.num_steps:,}",
            f"{result.seconds:.1f}",
            f"{result.loss:.3f}",
        ]
        for result in results
    ]


RESULT_HEADER = ("", "real tokens/s", "ratio", "padding", "updates", "CPU seconds", "loss")


def _charts(run: Run) -> list[str]:
    names = [result.name for result in run.results]
    return [
        _chart(
            "How long the functions are",
            "Most are short, a few are cut at the limit. The bins widen to the right.",
            length_histogram(run.lengths),
        ),
        _chart(
            "Padding by grouping",
            f"The same functions and the same budget of {run.settings.max_tokens:,} padded tokens. Grey: fixed size.",
            padding_bars(run.comparison.entries),
        ),
        _chart(
            "Loss against time",
            "Further left is faster, lower is better. Processor seconds of training on one thread; the lines start "
            "above the chart.",
            loss_by_seconds(run.results),
            names=names,
        ),
        _chart(
            "Loss against examples",
            "The same examples, no matter how long they took. Fewer, larger updates learn less from each example.",
            loss_by_examples(run.results),
            names=names,
        ),
        _chart(
            "What was computed",
            "Every arm needs the same real tokens (solid). The pale part is padding, which is computed for nothing.",
            work_bars(run.results),
        ),
        _chart(
            "Shapes of the batches",
            "Each mark is a batch. On the dashed line it uses the whole budget, below the line only a part.",
            batch_shapes(run.results, run.settings.max_tokens),
            names=names,
        ),
    ]


def _opening(run: Run) -> str:
    first, planned, steady = run.results[0], run.results[2], run.results[3]
    figures = (
        (_speed(steady, first), "as many real tokens per second as shuffled batches, with as many updates"),
        (_speed(planned, first), "with the full budget: fewer, larger updates"),
        (f"{first.padding:.0%} to {planned.padding:.0%}", "padding under the same budget, from fixed size to planned"),
    )
    items = "".join(f"<li><b>{html.escape(value)}</b>{html.escape(what)}</li>" for value, what in figures)
    return (
        '<p class="eyebrow">batchwright demo</p>'
        "<h1>The same functions, the same model, the same memory: batched four ways</h1>"
        f"<p>A language model with {run.num_parameters / 1e6:.1f} million parameters reads {len(run.lengths):,} "
        "functions of Python&rsquo;s standard library once. No batch may hold more than "
        f"{run.settings.max_tokens:,} padded tokens. A fixed batch size must fit at the longest function, so it "
        "wastes room on all the others; a planned batch holds as many functions as fit.</p>"
        f'<ul class="figures">{items}</ul>'
    )


def _speed(result: ArmResult, first: ArmResult) -> str:
    return times(result.tokens_per_second / first.tokens_per_second)


def _table(results: Sequence[ArmResult]) -> str:
    rows = []
    for kind, (result, row) in enumerate(zip(results, result_rows(results), strict=True)):
        name = Markup(f"{swatch(kind)}{html.escape(result.name)}<small>{html.escape(result.what)}</small>")
        rows.append([name, *row[1:-1], f"{result.rate:.2g}", row[-1]])
    return render_table([*RESULT_HEADER[:-1], "learning rate", "validation loss"], rows, cards=True)


def _reading(run: Run) -> str:
    first, planned, steady = run.results[0], run.results[2], run.results[3]
    return (
        "<h2>How to read it</h2>"
        "<p>Every arm starts from the same weights, sees the same functions once and uses the same optimizer. The "
        "peak learning rate follows one rule for all arms: it grows with the square root of the tokens per update. "
        "Its base was chosen with a few trial runs on these same validation functions. Each arm has one seed, so "
        "small differences in loss mean nothing. "
        "Seconds are processor time on one thread, without validation; they vary a little from run to run, but "
        "padding and updates do not.</p>"
        f"<p>With the full budget there are {planned.num_steps} large updates instead of {first.num_steps}. On this "
        f"few examples they end at a validation loss of {planned.loss:.2f}, compared with {first.loss:.2f}. A "
        f"smaller budget keeps the number of updates ({steady.num_steps}), ends at {steady.loss:.2f} and still saves "
        "the padding. Here time grows with padded tokens, so the gain comes from grouping by length, also at a fixed "
        "size. A GPU that is idle during small steps gains more from the full budget.</p>"
    )


def _chart(title: str, note: str, drawing: str, *, names: Sequence[str] = ()) -> str:
    return (
        f"<figure><figcaption><b>{html.escape(title)}</b>{html.escape(note)}</figcaption>"
        f"{legend(names) if names else ''}{drawing}</figure>"
    )


def _settings(run: Run) -> str:
    settings = {**asdict(run.settings), "num_parameters": run.num_parameters}
    table = render_table((), [(name.replace("_", " "), f"{value}") for name, value in settings.items()], numbers_from=1)
    versions = " · ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"<h2>Settings</h2>{table}<footer>{html.escape(versions)} · the whole demo took {run.seconds:.0f} s</footer>"


WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 14, 30, 46
# Where the bars of a horizontal chart begin; the names stand to the left.
_BARS = 164


def length_histogram(lengths: IntArray) -> str:
    """Draw how many examples have which length; the bins widen with the length."""
    bins = make_bins(lengths)
    every = 2 if len(bins) > 10 else 1  # writing every bound would make them touch
    x = Scale(low=0, high=len(bins), start=_LEFT, stop=WIDTH - _RIGHT)
    y = Scale(low=0, high=max(b.count for b in bins), start=HEIGHT - _BOTTOM, stop=_TOP)
    parts = [Frame(x=x, y=y, x_label="tokens per function (from)", y_label="functions").draw(x_ticks=False)]
    for i, b in enumerate(bins):
        box = {"x": x(i) + 1, "y": y(b.count), "width": x(1) - x(0) - 2, "height": y(0) - y(b.count)}
        parts.append(tag("rect", hover(f"{b.label} tokens: {b.count:,} functions"), class_="mark s0", **box))
        if i % every == 0:
            parts.append(text(f"{b.low}", x(i), y(0) + 18, class_="middle"))
    return figure("".join(parts), width=WIDTH, height=HEIGHT, title="Histogram of lengths")


def padding_bars(entries: Sequence[Entry]) -> str:
    """Draw the padding of each grouping as a bar."""
    row = 29
    height = row * len(entries) + 40
    x = Scale(low=0, high=1, start=_BARS, stop=WIDTH - 52)
    parts = []
    for i, entry in enumerate(entries):
        y, end = 8 + i * row, x(entry.padding)
        shade = "mark rest" if entry.name.startswith("fixed") else "mark s0"
        what = f"{entry.name}: {percent(entry.padding)} padding in {entry.num_batches:,} batches"
        parts += [
            text(entry.name, _BARS - 8, y + 16, class_="end"),
            _bar(what, _BARS, max(end, _BARS + 1.0), y + 3, row - 9, shade),
            text(percent(entry.padding), end + 6, y + 16),
        ]
    parts += [
        tag("line", x1=_BARS, x2=_BARS, y1=4, y2=height - 34, class_="axis"),
        text("padding as a share of the padded tokens", WIDTH - _RIGHT, height - 10, class_="name end"),
    ]
    return figure("".join(parts), width=WIDTH, height=height, title="Padding by grouping")


def work_bars(results: Sequence[ArmResult]) -> str:
    """Draw what each arm computed: real tokens, and padding after them."""
    row = 42
    bottom = row * len(results) + 8
    x = Scale(low=0, high=max(result.padded_tokens for result in results), start=_BARS, stop=WIDTH - _RIGHT)
    parts = []
    for tick in x.ticks(4):
        parts.append(tag("line", x1=x(tick), x2=x(tick), y1=4, y2=bottom, class_="grid"))
        parts.append(text(f"{tick / 1000:,.0f}k" if tick else "0", x(tick), bottom + 18, class_="middle"))
    for kind, result in enumerate(results):
        y, real, end = 8 + kind * row, x(result.num_tokens), x(result.padded_tokens)
        wasted = result.padded_tokens - result.num_tokens
        parts += [
            text(result.name, _BARS - 8, y + 19, class_="end"),
            _bar(f"{result.name}: {result.num_tokens:,} real tokens", _BARS, real, y, row - 14, f"mark s{kind}"),
            _bar(f"{result.name}: {wasted:,} tokens of padding", real, end, y, row - 14, f"mark wasted s{kind}"),
        ]
    parts.append(text("tokens computed", (_BARS + WIDTH) / 2, bottom + 38, class_="name middle"))
    return figure("".join(parts), width=WIDTH, height=bottom + 44, title="Tokens computed by each arm")


def loss_by_seconds(results: Sequence[ArmResult]) -> str:
    """Draw the validation loss of each arm over the seconds it trained."""
    return _loss_lines(results, lambda check: check.seconds, "processor seconds of training", "Loss by seconds", "s")


def loss_by_examples(results: Sequence[ArmResult]) -> str:
    """Draw the validation loss of each arm over the examples it saw."""
    return _loss_lines(results, lambda check: check.num_examples, "examples seen", "Loss by examples", "examples")


def batch_shapes(results: Sequence[ArmResult], max_tokens: int) -> str:
    """Draw every batch by its padded length and its number of examples, with the line of the budget."""
    shapes = [shape for result in results for shape in result.shapes]
    lengths, most = [length for _, length in shapes], max(items for items, _ in shapes)
    x = Scale(low=min(lengths) * 0.9, high=max(lengths) * 1.1, start=_LEFT, stop=WIDTH - _RIGHT, log=True)
    y = Scale(low=0.8, high=most * 1.25, start=HEIGHT - _BOTTOM, stop=_TOP, log=True)
    parts = [Frame(x=x, y=y, x_label="padded length of the batch (log)", y_label="examples in the batch (log)").draw()]
    start = max(x.low, max_tokens / y.high)
    line = {"x1": x(start), "y1": y(max_tokens / start), "x2": x(x.high), "y2": y(max_tokens / x.high)}
    parts.append(tag("line", hover(f"{max_tokens:,} padded tokens"), class_="limit", **line))
    for kind, result in reversed(list(enumerate(results))):  # the first arm has the fewest marks: on top
        for items, length in sorted(set(result.shapes)):
            what = hover(f"{result.name}: {items} of {length} = {items * length:,} padded tokens")
            parts.append(marker(kind, x(length), y(items), what, size=3.2, shade="pale"))
    return figure("".join(parts), width=WIDTH, height=HEIGHT, title="Shapes of the batches")


def _bar(what: str, start: float, end: float, y: float, height: float, shade: str) -> str:
    return tag("rect", hover(what), x=start, y=y, width=end - start, height=height, class_=shade)


def _loss_lines(results: Sequence[ArmResult], at: Callable[[Check], float], x_label: str, title: str, unit: str) -> str:
    # The first check of an arm is still on the steep part; it may lie above the frame, where its line comes from.
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
                marks.append(marker(kind, x(at(check)), y(check.loss), what))
    name = title.lower().replace(" ", "-")
    parts = [
        Frame(x=x, y=y, x_label=x_label, y_label="validation loss per token").draw(),
        clip("".join(lines), name, x=0, y=_TOP, width=WIDTH, height=HEIGHT - _TOP),
        *marks,
    ]
    return figure("".join(parts), width=WIDTH, height=HEIGHT, title=title)
