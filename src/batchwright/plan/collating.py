"""What a collator is given: the rows of a packed plan, and the lengths to pad to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import le
from typing import Any, Generic, Protocol, TypeVar, final

import numpy.typing as npt

from .._checks import as_whole
from .._lengths import as_lengths, pad_up
from ..errors import ArgumentError, LengthsError


@final
@dataclass(frozen=True)
class PadTo:
    """A small function, cheap to send to workers: the lengths of a batch to the lengths it should be padded to.

    Without static shapes a batch is padded to its longest example, rounded up to ``multiple_of``. With them it is
    padded to the shape the plan gave it: the first shape that holds the batch and whose full size is that of the batch.
    A batch that is not full, because examples ran out, gets the shape with the fewest tokens that holds it, unless its
    number is the full size of a larger one.

    Args:
        shapes: static lengths, one tuple of lengths per shape, in the order of the plan.
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

    def __post_init__(self) -> None:
        shapes = tuple(tuple(as_whole("shapes", length, least=1) for length in shape) for shape in self.shapes)
        sizes = tuple(as_whole("sizes", size, least=1) for size in self.sizes)
        if len(shapes) != len(sizes):
            raise ArgumentError(f"sizes must hold one number per shape, {len(shapes)}, got {len(sizes)}")
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "multiple_of", as_whole("multiple_of", self.multiple_of, least=1))

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
        if padded in full:  # examples that fit no cell of a grid have their own shapes, after all cells
            return padded
        return full[0] if full else min((shape for shape, _ in holding), key=sum, default=None)


Example = TypeVar("Example")
_Example = TypeVar("_Example", covariant=True)


class _Indexable(Protocol[_Example]):
    def __getitem__(self, index: int, /) -> _Example: ...

    def __len__(self) -> int: ...


@final
class Rows(Generic[Example]):
    """Wrap a data set so that ``collate_fn`` receives a list of rows, each a list of examples.

    ``Packed`` plans lists of rows; a row is a list of indices. This is the data set to give to the ``DataLoader``.

    >>> Rows("abcd")[[0, 3]]
    ['a', 'd']
    """

    def __init__(self, dataset: _Indexable[Example]) -> None:
        self.dataset = dataset

    def __getitem__(self, row: Sequence[int]) -> list[Example]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[Sequence[int]]) -> list[list[Example]]:
        """Return several rows, in one call of the data set where it offers ``__getitems__``."""
        fetch: Any = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return [[self.dataset[index] for index in row] for row in rows]
        indices = [index for row in rows for index in row]
        found = list(fetch(indices))
        if len(found) != len(indices):
            raise LengthsError(f"__getitems__ of the data set was asked for {len(indices)} examples, gave {len(found)}")
        examples = iter(found)
        return [list(islice(examples, len(row))) for row in rows]

    def __len__(self) -> int:
        return len(self.dataset)
