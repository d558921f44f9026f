"""The report as one page that needs nothing else: style, script and numbers are in it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence

from ..._charts.page import read_asset, render_page
from .._records import RunRecord
from ..observations._effects import counted, end_of
from ..observations._slices import cells_of, groups_of
from ..observations.evidence import Finding
from ..observations.observing import observe
from ..strategies.strategy import BASELINE
from ._tables import (
    NAMES,
    footer_text,
    prose,
    render_datasets,
    render_failures,
    render_findings,
    render_matrix,
    render_rates,
    render_settings,
    row_order,
)
from ._verdict import verdict_of
from ._view import make_view
from .folder import LabFolder

# In this order: each uses names of the ones before it.
_SCRIPTS = ("curves.js", "pareto.js", "page.js")
_CONTENTS = (
    ("matrix", "Effects"),
    ("observations", "Observations"),
    ("curves", "Curves"),
    ("pareto", "Cost and quality"),
    ("decisions-of", "Decisions"),
    ("failed", "Failed runs"),
    ("about", "Data and settings"),
)
_NO_SCRIPT = "<noscript><p>The charts need JavaScript; the tables and observations do not.</p></noscript>"
# How many strategies are coloured when the page opens.
_NUM_LEADERS = 5
_AXES = {"examples": "examples", "updates": "updates", "simulated": "simulated seconds", "seconds": "measured seconds"}
_VALUES = {"loss": "validation loss", "metric": "quality", "train": "training loss"}


def render_html(
    lab: LabFolder, *, observations: Sequence[Finding] | None = None, live: str = "", stamp: str = ""
) -> str:
    """Return the page.

    Args:
        lab: the runs.
        observations: what they show; None observes them.
        live: the address that answers with the state of the lab, for a page that follows it; empty for a file.
        stamp: the state that this page shows.
    """
    observations = observe(lab.records) if observations is None else observations
    body = [
        _header(lab, observations),
        _filters(lab.records),
        "<main>",
        *_sections(lab, observations),
        "</main>",
        f"<footer>{html.escape(footer_text(lab.records))}</footer>",
    ]
    return render_page(
        f"batchwright lab: {lab.name}",
        "\n".join(body),
        scripts=[read_asset(__package__, f"assets/{name}") for name in _SCRIPTS],
        data=make_view(lab),
        attributes={
            "class": "dashed",
            "data-live": live,
            "data-stamp": stamp,
            "data-leaders": json.dumps(leaders(lab.records)),
        },
    )


def leaders(records: Sequence[RunRecord]) -> list[str]:
    """Return the strategies to colour at first: the best over all cells, or simply the first ones if none is ranked."""
    return row_order(records)[:_NUM_LEADERS]


def _header(lab: LabFolder, observations: Sequence[Finding]) -> str:
    kinds = (("dataset", "data set"), ("model", "model"), ("strategy", "strategy"), ("seed", "seed"))
    counts = [counted(len(lab.records), "run")]
    counts += [counted(len({run[key] for run in lab.records}), what) for key, what in kinds]
    figures = "".join("<li><b>{}</b>{}</li>".format(*count.split(" ", 1)) for count in counts)
    verdict = verdict_of(lab.records, observations)
    answers = "".join(f"<dt>{question}</dt><dd>{prose(answer)}</dd>" for question, answer in verdict.answers)
    exact = "".join(f'<p class="verdict">{prose(sentence)}</p>' for sentence in verdict.exact)
    folded = f"<details><summary>The same with intervals and p-values</summary>{exact}</details>" if exact else ""
    return (
        '<a class="skip" href="#matrix">To the results</a><header>'
        f'<p class="eyebrow">batchwright lab · {html.escape(lab.name)}</p>'
        "<h1>Which batch size strategy, on which data?</h1>"
        '<div id="live" hidden><p role="status"></p><progress hidden></progress></div>'
        f'<p class="lead">{prose(verdict.lead)}</p><dl class="answers">{answers}</dl>{folded}'
        f'<ul class="figures">{figures}</ul></header>'
    )


def axes_of(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return what the curves can be drawn along; older records have no simulated seconds."""
    has_simulated = any(end_of(run, "simulated_seconds") is not None for run in records)
    return {name: title for name, title in _AXES.items() if name != "simulated" or has_simulated}


