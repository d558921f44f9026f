"""What a collator is given: the rows of a packed plan, and the lengths to pad to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt

from .._checks import as_whole
from .._lengths import as_lengths, pad_up
from .._types import IntArray
from ..errors import ArgumentError, LengthsError


@final
@dataclass(frozen=True)
class PadTo:
    """A small function, cheap to send to workers: the lengths of a batch to the lengths it should be padded to.

    Without static shapes a batch is padded to its longest example, rounded up to ``multiple_of``. With them one rule
    decides, from the number of items and the longest length per axis alone: among the shapes that hold the batch, one
    whose full size is exactly its number of items, else any; of several the one with the fewest tokens. A plan follows
    the same rule, so what it says of a batch is what a collator builds. A batch that no shape holds is padded to its
    own lengths.

    Args:
        shapes: static lengths, one tuple of lengths per shape.
        sizes: items of a full batch of each.
        multiple_of: what padded lengths are a multiple of.
        num_axes: lengths of an example; None takes any number, or that of the shapes.

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
    num_axes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, Collection) or not _are_rows(self.shapes):
            raise ArgumentError(
                f"PadTo takes a tuple of lengths per shape and one size for each, as in PadTo(((10,), (20,)), (8, 4)), "
                f"got shapes={self.shapes!r} and sizes={self.sizes!r}"
            )
        shapes = tuple(tuple(as_whole("shapes", length, least=1) for length in shape) for shape in self.shapes)
        sizes = tuple(as_whole("sizes", size, least=1) for size in self.sizes)
        if len(shapes) != len(sizes):
            raise ArgumentError(f"sizes must hold one number per shape, {len(shapes)}, got {len(sizes)}")
        if len(set(map(len, shapes))) > 1:
            raise ArgumentError(f"shapes must all have the same number of lengths, got {shapes}")
        num_axes = None if self.num_axes is None else as_whole("num_axes", self.num_axes, least=1)
        if shapes and num_axes not in (None, len(shapes[0])):
            raise ArgumentError(f"num_axes must be that of the shapes, {len(shapes[0])}, or None, got {num_axes}")
        object.__setattr__(self, "num_axes", len(shapes[0]) if shapes else num_axes)
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "multiple_of", as_whole("multiple_of", self.multiple_of, least=1))

    def __call__(self, lengths: npt.ArrayLike) -> tuple[int, ...]:
        """Return the padded length of each axis for a batch of examples of these lengths."""
        array = as_lengths(lengths)
        longest = array.max(axis=0, keepdims=True)
        padded: tuple[int, ...] = tuple(pad_batches(self, np.array([len(array)]), longest)[0].tolist())
        return padded

    @cached_property
    def _by_tokens(self) -> tuple[IntArray, IntArray]:
        """Return the shapes and the sizes, those of the fewest tokens first."""
        order = sorted(range(len(self.shapes)), key=lambda shape: (sum(self.shapes[shape]), self.shapes[shape]))
        shapes, sizes = ([values[shape] for shape in order] for values in (self.shapes, self.sizes))
        return np.array(shapes, dtype=np.int64), np.array(sizes, dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return PadTo, (self.shapes, self.sizes, self.multiple_of, self.num_axes)


def _are_rows(shapes: Any) -> bool:
    return isinstance(shapes, Collection) and all(isinstance(shape, Iterable) for shape in shapes)


_MAX_COMPARED = 1 << 21  # batches × shapes that are compared at once


def pad_batches(pad_to: PadTo, num_items: IntArray, longest: IntArray) -> IntArray:
    """Return what batches are padded to, ``(M, axes)``: the one rule of ``PadTo``, for many batches.

    Args:
        pad_to: the static shapes, if any.
        num_items: items of each batch, ``(M,)``.
        longest: the longest length per axis in each, ``(M, axes)``.
    """
    padded = pad_up(longest.astype(np.int64), pad_to.multiple_of)
    if pad_to.num_axes not in (None, padded.shape[1]):
        raise LengthsError(
            f"lengths must have {pad_to.num_axes} axes, as those of the plan have, got {padded.shape[1]}"
        )
    if not pad_to.shapes:
        return padded
    shapes, sizes = pad_to._by_tokens
    step = max(1, _MAX_COMPARED // len(shapes))
    for start in range(0, len(padded), step):
        part = padded[start : start + step]
        items = num_items[start : start + step, None]
        holds = sizes >= items
        for axis in range(shapes.shape[1]):
            holds &= shapes[:, axis] >= part[:, axis, None]
        # Exactly full before the others, and the fewest tokens first within both.
        is_full = holds & (sizes == items)
        ranked = np.where(is_full.any(axis=1, keepdims=True), is_full, holds)
        is_held = ranked.any(axis=1)
        part[is_held] = shapes[ranked.argmax(axis=1)[is_held]]
    return padded


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
            raise LengthsError(
                f"__getitems__ of the data set must return one example per index, {len(indices)}, got {len(found)}"
            )
        examples = iter(found)
        return [list(islice(examples, len(row))) for row in rows]

    def __len__(self) -> int:
        return len(self.dataset)
