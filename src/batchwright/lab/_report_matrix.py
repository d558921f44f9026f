"""The summary matrix: what each strategy changed on each data set and model, as an HTML table for each measure."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from ._observe_best import Compared, rank
from ._observe_cells import cell_tests
from ._observe_effects import LOSS, MEASURES, Measure, effects
from ._observe_groups import groups_of
from ._observe_slices import cells_of, overall
from ._observe_words import change_text, counted, interval_text, p_text
from ._report_records import BASELINE, Cell, Record, cell_of

NAMES = {
    "loss": "Final validation loss",
    "metric": "Final quality (accuracy, R², minus the loss)",
    "convergence": "Mean validation loss on the way",
    "updates": "Updates",
    "seconds": "Seconds of training",
}


@final
@dataclass(frozen=True, kw_only=True)
class Effect:
    """One entry of the matrix.

    Args:
        verdict: ``"better"``, ``"worse"``, ``"open"`` where no difference is shown, ``"single"`` with one seed.
        text: the mean change.
        interval: its 95 % interval; empty with one seed.
        note: seeds and corrected p, in words.
    """

    verdict: str
    text: str
    interval: str
    note: str


SIGNS = {"better": "▲", "worse": "▼", "open": "○", "single": "?"}


def matrix_effects(records: Sequence[Record], measure: Measure) -> dict[tuple[Cell, str], Effect]:
    """Return the entry of each data set, model and strategy."""
    found = effects(records, measure)
    metrics = {cell_of(run): run.get("metric_name") for run in records}
    entries = {place: _single(measure, changes, metrics[place[0]]) for place, changes in found.items()}
    for tests in cell_tests(found, measure):
        for one in tests.compared:
            entries[tests.cell, one.strategy] = _tested(measure, one, metrics[tests.cell])
    return entries


def pooled_effects(records: Sequence[Record], measure: Measure) -> dict[str, Effect]:
    """Return the entry over all cells of each strategy that ran on all; empty for one cell or a measure with a unit."""
    if measure.change != "ratio" or len(cells_of(records)) < 2:
        return {}
    ranking = rank(effects(records, measure), overall(records), measure)
    return {} if ranking is None else {one.strategy: _tested(measure, one, None) for one in ranking.compared}


def row_order(records: Sequence[Record]) -> list[str]:
    """Return the strategies but for the baseline, by their mean loss over all; those without a place last."""
    names = [name for name in groups_of(records) if name != BASELINE]
    ranking = rank(effects(records, LOSS), overall(records), LOSS) if names else None
    ranked = [] if ranking is None else [one.strategy for one in ranking.compared]
    return [*ranked, *(name for name in names if name not in ranked)]


def render_matrix(records: Sequence[Record]) -> str:
    """Return one table for each measure; all but the first are hidden until they are chosen."""
    order = row_order(records)
    return "".join(_table(records, order, measure, hidden=place > 0) for place, measure in enumerate(MEASURES))


def _table(records: Sequence[Record], order: Sequence[str], measure: Measure, *, hidden: bool) -> str:
    cells, groups = cells_of(records), groups_of(records)
    entries = matrix_effects(records, measure)
    pooled = pooled_effects(records, measure)
    head = '<th scope="col">strategy</th>' + ('<th scope="col" class="pooled">over all</th>' if pooled else "")
    head += "".join(_column(cell) for cell in cells)
    rows = [_row(name, groups[name], [pooled.get(name)] if pooled else [], cells, entries) for name in order]
    good = "lower is better" if measure.lower_is_better else "higher is better"
    caption = (
        f"{NAMES[measure.name]} against {BASELINE}, by data set and model; {good}. 95 % intervals under each mean."
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{html.escape(NAMES[measure.name])}" '
        f'data-measure="{measure.name}"{" hidden" if hidden else ""}><table class="matrix"><caption><span>'
        f"{html.escape(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _column(cell: Cell) -> str:
    return (
        f'<th scope="col" data-dataset="{html.escape(cell.dataset)}" data-model="{html.escape(cell.model)}">'
        f"{breakable(cell.dataset)}<small>{html.escape(cell.model)}</small></th>"
    )


def _row(
    name: str,
    group: str,
    pooled: Sequence[Effect | None],
    cells: Sequence[Cell],
    entries: Mapping[tuple[Cell, str], Effect],
) -> str:
    parts = [_entry(entry, ' class="pooled {}"') for entry in pooled]
    for cell in cells:
        place = f' data-dataset="{html.escape(cell.dataset)}" data-model="{html.escape(cell.model)}" class="{{}}"'
        parts.append(_entry(entries.get((cell, name)), place))
    head = f'<th scope="row">{breakable(name)}<small>{html.escape(group)}</small></th>'
    return f'<tr data-group="{html.escape(group)}">{head}{"".join(parts)}</tr>'


def _entry(entry: Effect | None, attributes: str) -> str:
    if entry is None:
        return f'<td{attributes.format("none")}><span class="unseen">no pair of runs</span></td>'
    return (
        f'<td{attributes.format(entry.verdict)} title="{html.escape(entry.note)}"><b><i aria-hidden="true">'
        f'{SIGNS[entry.verdict]}</i> {entry.text}</b><span class="unseen"> {_WORDS[entry.verdict]}</span>'
        f"<small>{entry.interval}</small></td>"
    )


_WORDS = {"better": "better", "worse": "worse", "open": "no difference shown", "single": "one seed"}


def _tested(measure: Measure, one: Compared, metric: str | None) -> Effect:
    verdict = "open" if not one.is_shown else "better" if measure.gain(one.mean) > 0 else "worse"
    note = f"n = {counted(one.num_pairs, 'seed')}; {p_text(one.p_corrected)} after Holm over {one.num_tests} strategies"
    return Effect(
        verdict=verdict,
        text=change_text(measure, one.mean, metric),
        interval=interval_text(measure, one.low, one.high, metric),
        note=note,
    )


def _single(measure: Measure, changes: Mapping[int, float], metric: str | None) -> Effect:
    """Return the entry of a place with one seed, which shows nothing."""
    value = next(iter(changes.values()))
    return Effect(verdict="single", text=change_text(measure, value, metric), interval="", note="n = 1 seed: no test")


def breakable(name: str) -> str:
    """Return an escaped name that may break after its underscores.

    >>> breakable("loss_ema")
    'loss_<wbr>ema'
    """
    return html.escape(name).replace("_", "_<wbr>")
