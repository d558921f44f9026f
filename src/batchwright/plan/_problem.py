"""What a grouping receives and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import numpy.typing as npt

from ._arrays import IntArray, pad_up
from ._random import Purpose, bit_stream
from .budget import Budget
from .shapes import SizeRounding

_SAMPLE = 32_768


@final
@dataclass(frozen=True)
class Problem:
    """Examples that each fit the budget alone, and the rules their batches keep."""

    lengths: npt.NDArray[np.int32]  # (N, axes)
    budget: Budget
    rounding: SizeRounding
    pad_multiple_of: int
    shuffle: bool
    seed: int
    epoch: int

    @property
    def num_examples(self) -> int:
        """Return how many examples there are."""
        return len(self.lengths)

    @property
    def num_axes(self) -> int:
        """Return how many lengths an example has."""
        return self.lengths.shape[1]

    def stream(self, purpose: Purpose) -> np.random.PCG64 | None:
        """Return the random bits of a purpose, None without shuffling."""
        return bit_stream(self.seed, self.epoch, purpose) if self.shuffle else None

    def sizes(self, padded: IntArray) -> IntArray:
        """Return the allowed number of items at padded lengths ``(M, axes)``, at least one."""
        return np.maximum(self.rounding.round(self.budget.max_items(padded)), 1)

    def padded(self, lengths: IntArray) -> IntArray:
        """Return lengths as a batch pads them."""
        return pad_up(lengths, self.pad_multiple_of)

    @cached_property
    def num_batches(self) -> float:
        """Return about how many batches the examples need; with several axes, from a sample."""
        if self.num_axes == 1:
            return self.table.num_batches
        sample = self.padded(self.lengths[:: max(1, self.num_examples // _SAMPLE)])
        return float((1 / self.sizes(sample)).mean()) * self.num_examples

    @cached_property
    def table(self) -> LengthTable:
        """Return the distinct padded lengths of the first axis and what fits at each."""
        return LengthTable.of(self)


@final
@dataclass(frozen=True)
class LengthTable:
    """The distinct padded lengths of one axis, in units of ``pad_multiple_of``, and the items that fit at each."""

    values: IntArray
    counts: IntArray
    sizes: IntArray

    @staticmethod
    def of(problem: Problem) -> LengthTable:
        """Count the units of a problem with one axis."""
        units = to_units(problem.lengths[:, 0], problem.pad_multiple_of)
        values, counts = distinct(units)
        padded = (values * problem.pad_multiple_of)[:, None]
        return LengthTable(values, counts, problem.sizes(padded))

    @property
    def num_batches(self) -> float:
        """Return the batches needed if none had a gap: every example takes 1 / size of one."""
        return float((self.counts / self.sizes).sum())

    def size_at(self) -> dict[int, int]:
        """Return the items that fit at each distinct unit."""
        return dict(zip(self.values.tolist(), self.sizes.tolist(), strict=True))


@final
@dataclass(frozen=True)
class Groups:
    """Batches as slices of ``indices``, in no particular order.

    A batch is ``indices[starts[i] : starts[i] + sizes[i]]``, padded to ``padded[i]``. The last ``num_short`` ended
    because the data ended. For packed rows the slices are rows, and ``rows[i]`` of them in turn form batch ``i``.
    """

    indices: npt.NDArray[np.int32]
    starts: IntArray
    sizes: IntArray
    padded: IntArray  # (batches, axes)
    num_short: int = 0
    rows: IntArray | None = None  # (batches,)


def to_units(lengths: IntArray, multiple: int) -> IntArray:
    """Return how many units of padding each length takes: ``ceil(length / multiple)``."""
    return lengths if multiple == 1 else -(-lengths // multiple)


def distinct(values: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct values, ascending, and how often each stands; by counting where that is small."""
    if int(values.max()) <= max(4 * len(values), 65_536):
        counts = np.bincount(values)
        found = np.flatnonzero(counts)
        return found, counts[found]
    found, counts = np.unique(values, return_counts=True)
    return found.astype(np.int64), counts
