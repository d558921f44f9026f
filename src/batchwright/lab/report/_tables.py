"""The tables and texts of the report: the matrix of effects, findings, data sets, failed runs, settings."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, final

from ..._charts.page import render_table
from .._records import CellKey, RunRecord, cell_of, diverged, number, ordered
from ..observations._effects import LOSS, Measure, counted, effects, misreadings, p_text
from ..observations._equal import BASES, MEASURES
from ..observations._headline import TOPIC, Family, family_of
from ..observations._ranking import cell_tests, rank, testable
from ..observations._reasons import time_model_of, time_text
from ..observations._slices import cells_of, groups_of, kind_of, overall, properties_of
from ..observations._tuning import edge_rates, tuning_of
from ..observations.evidence import Compared, Evidence, Finding, compare_all
from ..strategies.strategy import BASELINE

NAMES = {measure.name: measure.title[0].upper() + measure.title[1:] for measure in MEASURES}
SIGNS = {"better": "▲", "worse": "▼", "open": "○", "single": "?"}
_WORDS = {"better": "better", "worse": "worse", "open": "no difference shown", "single": "one seed"}
TOPICS = {
    "scope": "What was run",
    TOPIC: "In short",
    "overall": "Over everything",
    "convergence": "On the way there",
    "cost": "Fewer updates",
    "reacting": "Reacting or only growing",
    "type": "By type of data",
    "dimensionality": "By dimensionality",
    "size": "By size of the data set",
    "label noise": "By label noise",
    "model": "By model",
    "no better": "Where adapting is no better",
    "quality": "By accuracy, R² or likelihood",
    "tuning": "Learning rates",
    "limits": "What this cannot say",
}


@final
@dataclass(frozen=True, kw_only=True)
class Effect:
    """One entry of the matrix.

    Args:
        verdict: ``"better"``, ``"worse"``, ``"open"`` if no difference is shown, ``"single"`` with one seed.
        text: the mean change.
        interval: its 95 % interval; empty with one seed.
        note: seeds and corrected p-value, in words.
        rate: the chosen learning rate, if it lay at the edge of the grid; empty otherwise.
    """

    verdict: str
    text: str
    interval: str
    note: str
    rate: str = ""


def matrix_effects(records: Sequence[RunRecord], measure: Measure) -> dict[tuple[CellKey, str], Effect]:
    """Return the entry of each data set, model and strategy."""
    found = effects(records, measure)
    metrics = {cell_of(run): run.get("metric_name") for run in records}
    entries = {place: _single(measure, changes, metrics[place[0]]) for place, changes in found.items()}
    for cell, tests in cell_tests(found, measure, misread=misreadings(records, measure)).items():
        for one in tests.compared:
            entries[cell, one.strategy] = _tested(measure, one, metrics[cell])
    rates = edge_rates(records)
    return {
        place: replace(entry, rate=f"{rates[place]:g}") if place in rates else entry for place, entry in entries.items()
    }


def pooled_effects(records: Sequence[RunRecord], measure: Measure, *, family: Family | None) -> dict[str, Effect]:
    """Return the entry over all cells of each strategy that ran on all of them.

    Empty for a single cell, and for a measure with a unit, which cannot be averaged over data sets.

    Args:
        records: the runs.
        measure: what is compared.
        family: the tests of the headline, which the losses on all bases belong to; None makes them.
    """
    cells = overall(records).cells if records else ()
    if measure.change != "ratio" or len(cells) < 2:
        return {}
    basis = next((basis for basis in BASES if basis.measure is measure), None)
    if basis is None:
        compared: Sequence[Compared] = compare_all(testable(effects(records, measure), cells))
    else:
        compared = (family or family_of(records, overall(records))).on(basis).compared
    return {one.strategy: _tested(measure, one, None) for one in compared}


def row_order(records: Sequence[RunRecord]) -> list[str]:
    """Return the strategies without the baseline, ordered by their mean loss over all cells; unranked ones last."""
    names = [name for name in groups_of(records) if name != BASELINE]
    ranking = rank(effects(records, LOSS), overall(records), LOSS) if names else None
    ranked = [] if ranking is None else [one.strategy for one in ranking.verdicts.compared]
    return [*ranked, *(name for name in names if name not in ranked)]


def render_matrix(records: Sequence[RunRecord]) -> str:
    """Return one table per measure; all but the first are hidden until chosen."""
    order, family = row_order(records), family_of(records, overall(records)) if records else None
    return "".join(_table(records, order, measure, family, hidden=place > 0) for place, measure in enumerate(MEASURES))


def _table(
    records: Sequence[RunRecord], order: Sequence[str], measure: Measure, family: Family | None, *, hidden: bool
) -> str:
    columns, rows = matrix_rows(records, order, measure, family=family)
    groups, title = groups_of(records), html.escape(NAMES[measure.name])
    head = '<th scope="col">strategy</th>' + "".join(_column(cell) for cell in columns)
    body = "".join(_row(name, groups[name], columns, row) for name, row in rows.items())
    good = "lower is better" if measure.lower_is_better else "higher is better"
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{title}" '
        f'data-measure="{measure.name}"{" hidden" if hidden else ""}><table class="matrix"><caption><span>'
        f"{title} against {BASELINE}, by data set and model; {good}. 95 % intervals under each mean.</span></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def matrix_rows(
    records: Sequence[RunRecord], order: Sequence[str], measure: Measure, *, family: Family | None
) -> tuple[list[CellKey | None], dict[str, list[Effect | None]]]:
    """Return the columns, and the entries of each strategy; a column without a cell, if any, is over all cells."""
    cells = cells_of(records)
    entries, pooled = matrix_effects(records, measure), pooled_effects(records, measure, family=family)
    columns: list[CellKey | None] = [None, *cells] if pooled else [*cells]
    return columns, {
        name: [pooled.get(name) if cell is None else entries.get((cell, name)) for cell in columns] for name in order
    }


def _place(cell: CellKey) -> str:
    return f'data-dataset="{html.escape(cell.dataset)}" data-model="{html.escape(cell.model)}"'


def _column(cell: CellKey | None) -> str:
    if cell is None:
        return '<th scope="col" class="pooled">over all</th>'
    return f'<th scope="col" {_place(cell)}>{breakable(cell.dataset)}<small>{html.escape(cell.model)}</small></th>'


def _row(name: str, group: str, columns: Sequence[CellKey | None], row: Sequence[Effect | None]) -> str:
    attributes = [' class="pooled {}"' if cell is None else f' {_place(cell)} class="{{}}"' for cell in columns]
    parts = "".join(_entry(entry, given) for entry, given in zip(row, attributes, strict=True))
    head = f'<th scope="row">{breakable(name)}<small>{html.escape(group)}</small></th>'
    return f'<tr data-group="{html.escape(group)}">{head}{parts}</tr>'


def _entry(entry: Effect | None, attributes: str) -> str:
    if entry is None:
        return f'<td{attributes.format("none")}><span class="unseen">no pair of runs</span></td>'
    return (
        f'<td{attributes.format(entry.verdict)} title="{html.escape(entry.note)}"><b><i aria-hidden="true">'
        f'{SIGNS[entry.verdict]}</i> {entry.text}</b><span class="unseen"> {_WORDS[entry.verdict]}</span>'
        f"<small>{entry.interval}</small>{_edge(entry)}</td>"
    )


def _edge(entry: Effect) -> str:
    return f"<small>rate at the edge: {entry.rate}</small>" if entry.rate else ""


def _tested(measure: Measure, one: Compared, metric: str | None) -> Effect:
    verdict = "open" if not one.is_shown else "better" if measure.gain(one.mean) > 0 else "worse"
    text, interval = measure.texts(one.mean, one.low, one.high, metric)
    tests = counted(one.num_tests, "test")
    note = f"n = {counted(one.num_pairs, 'pair')}; {p_text(one.p_corrected)} after Holm over {tests}"
    return Effect(verdict=verdict, text=text, interval=interval, note=note)


def _single(measure: Measure, changes: Mapping[int, float], metric: str | None) -> Effect:
    """Return the entry for a single seed, which shows nothing."""
    value = next(iter(changes.values()))
    return Effect(verdict="single", text=measure.text(value, metric), interval="", note="n = 1 seed: no test")


def breakable(name: str) -> str:
    """Return an escaped name that may break after its underscores.

    >>> breakable("loss_ema")
    'loss_<wbr>ema'
    """
    return html.escape(name).replace("_", "_<wbr>")


def render_findings(findings: Iterable[Finding]) -> str:
    """Return the findings with one heading per topic, and the tests of each folded away."""
    parts = []
    for topic, some in groupby(findings, key=lambda one: one.topic):
        body = "".join(f"<p>{prose(one.sentence)}</p>{_why(one)}{_tests(one.evidence)}" for one in some)
        parts.append(f'<div class="topic"><h3>{html.escape(TOPICS.get(topic, topic))}</h3><div>{body}</div></div>')
    return "".join(parts)


def _why(one: Finding) -> str:
    return f'<p class="note">Why? {prose(one.why)}</p>' if one.why else ""


def prose(sentence: str) -> str:
    """Return a sentence as HTML in which figures and their units stay on one line.

    >>> prose("p < 0.001 & 5 %").replace("\N{NO-BREAK SPACE}", "~")
    'p~&lt;~0.001 &amp; 5~%'
    """
    for text in (" %", "p = ", "p < ", "n = "):
        sentence = sentence.replace(text, text.replace(" ", "\N{NO-BREAK SPACE}"))
    return html.escape(sentence)


def _tests(evidence: Sequence[Evidence]) -> str:
    if not evidence:
        return ""
    rows = [
        (
            one.what,
            one.measure.title,
            *one.measure.texts(one.compared.mean, one.compared.low, one.compared.high, one.metric_name),
            str(one.compared.num_pairs),
            p_text(one.compared.p_corrected).removeprefix("p ").removeprefix("= "),
            str(one.compared.num_tests),
        )
        for one in evidence
    ]
    head = ("compared", "by", "mean change", "95 % interval", "pairs", "p, corrected", "tests")
    title = "The test" if len(rows) == 1 else f"The {len(rows)} tests"
    table = render_table(
        head, rows, caption="Paired t tests, pooled within data set and model, corrected together", numbers_from=2
    )
    return f"<details><summary>{title}</summary>{table}</details>"


def render_datasets(records: Sequence[RunRecord]) -> str:
    """Return a table of the data sets and their properties."""
    rows = []
    for name, given in sorted(properties_of(records).items()):
        figures = [_figure(given.get(key)) for key in ("num_train", "num_validation", "dimension", "num_classes")]
        noise = number(given.get("label_noise"))
        models = sorted({run["model"] for run in records if run["dataset"] == name})
        rows.append(
            (
                name,
                kind_of(given) or "",
                str(given.get("task", "")),
                ", ".join(models),
                *figures,
                "" if noise is None else f"{100 * noise:.1f} %",
            )
        )
    head = ("data set", "type", "task", "models", "training", "validation", "dimension", "classes", "label noise")
    caption = (
        "Examples of each part; numbers per example, or words of the vocabulary; share of rows whose nearest row has "
        "another label"
    )
    return render_table(head, rows, caption=caption, numbers_from=4)


def failed_runs(records: Sequence[RunRecord]) -> list[tuple[str, str, str, str]]:
    """Return data set and model, strategy, seed and reason of each run that failed or diverged."""
    return [
        (str(cell_of(run)), run["strategy"], str(run["seed"]), _reason(run))
        for run in records
        if run["status"] != "ok" or diverged(run)
    ]


def _reason(run: RunRecord) -> str:
    without_error = "diverged: the loss is not a finite number" if run["status"] == "ok" else "no reason given"
    return str(run.get("error") or without_error)


def render_failures(records: Sequence[RunRecord]) -> str:
    """Return a table of the runs that failed or diverged, or a sentence that there are none."""
    rows = failed_runs(records)
    if not rows:
        return "<p>None: every run ended with a finite loss.</p>"
    return render_table(("data set and model", "strategy", "seed", "why"), rows, caption="Runs without a result")


def render_settings(records: Sequence[RunRecord]) -> str:
    """Return the settings of the baseline's runs in one table; those that all data sets share are given once."""
    given = {cell_of(run): run.get("settings") or {} for run in records if run["strategy"] == BASELINE}
    cells = sorted(given)
    keys = list(dict.fromkeys(key for settings in given.values() for key in settings))
    rows = []
    for key in keys:
        values = [_figure(given[cell].get(key)) for cell in cells]
        if len(set(values)) == 1:
            rows.append((key, values[0]))
        else:
            text = "; ".join(f"{cell}: {value}" for cell, value in zip(cells, values, strict=True))
            rows.append((key, text))
    model = time_model_of(records)
    if model is not None:
        about = f" ({model['about']})" if model.get("about") else ""
        rows.append(("simulated seconds", f"{time_text(model)}{about}"))
    return render_table(("setting", "value"), rows, caption=f"Settings of the runs of {BASELINE}")


