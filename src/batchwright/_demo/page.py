"""One self-contained page about a run: figures, charts, table, settings."""

from __future__ import annotations

import html
import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

from .._cli.compare import Comparison
from .._cli.table import percent, times
from .._types import IntArray
from .charts import batch_shapes, legend, length_histogram, loss_by_examples, loss_by_seconds, padding_bars, work_bars
from .results import ArmResult
from .settings import DemoSettings
from .svg import marker


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the page shows.

    Args:
        settings: of the demo.
        lengths: of the training examples.
        comparison: the groupings of those lengths under the budget.
        results: what each arm did; the first is what the others are compared with.
        num_parameters: of the model.
        versions: names and versions of what the run used.
        seconds: the whole demo took.
    """

    settings: DemoSettings
    lengths: IntArray
    comparison: Comparison
    results: Sequence[ArmResult]
    num_parameters: int
    versions: Mapping[str, str]
    seconds: float


def render_page(run: Run) -> str:
    """Return the page as HTML that needs nothing else: no script, no font, no picture from elsewhere."""
    names = [result.name for result in run.results]
    charts = (
        _chart(
            "How long the functions are",
            "Most are short, a few are cut at the limit: the bins widen to the right.",
            length_histogram(run.lengths),
        ),
        _chart(
            "Padding by grouping",
            f"The same functions and the same budget of {run.settings.max_tokens:,} padded tokens. Grey: fixed size.",
            padding_bars(run.comparison.entries),
        ),
        _chart(
            "Loss against time",
            "Further left is faster, lower is better. Processor seconds of training on one thread; lines begin above.",
            loss_by_seconds(run.results),
            names=names,
        ),
        _chart(
            "Loss against examples",
            "The same examples, however long they took. Fewer, larger updates learn less from each.",
            loss_by_examples(run.results),
            names=names,
        ),
        _chart(
            "What was computed",
            "Every arm needs the same real tokens (solid). The pale part is padding, computed for nothing.",
            work_bars(run.results),
        ),
        _chart(
            "Shapes of the batches",
            "Each mark is a batch. On the dashed line the budget is used up; below it, it is not.",
            batch_shapes(run.results, run.settings.max_tokens),
            names=names,
        ),
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>batchwright demo</title><style>{_css()}</style></head><body>",
            _opening(run),
            f'<h2>The arms</h2><div class="wide">{_table(run.results)}</div>',
            _reading(run),
            f'<h2>Charts</h2><div class="charts">{"".join(charts)}</div>',
            _settings(run),
            "</body></html>",
            "",
        ]
    )


def _opening(run: Run) -> str:
    first, planned, steady = run.results[0], run.results[2], run.results[3]
    figures = (
        (_speed(steady, first), "the real tokens a second of shuffled batches, at as many updates"),
        (_speed(planned, first), "with the full budget: fewer, larger updates"),
        (f"{first.padding:.0%} to {planned.padding:.0%}", "padding at the same budget, fixed size to planned"),
    )
    items = "".join(f"<li><b>{html.escape(value)}</b>{html.escape(what)}</li>" for value, what in figures)
    return (
        '<p class="eyebrow">batchwright demo</p>'
        "<h1>The same functions, the same model, the same memory: batched four ways</h1>"
        f"<p>A language model of {run.num_parameters / 1e6:.1f} million parameters reads {len(run.lengths):,} "
        "functions of Python&rsquo;s standard library once. No batch may hold more than "
        f"{run.settings.max_tokens:,} padded tokens. A fixed batch size must fit at the longest function, so it "
        "wastes room on all others; a planned batch holds as many functions as fit.</p>"
        f'<ul class="figures">{items}</ul>'
    )


def _speed(result: ArmResult, first: ArmResult) -> str:
    return times(result.tokens_per_second / first.tokens_per_second)


def _table(results: Sequence[ArmResult]) -> str:
    header = ("", "real tokens/s", "ratio", "padding", "updates", "CPU seconds", "learning rate", "validation loss")
    rows = []
    for kind, result in enumerate(results):
        mark = f'<svg viewBox="0 0 14 14" aria-hidden="true">{marker(kind, 7, 7, class_=f"dot s{kind}")}</svg>'
        cells = (
            f"{mark}{html.escape(result.name)}<small>{html.escape(result.what)}</small>",
            f"{result.tokens_per_second:,.0f}",
            _speed(result, results[0]),
            percent(result.padding),
            f"{result.num_steps:,}",
            f"{result.seconds:.1f}",
            f"{result.rate:.2g}",
            f"{result.loss:.3f}",
        )
        named = "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in zip(header[1:], cells[1:], strict=True))
        rows.append(f"<tr><td>{cells[0]}</td>{named}</tr>")
    head = "".join(f"<th>{name}</th>" for name in header)
    return f'<table class="arms"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _reading(run: Run) -> str:
    first, planned, steady = run.results[0], run.results[2], run.results[3]
    return (
        "<h2>How to read it</h2>"
        "<p>Every arm starts from the same weights, sees the same functions once and uses the same optimizer. The "
        "peak learning rate follows one rule for all: it grows with the root of the tokens an update averages; "
        "its base was chosen by a few trial runs on these same validation functions, one seed each, so small "
        "differences in loss mean nothing. "
        "Seconds are processor time on one thread, without validation; they vary a little from run to run, padding "
        "and updates do not.</p>"
        f"<p>Filling the budget makes {planned.num_steps} large updates in place of {first.num_steps} and, on so few "
        f"examples, ends at a validation loss of {planned.loss:.2f} against {first.loss:.2f}. A smaller budget keeps "
        f"the number of updates ({steady.num_steps}), ends at {steady.loss:.2f} and still saves the padding. Here "
        "time grows with padded tokens, so grouping by length brings the gain, at a fixed size too; a GPU that small "
        "steps leave idle gains more from the full budget.</p>"
    )


def _chart(title: str, note: str, drawing: str, *, names: Sequence[str] = ()) -> str:
    return (
        f"<figure><figcaption><b>{html.escape(title)}</b>{html.escape(note)}</figcaption>"
        f"{legend(names) if names else ''}{drawing}</figure>"
    )


def _settings(run: Run) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in {**asdict(run.settings), "num_parameters": run.num_parameters}.items()
    )
    versions = " · ".join(f"{name} {version}" for name, version in run.versions.items())
    return (
        f'<h2>Settings</h2><div class="wide"><table class="settings"><tbody>{rows}</tbody></table></div>'
        f"<footer>{html.escape(versions)} · the whole demo took {run.seconds:.0f} s</footer>"
    )


def _css() -> str:
    return importlib.resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
