"""Parts of a batch that a loss is tried out on.

- ``row_views``, ``sequence_views``, ``label_views``: with few labels, which show what is counted.
- ``choose_rows``, ``sample``, ``Novelty``: rows as they came, and which batches to look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from .packing.rows import PackedRow

IGNORED = -100
LABELS = ("labels", "shift_labels")
# How many batches of a run are tried out again because they differ from those before.
MOST_LOOKS = 8
_MOST_CLASSES = 64
_MOST_ROWS = 256
_POSITIONS = ("start_positions", "end_positions")


class Views(NamedTuple):
    """Inputs of two parts of a batch, together and apart, with few labels that count.

    If the loss is a mean over its labels, the sums of the parts apart are ``copies`` times the sum of both.
    """

    both: Mapping[str, Any]
    first: Mapping[str, Any]
    second: Mapping[str, Any]
    copies: int  # how often the inputs of a part alone hold it: equal shapes run in equal kernels, and round alike
    single: Mapping[str, Any] | None = None  # the second part once, which tells a mean from a sum


class Samples(NamedTuple):
    """Some rows of a batch together, and each of them apart, as often as there are rows."""

    both: Mapping[str, Any]
    apart: list[Mapping[str, Any]]
    single: Mapping[str, Any]  # the last row, once


@final
class Novelty:
    """Says which batches show something that those before did not: other classes, padding, or labels left out."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._num = 0

    def notice(self, batch: Mapping[str, Any]) -> set[Any] | None:
        """Return what is new in a batch, None if nothing is, or if enough batches were looked at."""
        if self._num >= MOST_LOOKS:
            return None
        new = traits(batch) - self._seen
        self._seen |= new
        self._num += bool(new)
        return new or None


def traits(batch: Mapping[str, Any]) -> set[Any]:
    """Return what a batch can show about its loss: it has several rows, which differ in this or that."""
    rows = _rows_of(batch)
    if len(rows) < 2:
        return set()
    found: set[Any] = {"rows"}
    found |= {"lengths"} if len({row.length for row in rows}) > 1 else set()
    found |= {"labels"} if len({row.num_labels for row in rows}) > 1 else set()
    found |= {"outside"} if any(row.is_outside for row in rows) else set()
    return found.union(*(row.classes for row in rows))


def is_telling(batch: Mapping[str, Any], *, is_usual: bool) -> bool:
    """Say whether labels that may be left out would show: numbers per token, missing numbers, labels of padding.

    A batch whose rows have equally many of them shows nothing, though other batches may have more or fewer.

    Args:
        batch: with labels.
        is_usual: labels of padding are known to count.
    """
    labels, rows = batch["labels"], _rows_of(batch)
    if labels.ndim != 2 or len({(row.num_labels, row.length) for row in rows}) > 1:
        return True
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if labels.is_floating_point():
        is_along = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] == labels.shape[1]
        return not (is_along or bool((labels.isnan() | (labels == IGNORED)).any()))
    if is_usual or not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return True
    return not bool(((mask == 0) & (labels != IGNORED)).any())


def choose_rows(batch: Mapping[str, Any], new: set[Any]) -> list[int]:
    """Return rows that differ most, first of all those that show what is new; fewer than two if there are none."""
    rows = [row for row in _rows_of(batch) if row.num_labels]
    labels = batch.get("labels")
    most = 2 if isinstance(labels, Tensor) and labels.ndim == 2 else 4
    chosen: list[_Row] = []
    while rows and len(chosen) < most:
        rows.sort(key=lambda row: row.gain(chosen, new), reverse=True)
        chosen.append(rows.pop(0))
    return sorted(row.place for row in chosen)


class _Row(NamedTuple):
    place: int
    num_labels: int  # without a tensor of labels, 1
    length: int
    is_outside: bool  # a position beyond the row, which losses leave out
    classes: frozenset[int]

    def gain(self, chosen: list[_Row], new: set[Any]) -> int:
        """Return how much a row differs from those that were chosen."""
        known = frozenset().union(*(row.classes for row in chosen))
        differs = sum(getattr(self, name) not in {getattr(row, name) for row in chosen} for name in _Row._fields[1:4])
        return 100 * len((self.classes & new) - known) + 10 * differs + len(self.classes - known)


def _rows_of(batch: Mapping[str, Any]) -> list[_Row]:
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    first = labels if isinstance(labels, Tensor) else batch.get("input_ids")
    if not isinstance(first, Tensor) or first.ndim == 0:
        first = next((value for value in batch.values() if isinstance(value, Tensor) and value.ndim > 0), None)
    num = 0 if first is None else min(len(first), _MOST_ROWS)
    lengths = [1] * num
    if isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) >= num:
        lengths = (mask[:num] != 0).sum(dim=1).tolist()
    outside = _outside(batch, num)
    if not isinstance(labels, Tensor) or labels.ndim not in (1, 2):
        return [_Row(place, 1, lengths[place], outside[place], frozenset()) for place in range(num)]
    wide = labels[:num].reshape(num, -1)
    counts = ((wide != IGNORED) & (wide == wide)).sum(dim=1).tolist()  # NaN is not itself
    classes = _classes(wide)
    return [_Row(place, counts[place], lengths[place], outside[place], classes[place]) for place in range(num)]


def _outside(batch: Mapping[str, Any], num: int) -> list[bool]:
    width = batch["input_ids"].shape[-1] if isinstance(batch.get("input_ids"), Tensor) else math.inf
    given = [batch[name].tolist() for name in _POSITIONS if isinstance(batch.get(name), Tensor)]
    return [
        any(len(places) > row and isinstance(places[row], int) and not 0 <= places[row] < width for places in given)
        for row in range(num)
    ]


