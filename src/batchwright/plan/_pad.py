"""How far a collator should pad: to the static shape the plan counted on, or to a multiple."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from ..errors import LengthsError
from ._arrays import IntArray, as_lengths, pad_up


@final
@dataclass(frozen=True)
class PadTo:
    """A small function, cheap to send to workers: the lengths of a batch to the lengths it should be padded to.

    Without static shapes a batch is padded to its longest example, rounded up to ``multiple_of``. With them it is
    padded to the shape the plan gave it: a shape that holds the batch, whose full size is that of the batch if there is
    one, and of the fewest tokens.

    Args:
        shapes: static lengths, one tuple of lengths a shape.
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
        chosen = self._static(len(array), longest)
        return chosen if chosen is not None else tuple(pad_up(longest, self.multiple_of).tolist())

    def _static(self, num_items: int, longest: IntArray) -> tuple[int, ...] | None:
        holding = [
            (size != num_items, sum(shape), shape)
            for shape, size in zip(self.shapes, self.sizes, strict=True)
            if size >= num_items and all(np.less_equal(longest, shape))
        ]
        return min(holding)[2] if holding else None
