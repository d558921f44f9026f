"""Splitting into static shapes: the micro-batches of an update come from a catalogue that is known beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import numpy as np
import numpy.typing as npt

from .._lengths import as_lengths, pad_up
from .._types import IntArray
from ..errors import ArgumentError, LengthsError
from ..plan import Budget, PadTo


def split_by_shapes(lengths: npt.ArrayLike, pad_to: PadTo) -> list[list[int]]:
    """Cut the examples of one update into micro-batches that have the static shapes of a plan.

    Every example belongs to the shape with the fewest tokens that holds it. From the largest shape down, a shape is
    filled with its own examples, and what is left of them is filled up with those of smaller shapes. On one axis only
    the last micro-batch is short, and no cut has fewer. On several axes there may be shapes of which none holds the
    other; their short micro-batches are joined where a third shape holds both. An example that no shape holds is cut
    off alone.

    Args:
        lengths: of the examples, ``(B,)`` or ``(B, axes)``.
        pad_to: the catalogue, ``sampler.pad_to`` of a sampler with ``grouping=Buckets(count)``.

    Returns:
        The indices of the examples of each micro-batch, each example once; short micro-batches come last.

    >>> catalogue = PadTo(shapes=((10,), (20,)), sizes=(4, 2))
    >>> split_by_shapes([3, 19, 4, 8, 5, 7], catalogue)  # 2 × 20 tokens, then 4 × 10
    [[1, 3], [5, 4, 2, 0]]
    """
    rows = as_lengths(lengths)
    if not isinstance(pad_to, PadTo) or not pad_to.shapes:
        raise ArgumentError(
            f"split_by_shapes needs a pad_to with static shapes, got {pad_to!r}; give sampler.pad_to of a sampler with "
            "grouping=Buckets(count)"
        )
    if len(pad_to.shapes[0]) != rows.shape[1]:
        raise LengthsError(
            f"lengths must have {len(pad_to.shapes[0])} axes, as those of the plan have, got {rows.shape[1]}"
        )
    return _Splitting(pad_up(rows, pad_to.multiple_of), pad_to).parts()


def is_within(pad_to: PadTo, budget: Budget | None, limit: float) -> bool:
    """Return whether every static shape costs at most ``limit``, as a share of a budget or in tokens without one."""
    shapes, sizes = np.array(pad_to.shapes, dtype=np.int64), np.array(pad_to.sizes, dtype=np.int64)
    cost = sizes * shapes.sum(axis=1) if budget is None else np.asarray(budget.fraction(sizes, shapes))
    return bool(((cost <= limit) | (sizes == 1)).all())


@final
class _Splitting:
    """Shapes from the cheapest to the dearest, and the examples of each, longest first, that are not cut off yet."""

    def __init__(self, rows: IntArray, pad_to: PadTo) -> None:
        shapes, sizes = np.array(pad_to.shapes, dtype=np.int64), np.array(pad_to.sizes, dtype=np.int64)
        order = np.lexsort((-sizes, shapes.sum(axis=1)))
        self._shapes, self._sizes = shapes[order], sizes[order]
        self._rows = rows
        fits = _holds(self._shapes, rows)
        own = fits.argmax(axis=1)  # the first that holds it is the cheapest
        is_held = fits[np.arange(len(rows)), own]
        longest_first = np.lexsort((-rows.sum(axis=1), own))
        longest_first = longest_first[is_held[longest_first]]
        self._left = np.bincount(own[is_held], minlength=len(shapes))
        self._examples = np.split(longest_first, np.cumsum(self._left)[:-1])
        self._alone = np.flatnonzero(~is_held).tolist()
        # _smaller[k, j]: shape k holds all that shape j holds.
        self._smaller = _holds(self._shapes, self._shapes).T

    def parts(self) -> list[list[int]]:
        """Cut off all examples."""
        full = [[index] for index in self._alone]
        short: list[list[int]] = []
        for place in reversed(np.flatnonzero(self._left).tolist()):
            size = int(self._sizes[place])
            while self._left[place] >= size:
                full.append(self._take(place, size))
            if self._left[place]:
                part = self._take(place, int(self._left[place]))
                part += self._fill_in(place, size - len(part))
                (full if len(part) == size else short).append(part)
        return full + self._joined(short)

    def _take(self, place: int, num: int) -> list[int]:
        taken: list[int] = self._examples[place][:num].tolist()
        self._examples[place] = self._examples[place][num:]
        self._left[place] -= num
        return taken

    def _fill_in(self, place: int, num: int) -> list[int]:
        """Take examples of smaller shapes to fill a micro-batch: whole rests that would be short, then the longest."""
        smaller = np.flatnonzero(self._smaller[place] & (self._left > 0))[::-1].tolist()
        found: list[int] = []
        for other in smaller:
            rest = int(self._left[other] % self._sizes[other])
            if rest <= num - len(found):
                found += self._take(other, rest)
        for other in smaller:
            found += self._take(other, min(num - len(found), int(self._left[other])))
        return found

    def _joined(self, parts: Iterable[list[int]]) -> list[list[int]]:
        """Join short micro-batches where a shape holds them together."""
        joined: list[list[int]] = []
        for part in parts:
            first = next((other for other in joined if self._is_held(other + part)), None)
            if first is None:
                joined.append(part)
            else:
                first += part
        return joined

    def _is_held(self, part: list[int]) -> bool:
        longest = self._rows[part].max(axis=0, keepdims=True)
        return bool((_holds(self._shapes, longest)[0] & (self._sizes >= len(part))).any())


def _holds(shapes: IntArray, rows: IntArray) -> npt.NDArray[np.bool_]:
    """Return which shapes hold which rows, ``(rows, shapes)``."""
    fits = rows[:, :1] <= shapes[:, 0]
    for axis in range(1, shapes.shape[1]):
        fits &= rows[:, axis, None] <= shapes[:, axis]
    return fits
