"""Rows of a batch as they came: whether a loss is a mean over what is counted in them, and which batches to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ._loss_probe import HALF_TOLERANCE, IGNORED, ProbedLoss, evaluating, is_same_alone
from .oom import Snapshot

# How many batches of a run are tried out again because they differ from those before.
MOST_LOOKS = 8
_MOST_CLASSES = 64
_MOST_ROWS = 256
_POSITIONS = ("start_positions", "end_positions")


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


def adds_up(
    loss: ProbedLoss, samples: Samples, count: Callable[[Mapping[str, Any]], int], *, sums: bool
) -> bool | None:
    """Say whether the loss of rows is the mean of their losses apart, weighed by a count; None if they cannot tell.

    Args:
        loss: to be tried out.
        samples: the rows.
        count: what the loss is said to be a mean over.
        sums: ask for sums, with ``num_items_in_batch=1``.
    """
    options = {"num_items_in_batch": 1} if sums else {}
    inputs = [samples.both, samples.single, *samples.apart]
    counts = [1 if sums else count(given) for given in inputs]
    snapshot = Snapshot.of(loss.module)
    try:
        with evaluating(loss.module), torch.no_grad():
            found = [loss(given, **options) for given in inputs]
    finally:
        snapshot.restore()
    both, single, *apart = map(float, found)
    if not all(map(math.isfinite, (both, single, *apart))) or both == single == 0:
        return None
    num, is_half = len(apart), any(value.dtype not in (torch.float32, torch.float64) for value in found)
    if not is_same_alone(loss, apart[-1], num * single if sums else single):
        return False
    together = sum(number * value for number, value in zip(counts[2:], apart, strict=True))
    tolerance = HALF_TOLERANCE if is_half else loss.tolerance
    return math.isclose(num * counts[0] * both, together, rel_tol=tolerance, abs_tol=1e-12)
