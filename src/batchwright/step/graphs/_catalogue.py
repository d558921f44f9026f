"""The catalogue: the shapes that a plan has, and how often, known before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ...errors import ArgumentError
from ...plan import BatchSampler, PadTo, ResizableBatchSampler

# (number of items, padded length per axis): a row of plan.shapes
Shape: TypeAlias = tuple[int, ...]


def read_shapes(shapes: Any) -> dict[Shape, int]:
    """Return the planned shapes and how often each is planned, from ``plan.shapes``, a plan, a sampler or a list.

    The full shapes of a sampler's catalogue are added. They are the same in every epoch, while the current one may lack
    some of them, or have them once; so each counts twice at the least.
    """
    found = _counted(shapes)
    if isinstance(shapes, BatchSampler):
        found |= {shape: max(2, found.get(shape, 0)) for shape in _rows_of(shapes.pad_to)}
    return found


def _counted(shapes: Any) -> dict[Shape, int]:
    rows = _planned(shapes)
    plan = getattr(rows, "plan", rows)
    try:
        array = np.asarray(getattr(plan, "shapes", plan))
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.ndim != 2 or array.dtype.kind not in "iu" or array.shape[1] < 1 or (array < 1).any():
        raise ArgumentError(
            f"shapes must be plan.shapes, rows of (num_items, padded lengths) of 1 or more, or a sampler, got "
            f"{type(shapes).__name__} of {array.dtype} and shape {array.shape}"
        )
    if len(array) == 0:
        raise ArgumentError("shapes is empty; give plan.shapes of a plan with batches, or None")
    rows, counts = np.unique(array, axis=0, return_counts=True)
    return {tuple(map(int, row)): int(count) for row, count in zip(rows, counts, strict=True)}


def matches(sizes: Sequence[tuple[int, ...]], shape: Shape) -> bool:
    """Say whether tensors may be a batch of a planned shape: as many rows, and every length among their widths.

    >>> matches([(8, 20), (8, 30), (8,)], (8, 20, 30)), matches([(8, 20)], (4, 20))
    (True, False)
    """
    widths = {width for size in sizes for width in size[1:]}
    return all(size[0] == shape[0] for size in sizes if size) and widths.issuperset(shape[1:])


def _planned(shapes: Any) -> Any:
    """Return the rows ``(size, lengths)`` of a catalogue, and everything else as it is."""
    pad_to = getattr(shapes, "pad_to", None) if isinstance(shapes, ResizableBatchSampler) else shapes
    if isinstance(pad_to, PadTo) and pad_to.shapes:
        return _rows_of(pad_to)
    if isinstance(shapes, PadTo | ResizableBatchSampler):
        raise ArgumentError(
            f"a {type(shapes).__name__} without static shapes says nothing of later batches; give plan.shapes, or "
            "plan with grouping=bw.Buckets"
        )
    return shapes


def _rows_of(pad_to: PadTo) -> list[Shape]:
    return [(size, *lengths) for size, lengths in zip(pad_to.sizes, pad_to.shapes, strict=True)]
