"""A few static lengths: bounds of least padding, batches drawn at random inside a bucket, leftovers moved up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from ._arrays import IntArray
from ._cut import cut_rest
from ._keys import UInt64Array, sort_examples
from ._problem import Groups, Problem, to_units
from ._random import Purpose
from .shapes import least_padding_bounds

_MAX_TABLE = 1 << 20


def bucket_bounds(problem: Problem, count: int, batches_per_bucket: float) -> IntArray:
    """Return bounds in units of padding, fewer than ``count`` where a bucket would hold too few batches."""
    table = problem.table
    useful = max(1, int(table.num_batches / batches_per_bucket))
    return least_padding_bounds(table.values, table.counts, min(count, useful))


def group_buckets(problem: Problem, bounds: IntArray) -> Groups:
    """Batch the examples of one axis bucket by bucket, from the shortest bound up.

    Buckets lie one behind the other, so what fills no batch in one simply begins the next.
    """
    bucket_of = _bucket_lookup(bounds)

    def fields(start: int, stop: int, chance: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
        units = to_units(problem.lengths[start:stop, 0], problem.pad_multiple_of)
        return bucket_of(units), np.zeros(stop - start, dtype=np.uint64)

    keys = sort_examples(
        problem.num_examples,
        fields,
        num_groups=len(bounds),
        max_value=0,
        stream=problem.stream(Purpose.GROUP),
    )
    padded = (bounds * problem.pad_multiple_of)[:, None]
    batches = fill_cells(np.diff(keys.group_offsets), problem.sizes(padded))
    return batches.to_groups(problem, keys.indices, padded)


def _bucket_lookup(bounds: IntArray) -> Callable[[IntArray], UInt64Array]:
    """Return the function from units to buckets: a table where that is small, bisection otherwise."""
    if bounds[-1] > _MAX_TABLE:
        return lambda units: np.searchsorted(bounds, units).astype(np.uint64)
    table = np.searchsorted(bounds, np.arange(int(bounds[-1]) + 1)).astype(np.uint64)
    return lambda units: table[units]


@final
@dataclass(frozen=True)
class Cells:
    """Batches cut from cells that lie one behind the other: cell and size of each, and a rest of the last cell."""

    cells: IntArray
    sizes: IntArray
    rest: int

    def to_groups(self, problem: Problem, indices: npt.NDArray[np.int32], padded: IntArray) -> Groups:
        """Lay the batches over the examples; the rest becomes short batches of the last cell."""
        last = len(padded) - 1
        limit = int(problem.sizes(padded[last:])[0])
        short = cut_rest(self.rest, limit, problem.rounding)
        cells = np.append(self.cells, np.full(len(short), last, dtype=np.int64))
        sizes = np.append(self.sizes, np.array(short, dtype=np.int64))
        starts = np.cumsum(sizes) - sizes
        return Groups(indices, starts, sizes, padded[cells], num_short=len(short))


def fill_cells(counts: IntArray, sizes: IntArray) -> Cells:
    """Cut each cell into batches of its size; leftovers join the next cell.

    >>> fill_cells(np.array([5, 4]), np.array([2, 3]))
    Cells(cells=array([0, 0, 1]), sizes=array([2, 2, 3]), rest=2)
    """
    cells: list[int] = []
    carried = 0
    for cell, (count, size) in enumerate(zip(counts.tolist(), sizes.tolist(), strict=True)):
        full, carried = divmod(count + carried, size)
        cells.extend([cell] * full)
    chosen = np.array(cells, dtype=np.int64)
    return Cells(chosen, sizes[chosen], carried)
