"""Parts of a lab that share a property: of the data, of the model, or of what the strategies did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from .._records import CellKey, RunRecord, cell_of, number
from ..strategies.strategy import BASELINE
from ._dropouts import lost_cells
from ._effects import counted, listed

# The group that repeats the sizes of another run: a control, to tell reacting to training from growing.
REPLAY = "replay"
# The kinds of data as a sentence names them.
_KINDS = {
    "image": "images",
    "images": "images",
    "tabular": "tables",
    "table": "tables",
    "text": "texts",
    "language": "language modelling",
}


@final
@dataclass(frozen=True, kw_only=True)
class Slice:
    """Some cells of a lab and what they have in common.

    Args:
        topic: the property, e.g. ``"dimensionality"``; ``"overall"`` for all cells.
        label: what the cells share, to follow "On", e.g. ``"images"``.
        cells: the data sets and models, in order.
        span: the range of their figures, e.g. ``"10 to 64"``; empty if the slice is not by a figure.
    """

    topic: str
    label: str
    cells: tuple[CellKey, ...]
    span: str = ""

    @property
    def datasets(self) -> list[str]:
        """Return each data set once."""
        return list(dict.fromkeys(cell.dataset for cell in self.cells))

    def __str__(self) -> str:
        if self.topic == "overall":
            return self.label
        return f"{self.label} ({self.span + ': ' if self.span else ''}{listed(self.datasets)})"


@final
@dataclass(frozen=True, kw_only=True)
class Halves:
    """The lower and the upper half of the data sets by a figure."""

    topic: str
    low: Slice
    high: Slice


@final
@dataclass(frozen=True, kw_only=True)
class _Figure:
    """A figure of data sets, with the words for little and much of it."""

    topic: str
    key: str
    low: str
    high: str
    form: str = "{:,.0f}"
    times: float = 1


_FIGURES = (
    _Figure(topic="dimensionality", key="dimension", low="data of fewer dimensions", high="data of more dimensions"),
    _Figure(topic="size", key="num_train", low="smaller data sets", high="larger data sets"),
    _Figure(
        topic="label noise",
        key="label_noise",
        low="data with cleaner labels",
        high="data with noisier labels",
        form="{:.1f} %",
        times=100,
    ),
)


def cells_of(records: Iterable[RunRecord]) -> list[CellKey]:
    """Return the cells of a lab, sorted."""
    return sorted({cell_of(record) for record in records})


def properties_of(records: Iterable[RunRecord]) -> dict[str, Mapping[str, Any]]:
    """Return the properties of each data set, from its first run that has them."""
    found: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record.get("properties"):
            found.setdefault(record["dataset"], record["properties"])
    return found


def kind_of(properties: Mapping[str, Any]) -> str | None:
    """Return the kind of a data set in words, None if it is unknown.

    >>> kind_of({"kind": "tabular"}), kind_of({"kind": "audio"}), kind_of({})
    ('tables', 'audio', None)
    """
    kind = properties.get("kind") or properties.get("type")
    return None if kind is None else _KINDS.get(str(kind), str(kind))


def overall(records: Sequence[RunRecord]) -> Slice:
    """Return all cells as one slice, without those in which the baseline has no two runs that ended well."""
    every, lost = cells_of(records), lost_cells(records)
    cells = [cell for cell in every if cell not in lost] or every
    num_datasets, num_models = (len({cell[place] for cell in cells}) for place in (0, 1))
    if num_datasets == 1:
        label = f"the data set {cells[0].dataset} ({counted(num_models, 'model')})"
    else:
        num_all = len({cell.dataset for cell in every})
        which = f"all {num_all}" if num_datasets == num_all else f"{num_datasets} of {num_all}"
        label = f"{which} data sets ({counted(num_models, 'model')})"
    return Slice(topic="overall", label=label, cells=tuple(cells))


def by_kind(records: Sequence[RunRecord]) -> list[Slice]:
    """Return one slice per type of data, if there are two or more."""
    kinds = {name: kind_of(properties) for name, properties in properties_of(records).items()}
    return _by_name("type", {cell: kinds.get(cell.dataset) for cell in cells_of(records)})


def by_model(records: Sequence[RunRecord]) -> list[Slice]:
    """Return one slice per model, if there are two or more."""
    return _by_name("model", {cell: cell.model for cell in cells_of(records)}, before="runs of the model ")


def by_halves(records: Sequence[RunRecord]) -> list[Halves]:
    """Return the halves of the data sets by dimensions, size and label noise, if at least two values differ.

    The upper half holds the data sets above the lower median; those without the figure are in neither half.
    """
    properties = properties_of(records)
    cells = cells_of(records)
    found = []
    for figure in _FIGURES:
        values = {name: number(given.get(figure.key)) for name, given in properties.items()}
        known = sorted((value, name) for name, value in values.items() if value is not None)
        cut = known[(len(known) - 1) // 2][0] if known else 0.0
        low, high = [pair for pair in known if pair[0] <= cut], [pair for pair in known if pair[0] > cut]
        if low and high:
            slices = [_half(figure, word, half, cells) for word, half in ((figure.low, low), (figure.high, high))]
            found.append(Halves(topic=figure.topic, low=slices[0], high=slices[1]))
    return found


def _half(figure: _Figure, word: str, half: Sequence[tuple[float, str]], cells: Sequence[CellKey]) -> Slice:
    names = {name for _, name in half}
    least, most = (figure.form.format(figure.times * half[place][0]) for place in (0, -1))
    span = least if least == most else f"{least} to {most}"
    return Slice(
        topic=figure.topic, label=word, cells=tuple(cell for cell in cells if cell.dataset in names), span=span
    )


def _by_name(topic: str, names: Mapping[CellKey, str | None], *, before: str = "") -> list[Slice]:
    known = sorted({name for name in names.values() if name is not None})
    if len(known) < 2:
        return []
    return [
        Slice(topic=topic, label=before + name, cells=tuple(cell for cell, other in names.items() if other == name))
        for name in known
    ]


def groups_of(records: Iterable[RunRecord]) -> dict[str, str]:
    """Return the group of each strategy, ``"other"`` if its runs name none.

    >>> groups_of([{"strategy": "linear", "group": "linear"}, {"strategy": "mine"}])
    {'linear': 'linear', 'mine': 'other'}
    """
    return {record["strategy"]: record.get("group") or "other" for record in records}


def fixed_of(records: Iterable[RunRecord]) -> frozenset[str]:
    """Return the strategies that kept one batch size in every run that recorded its sizes.

    >>> curve = [{"batch_size": 16}, {"batch_size": 16}]
    >>> grown = [{"batch_size": 16}, {"batch_size": 32}]
    >>> sorted(fixed_of([{"strategy": "constant", "curve": curve}, {"strategy": "linear", "curve": grown}]))
    ['constant']
    """
    sizes: dict[str, bool] = {BASELINE: True}
    for record in records:
        seen = {point.get("batch_size") for point in record.get("curve") or ()} - {None}
        if seen:
            keeps = len(seen) == 1 and not record.get("decisions")
            sizes[record["strategy"]] = sizes.get(record["strategy"], True) and keeps
    return frozenset(name for name, keeps in sizes.items() if keeps)


def adaptive_of(records: Iterable[RunRecord]) -> frozenset[str]:
    """Return the strategies that change the batch size and are not a control."""
    runs = list(records)
    return frozenset(name for name, group in groups_of(runs).items() if group != REPLAY) - fixed_of(runs)