def _filters(records: Sequence[RunRecord]) -> str:
    cells = cells_of(records)
    choices = (
        ("dataset", "Data set", "all data sets", dict.fromkeys(cell.dataset for cell in cells)),
        ("model", "Model", "all models", dict.fromkeys(sorted({cell.model for cell in cells}))),
        ("group", "Group of strategies", "all groups", dict.fromkeys(groups_of(records).values())),
    )
    selects = "".join(
        _select(name, title, [("", every), *((value, value) for value in values)])
        for name, title, every, values in choices
    )
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in _CONTENTS)
    return (
        f'<nav aria-label="Contents">{links}</nav>'
        f'<form class="filters" aria-label="Filters" onsubmit="return false">{selects}'
        '<button type="button" id="reset">Show all</button></form>'
    )


def _sections(lab: LabFolder, observations: Sequence[Finding]) -> list[str]:
    records, axes = lab.records, axes_of(lab.records)
    return [
        _section(
            "matrix",
            f"Against {BASELINE}",
            "What each strategy changed in pairs of runs with the same data set, model and seed. "
            '<span class="better">▲ better</span>, <span class="worse">▼ worse</span>, corrected for the whole '
            "table, and over all for the headline; ○ no difference shown; ? only one seed, no test. Strategies are "
            "ordered by their mean over all. Losses after equal updates or seconds are read off the curves.",
            _controls(_select("measure", "Compare by", NAMES.items())) + render_matrix(records),
        ),
        _section(
            "observations",
            "Observations",
            "Made from the numbers of all runs; filters do not change them.",
            render_findings(observations),
        ),
        _section(
            "curves",
            "Curves",
            "Means over seeds; the shade reaches from the lowest to the highest seed. Below is the batch size. "
            "Grey lines are the other strategies: choose a name to colour its line, point at a chart to see values.",
            _controls(_switch("x", "Along", axes) + _select("y", "Show", _VALUES.items()))
            + f'<div id="chips" role="group" aria-label="Strategies in colour"></div>{_NO_SCRIPT}'
            '<div class="charts many" id="curves-grid"></div>',
        ),
        _section(
            "pareto",
            "Cost and quality",
            "Up is better, left is cheaper. Whiskers reach from the lowest to the highest seed. The line joins the "
            "strategies that no other beats in both.",
            _controls(_switch("cost", "Cost", {name: title for name, title in axes.items() if name != "examples"}))
            + '<div class="charts many" id="pareto-grid"></div>',
        ),
        _section(
            "decisions-of",
            "Decisions",
            "Every change of the batch size in one run, and why.",
            _controls('<label>Run <select id="run"></select></label>') + '<div id="decisions"></div>',
        ),
        _section("failed", "Failed runs", "", render_failures(records)),
        _section(
            "about",
            "Data and settings",
            "",
            render_datasets(records) + render_settings(records) + render_rates(records, lab.plan) + _notes(lab),
        ),
    ]


def _notes(lab: LabFolder) -> str:
    notes = []
    if lab.num_replaced:
        notes.append(f"{lab.num_replaced:,} older runs of the same data set, model, strategy and seed are left out.")
    if lab.num_unreadable:
        notes.append(f"{lab.num_unreadable:,} lines of runs.jsonl are not records of runs and are left out.")
    return "".join(f"<p>{note}</p>" for note in notes)


def _section(name: str, title: str, note: str, body: str) -> str:
    text = f'<p class="note">{note}</p>' if note else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{text}{body}</section>'
    )


def _controls(content: str) -> str:
    return f'<div class="controls">{content}</div>'


def _switch(name: str, title: str, options: Mapping[str, str]) -> str:
    """Return buttons of which one is pressed; Tab reaches them, and the arrow keys go from one to the next."""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{html.escape(value)}" data-state="{name}">'
        f"<span>{html.escape(text)}</span></label>"
        for value, text in options.items()
    )
    return f'<fieldset class="switch"><legend>{title}</legend>{buttons}</fieldset>'


def _select(name: str, title: str, options: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<option value="{html.escape(value)}">{html.escape(text)}</option>' for value, text in options)
    return f'<label>{title} <select data-state="{name}" autocomplete="off">{items}</select></label>'
