"""The command ``demo``: read the corpus, train every arm in turn, write the page."""

from __future__ import annotations

import argparse
import html
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import batchwright as bw

from ..._charts import page
from ..._charts.page import Markup, read_asset
from ..._files import make_folder, write_atomic
from ..._machine import one_thread, versions_of
from ..._optional import require
from ..._types import IntArray
from ..compare import Comparison, Settings, compare
from ..lengths import make_bins
from ..options import Commands, add_command, add_option
from ..screen import Screen, percent, render_table, times
from .records import (
    AS_LONG_HEADER,
    FULL,
    MINUTES,
    QUICK,
    ArmResult,
    DemoSettings,
    as_long_rows,
    gpu_line,
    gpu_section,
    stored_results,
    verdict,
)

_DEMO = f"""\
Train a small model with and without planned batches (needs torch).

The model learns the functions of Python's standard library, with fixed-size batches and with planned
batches: the same updates, then the same seconds. One page has the verdict. Needs no network; takes at
most {MINUTES} minutes on two quiet cores.
"""

_EXAMPLES = """\
  batchwright demo
  batchwright demo --quick --output /tmp/demo
"""


def add_demo(commands: Commands) -> None:
    """Add the command ``demo``."""
    command = add_command(commands, "demo", _DEMO, _EXAMPLES, run=_run)
    add_option(command, "--output DIR", "folder for index.html and results.json", type=Path, default=Path("demo_out"))
    add_option(command, "--quick", "train for a few seconds, to see that it runs")


def _run(arguments: argparse.Namespace) -> None:
    """Train every arm, print a table, and write ``index.html`` and ``results.json``."""
    require("torch", extra="torch")
    from .finding import train_without_size
    from .training import lengths_of, load_corpus, make_arms, make_model, train_arm, train_as_long

    start = time.perf_counter()
    screen = Screen.of_stdout()
    settings = QUICK if arguments.quick else FULL
    make_folder(arguments.output)
    with one_thread():  # two threads on shared cores are slower than one, and their times vary more
        screen.show(["Reading the functions of Python's standard library …"])
        corpus = load_corpus(settings)
        lengths = lengths_of(corpus.train)
        num_parameters = sum(p.numel() for p in make_model(settings, len(corpus.vocabulary)).parameters())
        screen.show([_data_line(lengths, num_parameters, settings.max_tokens), "", "Every function once:"])
        results = [train_arm(arm, corpus, settings) for arm in make_arms(corpus.train, settings)]
        results.append(train_without_size(corpus, settings))
        screen.show(["As long as the first one took:"])
        longer = train_as_long(corpus, settings, results)
    _show(screen, results, longer)
    machine = f"{platform.system()} {platform.machine()}, one thread"
    run = Run(
        settings=settings,
        lengths=lengths,
        comparison=compare(lengths, Settings(max_tokens=settings.max_tokens, seed=settings.seed)),
        results=results,
        longer=longer,
        num_parameters=num_parameters,
        versions={"batchwright": bw.__version__, **versions_of("torch", "numpy"), "machine": machine},
        seconds=time.perf_counter() - start,
    )
    _write(run, arguments.output)
    took = f"{run.seconds:.0f} s; with the install at most {MINUTES} minutes on two quiet cores"
    screen.show([f"The page: {arguments.output / 'index.html'} ({took})", f"Your own data: {_NEXT}"])


def _show(screen: Screen, results: Sequence[ArmResult], longer: Sequence[ArmResult]) -> None:
    """Print the verdict, then what it follows from."""
    for sentence in verdict(results, longer):
        screen.show(["", *screen.wrap(sentence)])
    screen.show(["", "The same examples, each once:", *render_table(RESULT_HEADER, result_rows(results)), ""])
    screen.show(["The same seconds:", *render_table(AS_LONG_HEADER, as_long_rows(results, longer)), ""])
    stored = stored_results()
    screen.show([f"On a GPU (stored results of one {stored['device']}, not of this run):"])
    for task in stored["tasks"]:
        screen.show(screen.wrap(gpu_line(task)))
    screen.show(["", f"How the size was found, in tokens per update ({results[-1].name}):", *results[-1].reasons, ""])


def _data_line(lengths: IntArray, num_parameters: int, max_tokens: int) -> str:
    return (
        f"{len(lengths):,} functions, {int(lengths.sum()):,} tokens, the longest has {int(lengths.max())}; "
        f"a model with {num_parameters:,} parameters; at most {max_tokens:,} padded tokens per batch"
    )


def _write(run: Run, output: Path) -> None:
    write_atomic(output / "index.html", render_page(run))
    figures = {
        "settings": asdict(run.settings),
        "versions": dict(run.versions),
        "seconds": run.seconds,
        "verdict": verdict(run.results, run.longer),
        "arms": [result.to_dict() for result in run.results],
        "arms_for_equal_seconds": [result.to_dict() for result in run.longer],
    }
    write_atomic(output / "results.json", json.dumps(figures, indent=2) + "\n")


