"""One self-contained page about a run: figures, charts, table, settings."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from ..._charts import page
from ..._charts.page import Markup, read_asset, render_table
from ..._types import IntArray
from ..compare import Comparison
from ..lengths import make_bins
from ..screen import percent, times
from .records import ArmResult, DemoSettings

_NO_SCRIPT = "<noscript><p>The charts need JavaScript; the table above has the figures of each arm.</p></noscript>"


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
    """Return the page as HTML that needs nothing else: no script, font or picture from elsewhere."""
    body = [
        _opening(run),
        f"<h2>The arms</h2>{_table(run.results)}",
        _reading(run),
        f'<h2>Charts</h2>{_NO_SCRIPT}<div class="charts" id="charts"></div>',
        _settings(run),
    ]
    scripts = [read_asset(__package__, "charts.js")]
    return page.render_page("batchwright demo", "\n".join(body), scripts=scripts, data=_chart_data(run))


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


def _chart_data(run: Run) -> dict[str, Any]:
    return {
        "bins": [{"low": b.low, "range": b.label, "count": b.count} for b in make_bins(run.lengths)],
        "groupings": [
            {"name": entry.name, "padding": entry.padding, "batches": entry.num_batches}
            for entry in run.comparison.entries
        ],
        "arms": [
            {
                "name": result.name,
                "tokens": result.num_tokens,
                "padded": result.padded_tokens,
                "checks": [{"examples": c.num_examples, "seconds": c.seconds, "loss": c.loss} for c in result.checks],
                "shapes": sorted(set(result.shapes)),
            }
            for result in run.results
        ],
        "maxTokens": run.settings.max_tokens,
    }


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
    for result, row in zip(results, result_rows(results), strict=True):
        name = Markup(f"{html.escape(result.name)}<small>{html.escape(result.what)}</small>")
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


def _settings(run: Run) -> str:
    settings = {**asdict(run.settings), "num_parameters": run.num_parameters}
    table = render_table((), [(name.replace("_", " "), f"{value}") for name, value in settings.items()], numbers_from=1)
    versions = " · ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"<h2>Settings</h2>{table}<footer>{html.escape(versions)} · the whole demo took {run.seconds:.0f} s</footer>"
