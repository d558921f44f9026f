"""How far a collator should pad: to the static shape the plan counted on, or to a multiple."""

from __future__ import annotations

from dataclasses import dataclass
from operator import le
from typing import final

import numpy.typing as npt

from ..errors import LengthsError
from ._arrays import as_lengths, pad_up


@final
@dataclass(frozen=True)
class PadTo:
    """A small function, cheap to send to workers: the lengths of a batch to the lengths it should be padded to.

    Without static shapes a batch is padded to its longest example, rounded up to ``multiple_of``. With them it is
    padded to the shape the plan gave it: the first shape that holds the batch and whose full size is that of the batch.
    A batch of no full size, which was short of examples, gets the shape of the fewest tokens that holds it.

    Args:
        shapes: static lengths, one tuple of lengths a shape, in the order of the plan.
        sizes: items that fit at each.
        multiple_of: what padded lengths are a multiple of.

    >>> PadTo(multiple_of=8)([3, 9])
    (16,)
    >>> PadTo(shapes=((10,), (20,)), sizes=(8, 4))([3, 9, 7, 1])
    (20,)
    >>> PadTo(shapes=((10,), (20,)), sizes=(8, 4))([3, 9, 7, 1, 2])
    (10,)
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()
    multiple_of: int = 1

    def __call__(self, lengths: npt.ArrayLike) -> tuple[int, ...]:
        """Return the padded length of each axis for a batch of examples of these lengths."""
        array = as_lengths(lengths)
        longest = array.max(axis=0)
        if self.shapes and len(self.shapes[0]) != len(longest):
            raise LengthsError(f"the plan has {len(self.shapes[0])} axes of length, got {len(longest)}")
        padded: tuple[int, ...] = tuple(pad_up(longest, self.multiple_of).tolist())
        return self._static(len(array), padded) or padded

    def _static(self, num_items: int, padded: tuple[int, ...]) -> tuple[int, ...] | None:
        holding = [
            (shape, size)
            for shape, size in zip(self.shapes, self.sizes, strict=True)
            if size >= num_items and all(map(le, padded, shape))
        ]
        full = [shape for shape, size in holding if size == num_items]
        if padded in full:  # examples that fit no cell of a grid have shapes of their own, behind all cells
            return padded
        return full[0] if full else min((shape for shape, _ in holding), key=sum, default=None)