_NEXT = "batchwright advise FILE"  # what to do after the demo
_NO_SCRIPT = "<noscript><p>The charts need JavaScript; the table above has the figures of each arm.</p></noscript>"


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the page shows.

    Args:
        settings: the settings of the demo.
        lengths: the lengths of the training examples.
        comparison: the groupings of those lengths under the budget.
        results: what each arm did with every example once; the others are compared with the first.
        longer: what grouped and planned batches did in the seconds of the first arm.
        num_parameters: the parameters of the model.
        versions: the names and versions of what the run used.
        seconds: how long the whole demo took.
    """

    settings: DemoSettings
    lengths: IntArray
    comparison: Comparison
    results: Sequence[ArmResult]
    longer: Sequence[ArmResult]
    num_parameters: int
    versions: Mapping[str, str | None]
    seconds: float


def render_page(run: Run) -> str:
    """Return the page as HTML that needs nothing else: no script, font or picture from elsewhere."""
    body = [
        _opening(run),
        f"<h2>The same examples, each once</h2>{_table(run.results)}",
        _as_long(run),
        gpu_section(stored_results()),
        _reading(run),
        _finding(run.results[-1]),
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
    shuffled, grouped, _, planned = run.results[:4]
    figures = (
        (_speed(planned, shuffled), "as many real tokens per second as shuffled batches, with about as many updates"),
        (_speed(planned, grouped), "as many as the same fixed size grouped by length"),
        (f"{shuffled.padding:.0%} to {planned.padding:.0%}", "padding, from shuffled to planned"),
    )
    items = "".join(f"<li><b>{html.escape(value)}</b>{html.escape(what)}</li>" for value, what in figures)
    first, *rest = (f"<p>{html.escape(sentence)}</p>" for sentence in verdict(run.results, run.longer))
    return (
        '<p class="eyebrow">batchwright demo, on this machine</p>'
        f"<h1>The same model, the same memory: batched five ways</h1>{first}"
        f'<ul class="figures">{items}</ul>{"".join(rest)}'
        f"<p>A language model with {run.num_parameters / 1e6:.1f} million parameters reads {len(run.lengths):,} "
        "functions of Python&rsquo;s standard library. No batch may hold more than "
        f"{run.settings.max_tokens:,} padded tokens. A fixed batch size must fit at the longest function, so it "
        "wastes room on all the others; a planned batch holds as many functions as fit.</p>"
        f"<p>For your own data, <code>{_NEXT}</code> says whether it pays off, by the lengths of the examples.</p>"
    )


def _as_long(run: Run) -> str:
    table = page.render_table(AS_LONG_HEADER, as_long_rows(run.results, run.longer), numbers_from=1)
    return (
        "<h2>The same seconds</h2><p>What is faster may read the functions again. Each of these trained for about the "
        f"processor seconds of the shuffled arm, and its learning rate fell to the end of them.</p>{table}"
    )


def _speed(result: ArmResult, first: ArmResult) -> str:
    return times(result.tokens_per_second / first.tokens_per_second)


def _table(results: Sequence[ArmResult]) -> str:
    rows = []
    for result, row in zip(results, result_rows(results), strict=True):
        name = Markup(f"{html.escape(result.name)}<small>{html.escape(result.what)}</small>")
        rows.append([name, *row[1:-1], f"{result.rate:.2g}", row[-1]])
    return page.render_table([*RESULT_HEADER[:-1], "learning rate", "validation loss"], rows, cards=True)


def _reading(run: Run) -> str:
    shuffled, _, full, planned = run.results[:4]
    return _part(
        "How to read it",
        "<p>Every arm starts from the same weights, sees the same functions once and uses the same optimizer. The "
        "peak learning rate follows one rule for all arms: it grows with the square root of the tokens per update. "
        "Its base was chosen with a few trial runs on these same validation functions. Each arm has one seed, so "
        "small differences in loss mean nothing. "
        "Seconds are processor time on one thread, without validation; they vary a little from run to run, but "
        "padding and updates do not.</p>"
        f"<p>With the full budget there are {full.num_steps} large updates instead of {shuffled.num_steps}. On this "
        f"few examples they end at a validation loss of {full.loss:.2f}, compared with {shuffled.loss:.2f}. A "
        f"smaller budget keeps the number of updates ({planned.num_steps}), ends at {planned.loss:.2f} and still saves "
        "the padding.</p>",
    )


def _finding(result: ArmResult) -> str:
    """Return why the size changed where a policy chose it, nothing elsewhere."""
    if not result.reasons:
        return ""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in result.reasons)
    return _part(
        "A size that nobody chose",
        f"<p>The arm &ldquo;{html.escape(result.name)}&rdquo; was given no batch size: <code>size.goodput</code> times "
        "a few sizes, measures the noise of the gradient, and takes the tokens per update that make the most progress "
        f"per second. The learning rate and Adam&rsquo;s second beta follow the size.</p><ol>{lines}</ol>",
    )


def _settings(run: Run) -> str:
    settings = {**asdict(run.settings), "num_parameters": run.num_parameters}
    table = page.render_table(
        (), [(name.replace("_", " "), f"{value}") for name, value in settings.items()], numbers_from=1
    )
    versions = " · ".join(f"{name} {version}" for name, version in run.versions.items())
    footer = f"<footer>{html.escape(versions)} · the whole demo took {run.seconds:.0f} s</footer>"
    return _part("Settings", table) + footer


def _part(title: str, body: str) -> str:
    """Return a part of the page that a phone folds under its title."""
    return f'<details class="part" open><summary><h2>{title}</h2></summary>{body}</details>'
