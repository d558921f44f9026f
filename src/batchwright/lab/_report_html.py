"""The report as one page that needs nothing else: style, script and numbers are in it."""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ._observe_groups import groups_of
from ._observe_slices import cells_of
from ._observe_words import counted
from ._report_matrix import NAMES, render_matrix, row_order
from ._report_parts import (
    footer_text,
    prose,
    render_datasets,
    render_failures,
    render_observations,
    render_rates,
    render_settings,
)
from ._report_records import BASELINE, Lab, Record
from ._report_view import make_view
from .observations import Observation, observe

# In this order: each uses names of those before it.
_SCRIPTS = ("_page_svg.js", "_page_curves.js", "_page_pareto.js", "_page.js")
# Strategies in colour when the page opens.
_NUM_LEADERS = 5
_AXES = {"examples": "examples", "updates": "updates", "seconds": "seconds"}
_VALUES = {"loss": "validation loss", "metric": "quality", "train": "training loss"}
# Nothing may be fetched but the state of the lab from the page's own server.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"


def render_html(lab: Lab, *, observations: Sequence[Observation] | None = None, live: str = "", stamp: str = "") -> str:
    """Return the page.

    Args:
        lab: the runs.
        observations: what they show; None works it out.
        live: the address that answers with the state of the lab, for a page that follows it; empty for a file.
        stamp: the state this page shows.
    """
    observations = observe(lab.records) if observations is None else observations
    body = [_header(lab, observations), _filters(lab.records), "<main>", *_sections(lab, observations), "</main>"]
    attributes = {"data-live": live, "data-stamp": stamp, "data-leaders": json.dumps(leaders(lab.records))}
    given = "".join(f' {name}="{html.escape(value)}"' for name, value in attributes.items())
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>batchwright lab: {html.escape(lab.name)}</title><style>{_asset('_page.css')}</style></head>",
            f"<body{given}>",
            *body,
            f"<footer>{html.escape(footer_text(lab.records))}</footer>",
            f'<script type="application/json" id="data">{embed(make_view(lab))}</script>',
            f'<script>(() => {{\n"use strict";\n{script}}})();</script>',
            "</body></html>",
            "",
        ]
    )


def leaders(records: Sequence[Record]) -> list[str]:
    """Return the strategies to show in colour at first: the best over all, or the first ones where none has a place."""
    return row_order(records)[:_NUM_LEADERS]


def embed(view: Any) -> str:
    """Return JSON that can stand inside a page: no end of a script in it.

    >>> embed({"a": "</script>"})
    '{"a":"\\\\u003c/script>"}'
    """
    return json.dumps(view, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _header(lab: Lab, observations: Sequence[Observation]) -> str:
    kinds = (("dataset", "data set"), ("model", "model"), ("strategy", "strategy"), ("seed", "seed"))
    counts = [counted(len(lab.records), "run")]
    counts += [counted(len({run[key] for run in lab.records}), what) for key, what in kinds]
    figures = "".join("<li><b>{}</b>{}</li>".format(*count.split(" ", 1)) for count in counts)
    lead = next((one.sentence for one in observations if one.topic == "overall"), "")
    return (
        '<a class="skip" href="#matrix">To the results</a><header>'
        f'<p class="eyebrow">batchwright lab · {html.escape(lab.name)}</p>'
        "<h1>Which batch size strategy, on which data?</h1>"
        f'<p class="lead">{prose(lead)}</p><ul class="figures">{figures}</ul>'
        '<p id="live" role="status" hidden></p></header>'
    )


def _filters(records: Sequence[Record]) -> str:
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


_CONTENTS = (
    ("matrix", "Effects"),
    ("observations", "Observations"),
    ("curves", "Curves"),
    ("pareto", "Cost and quality"),
    ("decisions-of", "Decisions"),
    ("failed", "Failed runs"),
    ("about", "Data and settings"),
)


def _sections(lab: Lab, observations: Sequence[Observation]) -> list[str]:
    records = lab.records
    return [
        _section(
            "matrix",
            f"Against {BASELINE}",
            "What each strategy changed in pairs of runs with the same data set, model and seed. "
            '<span class="better">▲ better</span>, <span class="worse">▼ worse</span>, after correction for all '
            "strategies of a column; ○ no difference shown; ? one seed, no test. Strategies stand in the order of "
            "their mean over all.",
            _controls(_select("measure", "Compare by", NAMES.items())) + render_matrix(records),
        ),
        _section(
            "observations",
            "Observations",
            "Written from the numbers of all runs; filters do not change them.",
            render_observations(observations),
        ),
        _section(
            "curves",
            "Curves",
            "Means over seeds, from the least to the largest seed shaded. Underneath, the batch size. Grey lines are "
            "the other strategies: choose a name to colour its line, point at a chart for values.",
            _controls(_select("x", "Along", _AXES.items()) + _select("y", "Show", _VALUES.items()))
            + f'<div id="chips" role="group" aria-label="Strategies in colour"></div>{_NO_SCRIPT}'
            '<div class="grid-of-charts" id="curves-grid"></div>',
        ),
        _section(
            "pareto",
            "Cost and quality",
            "Up is better, left is cheaper. Whiskers reach from the least to the largest seed. The line joins the "
            "strategies that no other beats in both.",
            _controls(_select("cost", "Cost", (("updates", "updates"), ("seconds", "seconds"))))
            + '<div class="grid-of-charts" id="pareto-grid"></div>',
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
            render_datasets(records) + render_settings(records) + render_rates(lab.plan) + _notes(lab),
        ),
    ]


_NO_SCRIPT = "<noscript><p>The charts need JavaScript; the tables and observations do not.</p></noscript>"


def _notes(lab: Lab) -> str:
    notes = []
    if lab.num_replaced:
        notes.append(f"{lab.num_replaced:,} older runs of the same data set, model, strategy and seed are left out.")
    if lab.num_unreadable:
        notes.append(f"{lab.num_unreadable:,} lines of runs.jsonl are no records of runs and are left out.")
    return "".join(f"<p>{note}</p>" for note in notes)


def _section(name: str, title: str, note: str, body: str) -> str:
    text = f'<p class="note">{note}</p>' if note else ""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{text}{body}</section>'
    )


def _controls(content: str) -> str:
    return f'<div class="controls">{content}</div>'


def _select(name: str, title: str, options: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<option value="{html.escape(value)}">{html.escape(text)}</option>' for value, text in options)
    return f'<label>{title} <select data-state="{name}" autocomplete="off">{items}</select></label>'


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
