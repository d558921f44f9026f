"""Which examples share a batch: five groupings, each a frozen setting over a pure function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np

from ..errors import ArgumentError
from ._arrays import MAX_INT32, IntArray, as_whole
from ._buckets import bucket_bounds, group_buckets
from ._grid import group_grid, make_grid
from ._problem import Groups, Problem
from ._rows import group_rows
from ._strata import cut_in_order, group_strata
from ._window import group_windows

# Below about one batch a bucket, leftovers moved up cost more padding than finer bounds save.
_BATCHES_PER_BUCKET = 1.0
# Small epochs get at least this many windows, so that neighbours change there too.
_MIN_WINDOWS = 4
_MIN_BATCHES_PER_WINDOW = 32


class Grouping(ABC):
    """How examples are divided into batches; the budget says how large a batch may be."""

    @abstractmethod
    def group(self, problem: Problem) -> Groups:
        """Divide the examples into batches."""

    def check_axes(self, num_axes: int) -> None:  # noqa: B027 - most groupings take any number
        """Refuse lengths with more axes than this grouping can handle."""

    def static_shapes(self, problem: Problem) -> IntArray | None:
        """Return the padded lengths ``(K, axes)`` batches are padded to, None where they follow the longest example."""
        return None

    @property
    def is_static(self) -> bool:
        """Return whether the padded length of a batch is fixed in advance, whatever its examples."""
        return False

    @property
    def keeps_order(self) -> bool:
        """Return whether batches stay in the order of the data."""
        return False

    @property
    def row_capacity(self) -> int | None:
        """Return the tokens of a packed row, None where every example has a row of its own."""
        return None


@final
@dataclass(frozen=True)
class InOrder(Grouping):
    """Data order, cut when the budget is reached; never shuffled."""

    def group(self, problem: Problem) -> Groups:
        """Cut the examples as they stand."""
        return cut_in_order(problem, np.arange(problem.num_examples, dtype=np.int32))

    @property
    def keeps_order(self) -> bool:
        """Return True: data order is the point."""
        return True


@final
@dataclass(frozen=True)
class Sorted(Grouping):
    """One global sort: the least padding, the same neighbours in every epoch; shuffling moves whole batches."""

    def group(self, problem: Problem) -> Groups:
        """Sort all examples and cut them."""
        if problem.num_axes > 1:
            return group_strata(problem, 1, shuffle=False)
        return group_windows(problem, 1, shuffle=False)


@final
@dataclass(frozen=True)
class WindowSort(Grouping):
    """Shuffle, sort inside windows worth ``batches_per_window`` batches: new neighbours every epoch. The default.

    Larger windows pad less and repeat neighbours more. Small epochs get four windows where each still holds 32 batches.
    """

    batches_per_window: int = 256

    def __post_init__(self) -> None:
        per_window = as_whole("WindowSort: batches_per_window", self.batches_per_window, least=1)
        object.__setattr__(self, "batches_per_window", per_window)

    def group(self, problem: Problem) -> Groups:
        """Send examples to windows, sort and cut each."""
        windows = self._num_windows(problem)
        if problem.num_axes > 1:
            return group_strata(problem, windows, shuffle=problem.shuffle)
        return group_windows(problem, windows, shuffle=problem.shuffle)

    def _num_windows(self, problem: Problem) -> int:
        num_batches = problem.num_batches
        per_window = min(self.batches_per_window, max(_MIN_BATCHES_PER_WINDOW, num_batches / _MIN_WINDOWS))
        return min(max(1, round(num_batches / per_window)), problem.num_examples)


@final
@dataclass(frozen=True)
class Buckets(Grouping):
    """At most ``count`` static lengths an axis, bounds of least padding; rows are padded to the bound.

    Inside a bucket examples are drawn at random; what fills no batch moves up to the next bucket. With two axes the
    second is bounded within each bucket of the first, and ``count`` may be a pair. Few shapes are what
    ``torch.compile``, CUDA graphs and attention kernels with a plan per shape want.
    """

    count: int | tuple[int, int] = 64

    def __post_init__(self) -> None:
        if isinstance(self.count, tuple) and len(self.count) != 2:
            raise ArgumentError(f"Buckets: count must be one number or a pair, one an axis, got {self.count!r}")
        first, second = (as_whole("Buckets: count", count, least=1) for count in self._pair())
        object.__setattr__(self, "count", (first, second) if isinstance(self.count, tuple) else first)

    def group(self, problem: Problem) -> Groups:
        """Find the bounds and fill the buckets."""
        if problem.num_axes == 2:
            return group_grid(problem, make_grid(problem, self._pair(), _BATCHES_PER_BUCKET))
        return group_buckets(problem, bucket_bounds(problem, self._pair()[0], _BATCHES_PER_BUCKET))

    def check_axes(self, num_axes: int) -> None:
        """Refuse more than two axes."""
        if num_axes > 2:
            raise ArgumentError(
                f"Buckets bounds one or two axes, got lengths with {num_axes}; use WindowSort() or Sorted()"
            )

    @property
    def is_static(self) -> bool:
        """Return True: batches are padded to the bound of their bucket."""
        return True

    def static_shapes(self, problem: Problem) -> IntArray | None:
        """Return the bounds, ``(K, axes)``."""
        if problem.num_axes == 2:
            grid = make_grid(problem, self._pair(), _BATCHES_PER_BUCKET)
            return grid.cells() * problem.pad_multiple_of
        bounds = bucket_bounds(problem, self._pair()[0], _BATCHES_PER_BUCKET)
        return bounds[:, None] * problem.pad_multiple_of

    def _pair(self) -> tuple[int, int]:
        return self.count if isinstance(self.count, tuple) else (self.count, self.count)


@final
@dataclass(frozen=True)
class Packed(Grouping):
    """Several examples a row of ``capacity`` tokens, by windowed best-fit decreasing.

    The budget counts rows as items of length ``capacity``; a batch is a list of rows.
    """

    capacity: int

    def __post_init__(self) -> None:
        capacity = as_whole("Packed: capacity", self.capacity, least=1)
        if capacity > MAX_INT32:
            raise ArgumentError(f"Packed: capacity must be at most {MAX_INT32}, got {capacity}")
        object.__setattr__(self, "capacity", capacity)

    def group(self, problem: Problem) -> Groups:
        """Pack the examples into rows."""
        return group_rows(problem, self.capacity)

    def check_axes(self, num_axes: int) -> None:
        """Refuse more than one axis."""
        if num_axes > 1:
            raise ArgumentError(f"Packed rows have one length, got lengths with {num_axes} axes; pack their sum")

    @property
    def is_static(self) -> bool:
        """Return True: rows are as long as the capacity."""
        return True

    @property
    def row_capacity(self) -> int:
        """Return the tokens of a row."""
        return self.capacity


def check_grouping(grouping: Grouping) -> Grouping:
    """Return the grouping, or say what a grouping is."""
    if isinstance(grouping, type) and issubclass(grouping, Grouping):
        raise ArgumentError(f"grouping must be an object, got the class; write {grouping.__name__}()")
    if not isinstance(grouping, Grouping):
        names = ", ".join(f"{kind.__name__}()" for kind in (InOrder, Sorted, WindowSort, Buckets, Packed))
        raise ArgumentError(f"grouping must be one of {names}, got {grouping!r}")
    return grouping
