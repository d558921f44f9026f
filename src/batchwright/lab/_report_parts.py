"""Parts of the page that are text and tables: observations, data sets, failed runs, settings."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ._observe_slices import kind_of, properties_of
from ._observe_words import change_text, interval_text, p_text
from ._report_records import BASELINE, Record, cell_of, diverged, number
from .observations import Evidence, Observation

TOPICS = {
    "scope": "What was run",
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
    "limits": "What this cannot say",
}


def render_observations(observations: Iterable[Observation]) -> str:
    """Return the observations under a heading for each topic, the tests behind each folded in."""
    parts = []
    for topic, some in groupby(observations, key=lambda one: one.topic):
        body = "".join(f"<p>{prose(one.sentence)}</p>{_tests(one.evidence)}" for one in some)
        parts.append(f'<div class="topic"><h3>{html.escape(TOPICS.get(topic, topic))}</h3><div>{body}</div></div>')
    return "".join(parts)


def prose(sentence: str) -> str:
    """Return a sentence as HTML whose figures keep together at the end of a line.

    >>> prose("p < 0.001 & 5 %").replace("\N{NO-BREAK SPACE}", "~")
    'p~&lt;~0.001 &amp; 5~%'
    """
    for text in (" %", "p = ", "p < "):
        sentence = sentence.replace(text, text.replace(" ", "\N{NO-BREAK SPACE}"))
    return html.escape(sentence)


def _tests(evidence: Sequence[Evidence]) -> str:
    if not evidence:
        return ""
    rows = [
        (
            one.what,
            one.measure.title,
            change_text(one.measure, one.compared.mean, one.metric_name),
            interval_text(one.measure, one.compared.low, one.compared.high, one.metric_name),
            str(one.compared.num_pairs),
            p_text(one.compared.p_corrected).removeprefix("p ").removeprefix("= "),
            str(one.compared.num_tests),
        )
        for one in evidence
    ]
    head = ("compared", "by", "mean change", "95 % interval", "seeds", "p, corrected", "tests")
    title = "The test behind it" if len(rows) == 1 else f"The {len(rows)} tests behind it"
    table = render_table(head, rows, caption="Paired t tests over seeds, corrected by Holm", numbers_from=2)
    return f"<details><summary>{title}</summary>{table}</details>"


def render_datasets(records: Sequence[Record]) -> str:
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
    caption = "Examples in each part, numbers an example or words of the vocabulary, and nearest rows that disagree"
    return render_table(head, rows, caption=caption, numbers_from=4)


def render_failures(records: Sequence[Record]) -> str:
    """Return a table of the runs that failed or diverged, or a sentence that there are none."""
    bad = [run for run in records if run["status"] != "ok" or diverged(run)]
    if not bad:
        return "<p>None: every run ended with a finite loss.</p>"
    rows = [
        (
            str(cell_of(run)),
            run["strategy"],
            str(run["seed"]),
            str(
                run.get("error") or ("diverged: the loss is no finite number" if run["status"] == "ok" else "no reason")
            ),
        )
        for run in bad
    ]
    return render_table(("data set and model", "strategy", "seed", "why"), rows, caption="Runs without a result")


def render_settings(records: Sequence[Record]) -> str:
    """Return the settings of the baseline's runs in one table: those that all data sets share are said once."""
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
    return render_table(("setting", "value"), rows, caption=f"Settings of the runs of {BASELINE}")


def render_rates(plan: Mapping[str, Any]) -> str:
    """Return how the learning rates were chosen, empty where they were given."""
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
        f"Learning rates, chosen for {BASELINE} on seeds that are not reported, by the same validation examples, and "
        "the same for every strategy: another one might do better with a rate of its own"
    )
    return render_table(("data set", "model", "optimizer", "rate", "chosen from", "seeds"), rows, caption=caption)


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, numbers_from: int = 99) -> str:
    """Return a table with a caption; columns from ``numbers_from`` on are set right.

    >>> "<td>&lt;b&gt;</td>" in render_table(["a"], [["<b>"]], caption="few")
    True
    """
    kinds = [' class="number"' if place >= numbers_from else "" for place in range(len(head))]
    top = "".join(f'<th scope="col"{kind}>{html.escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{html.escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><caption><span>{html.escape(caption)}</span></caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def footer_text(records: Sequence[Record]) -> str:
    """Return versions and hardware of the newest run."""
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