def render_rates(records: Sequence[RunRecord], plan: Mapping[str, Any]) -> str:
    """Return the learning rate of each strategy and where it came from; empty if rates were given."""
    told = {(cell_of(run), run["strategy"]): tuning for run in records if (tuning := tuning_of(run)) is not None}
    if not told:
        return _rates_of_baseline(plan)
    cells = sorted({cell for cell, _ in told})
    rows = [(name, *(_rate(told.get((cell, name))) for cell in cells)) for name in ordered(name for _, name in told)]
    caption = "Learning rates, chosen for each strategy by itself on runs that are not compared"
    return render_table(("strategy", *map(str, cells)), rows, caption=caption, numbers_from=1)


def _rate(tuning: Mapping[str, Any] | None) -> str:
    if tuning is None:
        return ""
    chosen = number(tuning.get("chosen"))
    if chosen is None:
        return "tuning failed"
    return f"{chosen:g} (edge of the grid)" if tuning.get("is_at_edge") else f"{chosen:g}"


def _rates_of_baseline(plan: Mapping[str, Any]) -> str:
    """Return how the learning rates of older labs were chosen: for the baseline only; empty if they were given."""
    notes = [note for note in plan.get("tuning") or () if note.get("scores")]
    if not notes:
        return ""
    rows = []
    for note in notes:
        rates = sorted(score["lr"] for score in note["scores"])
        edge = " (at the end of the grid)" if note["lr"] in (rates[0], rates[-1]) else ""
        cells = (note["dataset"], note["model"], note["optimizer"], f"{note['lr']:g}{edge}")
        rows.append((*cells, ", ".join(f"{rate:g}" for rate in rates), str(len(note["seeds"]))))
    caption = (
        f"Learning rates, chosen for {BASELINE} on seeds that are not reported and by the same validation examples. "
        "Every strategy uses the same rate; it might do better with its own"
    )
    return render_table(("data set", "model", "optimizer", "rate", "chosen from", "seeds"), rows, caption=caption)


def footer_text(records: Sequence[RunRecord]) -> str:
    """Return the versions and the hardware of the newest run."""
    newest: Mapping[str, Any] = records[-1] if records else {}
    versions = [f"{name} {value}" for name, value in (newest.get("versions") or {}).items()]
    hardware = newest.get("hardware") or {}
    machine = [str(hardware[key]) for key in ("processor", "machine") if hardware.get(key)]
    cpus = [f"{hardware['num_cpus']} processors"] if hardware.get("num_cpus") else []
    return " · ".join([*versions, *machine[:1], *cpus])


def _figure(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_figure(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_figure(part) for part in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
