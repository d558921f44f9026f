"""Parts of a lab that share a property: the type of data, few or many dimensions, small or large, noisy or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from ._observe_words import counted, listed
from ._report_records import Cell, Record, cell_of, number

# Names of kinds as they are read in a sentence.
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
        span: the figures they have, e.g. ``"10 to 64"``; empty where the slice is not by a figure.
    """

    topic: str
    label: str
    cells: tuple[Cell, ...]
    span: str = ""

    @property
    def datasets(self) -> list[str]:
        """Return the data sets, once each."""
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


def cells_of(records: Iterable[Record]) -> list[Cell]:
    """Return the cells of a lab, sorted."""
    return sorted({cell_of(record) for record in records})


def properties_of(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
    """Return the properties of each data set, from its first run that has them."""
    found: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record.get("properties"):
            found.setdefault(record["dataset"], record["properties"])
    return found


def kind_of(properties: Mapping[str, Any]) -> str | None:
    """Return the kind of a data set in words, None where it is unknown.

    >>> kind_of({"kind": "tabular"}), kind_of({"kind": "audio"}), kind_of({})
    ('tables', 'audio', None)
    """
    kind = properties.get("kind") or properties.get("type")
    return None if kind is None else _KINDS.get(str(kind), str(kind))


def overall(records: Sequence[Record]) -> Slice:
    """Return all cells as one slice."""
    cells = cells_of(records)
    num_datasets, num_models = (len({cell[place] for cell in cells}) for place in (0, 1))
    if num_datasets == 1:
        label = f"the data set {cells[0].dataset} ({counted(num_models, 'model')})"
    else:
        label = f"all {num_datasets} data sets ({counted(num_models, 'model')})"
    return Slice(topic="overall", label=label, cells=tuple(cells))


def by_kind(records: Sequence[Record]) -> list[Slice]:
    """Return a slice for each type of data, where there are two or more."""
    kinds = {name: kind_of(properties) for name, properties in properties_of(records).items()}
    return _by_name(records, "type", {cell: kinds.get(cell.dataset) for cell in cells_of(records)})


def by_model(records: Sequence[Record]) -> list[Slice]:
    """Return a slice for each model, where there are two or more."""
    return _by_name(records, "model", {cell: cell.model for cell in cells_of(records)}, before="the model ")


def by_halves(records: Sequence[Record]) -> list[Halves]:
    """Return the halves of the data sets by dimensions, size and label noise, where at least two values differ.

    The upper half holds the data sets above the lower median; those without the figure are in neither.
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


def _half(figure: _Figure, word: str, half: Sequence[tuple[float, str]], cells: Sequence[Cell]) -> Slice:
    names = {name for _, name in half}
    least, most = (figure.form.format(figure.times * half[place][0]) for place in (0, -1))
    span = least if least == most else f"{least} to {most}"
    return Slice(
        topic=figure.topic, label=word, cells=tuple(cell for cell in cells if cell.dataset in names), span=span
    )


def _by_name(
    records: Sequence[Record], topic: str, names: Mapping[Cell, str | None], *, before: str = ""
) -> list[Slice]:
    known = sorted({name for name in names.values() if name is not None})
    if len(known) < 2:
        return []
    return [
        Slice(topic=topic, label=before + name, cells=tuple(cell for cell, other in names.items() if other == name))
        for name in known
    ]