def _classes(labels: Tensor) -> list[frozenset[int]]:
    """Return the classes of every row; none where there are too many, as with tokens, or where labels are numbers."""
    if labels.is_floating_point() or int(labels.max()) >= _MOST_CLASSES:
        return [frozenset()] * len(labels)
    return [frozenset(set(row) - {IGNORED}) for row in labels.tolist()]


def sample(batch: Mapping[str, Any], rows: list[int], take: Callable[[list[int]], Mapping[str, Any]]) -> Samples:
    """Return the given rows of a batch together and apart; ``take`` returns rows of it."""
    return Samples(take(rows), [take([row] * len(rows)) for row in rows], take(rows[-1:]))


def row_views(batch: Mapping[str, Any], num: int, take: Callable[[Mapping[str, Any], list[int]], Any]) -> Views:
    """Return two examples of a batch: one label of the first counts, and four of the second, where there are as many.

    Args:
        batch: its inputs, with or without labels.
        num: the number of examples.
        take: returns some examples of inputs.
    """
    places = [0, min(1, num - 1)]
    labels = {name: value for name, value in batch.items() if name in LABELS and isinstance(value, Tensor)}
    others = {name: value for name, value in batch.items() if name not in labels}
    thinned = {name: _thinned(value, places) for name, value in labels.items()}

    def view(*chosen: int) -> dict[str, Any]:
        rows = {name: value[list(chosen)] for name, value in thinned.items()}
        return {**take(others, [places[row] for row in chosen]), **rows}

    return Views(view(0, 1), view(0, 0), view(1, 1), copies=2, single=view(1))


def _thinned(labels: Tensor, places: list[int]) -> Tensor:
    """Keep one label in the first row and four in the second, so that no two ways of counting agree."""
    rows = labels[places]
    if labels.is_floating_point():
        return rows
    kept = torch.ones_like(rows, dtype=torch.bool)
    if counts_tokens(labels):
        kept[0, :-1] = False
        kept[1, 2:-2] = False
    return torch.where(kept, torch.where(rows == IGNORED, _stand_in(labels), rows), IGNORED)


def _stand_in(labels: Tensor) -> Tensor:
    """Return a valid class: the largest one. Class 0 may be padding, which makes no decoder input in some models."""
    return labels.max().clamp(min=0)


def sequence_views(batch: Mapping[str, Any]) -> Views | None:
    """Return the two shortest sequences of a packed row that have three tokens, None if there are none."""
    row, name = PackedRow(batch), name_of_labels(batch)
    order = sorted((length, unit) for unit, length in enumerate(row.lengths) if length >= 3)
    if len(order) < 2:
        return None
    (num, first), (_, second) = order[:2]
    parts = [row.take([first, second]), row.take([first]), row.take([second])]
    filled = torch.where(parts[0][name] == IGNORED, _stand_in(batch[name]), parts[0][name])
    thin = torch.full_like(filled, IGNORED)
    for place in (num - 1, -2, -1):  # one label of the first sequence, two of the second
        thin[0, place] = filled[0, place]
    rows = [thin, thin[:, :num], thin[:, num:]]
    both, alone, other = ({**part, name: labels.contiguous()} for part, labels in zip(parts, rows, strict=True))
    return Views(both, alone, other, copies=1)


def name_of_labels(batch: Mapping[str, Any]) -> str:
    """Return the field whose labels the loss uses."""
    return "shift_labels" if isinstance(batch.get("shift_labels"), Tensor) else "labels"


def label_views(batch: Mapping[str, Any]) -> Views | None:
    """Return a whole batch with few labels that count, for batches that cannot be cut; None if it is too short.

    One label counts in the first view, three others in the second. One of these is the first of a row, which tells
    whether the loss shifts labels. Labels that count in the batch are taken if there are enough of them.
    """
    name = name_of_labels(batch)
    labels = batch[name]
    if not counts_tokens(labels) or labels.shape[1] < 4:
        return None
    places = torch.arange(labels.numel(), device=labels.device).view_as(labels)[:, 1:]
    is_used = labels[:, 1:] != IGNORED
    chosen = places[is_used] if int(is_used.sum()) >= 3 else places.flatten()
    # Neighbours are labels of one sequence, the first belongs to another one if there are several in a row.
    first, *others = chosen[[0, -2, -1]].tolist()
    sets = ([first, 0, *others], [first], [0, *others])
    full = torch.where(labels == IGNORED, _stand_in(labels), labels).flatten()

    def view(kept: list[int]) -> dict[str, Any]:
        thinned = torch.full_like(full, IGNORED)
        thinned[kept] = full[kept]
        return {**batch, name: thinned.view_as(labels)}

    both, apart, rest = map(view, sets)
    return Views(both, apart, rest, copies=1)


def counts_tokens(labels: Tensor) -> bool:
    """Say whether labels are classes of tokens, rather than one per example or numbers."""
    return labels.ndim == 2 and not labels.is_floating_point()


def num_labels(inputs: Mapping[str, Any], shifts: bool) -> Tensor:
    """Count the labels of a loss: those other than -100, or examples if labels are floats; on their device.

    ``shift_labels`` count where a collator gives them, as the loss then uses them instead of ``labels``.
    """
    shifted, labels = inputs.get("shift_labels"), inputs["labels"]
    if isinstance(shifted, Tensor):
        return (shifted != IGNORED).sum()
    if labels.is_floating_point() and labels.numel():  # a tensor of no numbers is one of floats, whatever was meant
        return torch.tensor(len(labels))
    return ((labels[:, 1:] if shifts and labels.ndim == 2 else labels) != IGNORED).sum()
