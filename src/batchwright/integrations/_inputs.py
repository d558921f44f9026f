"""The inputs of a model: count the examples, take some of them.

A micro-batch that runs out of memory is cut into units: ``Rows``, or the ``Sequences`` of a single row that was packed
or flattened; or it stays ``Whole``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, final

from torch import Tensor

from .. import _tree
from ..errors import ArgumentError
from ..step.packing.rows import PackedRow


def num_rows(batch: Mapping[str, Any], key: str) -> int:
    """Return the number of examples: the length of the value under ``key``."""
    if not isinstance(batch, Mapping):
        raise ArgumentError(f"the batch must be a dict of inputs by name, got {type(batch).__name__}")
    value = batch.get(key)
    if value is None:
        raise KeyError(f"Batch size key `{key}` not found in inputs, only {sorted(batch)}; pass batch_size_key=...")
    if not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        raise ArgumentError(f"{key!r} must have one row per example, got {type(value).__name__} without any axis")
    return len(value)


def take_rows(batch: Mapping[str, Any], rows: Sequence[int], num: int) -> dict[str, Any]:
    """Return some of the ``num`` examples of a model's inputs; values that belong to no example stay whole.

    Tensors, arrays, lists and tuples are cut as ``_tree.take_rows`` says. A Series or a frame of pandas is cut by its
    rows, whatever its index; any other sequence of ``num`` entries, such as a column of a data set, gives a list.

    >>> import torch
    >>> take_rows({"x": torch.arange(3), "numbers": range(3)}, [0, 2], 3)
    {'x': tensor([0, 2]), 'numbers': [0, 2]}
    """
    columns = {name: value for name, value in batch.items() if _is_column(value) and len(value) == num}
    rest = {name: value for name, value in batch.items() if name not in columns}
    taken = {name: _entries(value, rows) for name, value in columns.items()} | _tree.take_rows(rest, rows, num)
    return {name: taken[name] for name in batch}


def _is_column(value: Any) -> bool:
    """Say whether a value is a sequence of examples of a kind that ``_tree`` does not know."""
    is_other = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | tuple)
    return hasattr(value, "iloc") or (is_other and type(value) is not list)


def _entries(column: Any, rows: Sequence[int]) -> Any:
    return column.iloc[list(rows)] if hasattr(column, "iloc") else [column[row] for row in rows]


class Cut(ABC):
    """A micro-batch as units that can be run apart.

    Attributes:
        batch: the inputs.
        num: the number of units.
        unit: what they are called.
    """

    batch: dict[str, Any]
    num: int
    unit: str = "example"
    why_whole: str = ""  # why a single unit cannot be cut any further, if it may hold several examples

    @abstractmethod
    def take(self, units: Sequence[int]) -> dict[str, Any]:
        """Return the inputs of some units."""

    def part(self, units: Sequence[int]) -> dict[str, Any]:
        """Return the inputs of some units as a dict of their own; all of them are the batch as it came."""
        return dict(self.batch) if len(units) == self.num else self.take(units)

    def describe(self, unit: int) -> str:
        """Return what a unit that does not fit looks like."""
        tensors = list(_tree.leaves(self.part([unit])))
        size = sum(tensor.nbytes for tensor in tensors)
        return f"tensors {[tuple(tensor.shape) for tensor in tensors]}, {size:,} bytes of input"


@final
class Rows(Cut):
    """Examples along the first axis of the inputs."""

    def __init__(self, batch: dict[str, Any], key: str) -> None:
        self.batch, self.num = batch, num_rows(batch, key)

    def take(self, units: Sequence[int]) -> dict[str, Any]:
        """Return some rows with all of their padding, which a model without a mask sees."""
        return take_rows(self.batch, list(units), self.num)


@final
class Pairs(Cut):
    """Pairs of rows: the first half of the rows holds one side of every pair, the second half the other.

    Args:
        batch: its inputs; values of as many entries as pairs belong to pairs.
        key: the input whose length is the number of rows.
    """

    unit = "pair"

    def __init__(self, batch: dict[str, Any], key: str) -> None:
        rows = num_rows(batch, key)
        if rows % 2:
            raise ArgumentError(f"{key!r} has {rows} rows, but pairs of chosen and rejected rows need an even number")
        self.batch, self.num = batch, rows // 2

    def take(self, units: Sequence[int]) -> dict[str, Any]:
        """Return some pairs, again one side before the other."""
        rows = [*units, *(unit + self.num for unit in units)]
        return {name: self._taken(name, value, list(units), rows) for name, value in self.batch.items()}

    def first_sides(self) -> dict[str, Any]:
        """Return the first rows of all pairs."""
        whole = {name: value for name, value in self.batch.items() if isinstance(value, Tensor) and value.ndim}
        return {name: value[: self.num] for name, value in whole.items()}

    def _taken(self, name: str, value: Any, units: list[int], rows: list[int]) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if len(value) not in (self.num, 2 * self.num):
            raise ArgumentError(
                f"the tensor {name!r} has {len(value)} entries for {self.num} pairs, so none can be cut"
            )
        return value[units if len(value) == self.num else rows]


@final
class Whole(Cut):
    """A micro-batch that cannot be cut."""

    def __init__(self, batch: dict[str, Any], why: str) -> None:
        self.batch, self.num, self.unit, self.why_whole = batch, 1, "micro-batch", why

    def take(self, units: Sequence[int]) -> dict[str, Any]:
        """Return everything."""
        return dict(self.batch)


@final
class Grouped(Cut):
    """Groups of examples that stay together: the units of a micro-batch, several of them in each group.

    Args:
        cut: the micro-batch as examples, in the order of the plan.
        sizes: the number of examples of every group.
    """

    unit = "group"

    def __init__(self, cut: Cut, sizes: Sequence[int]) -> None:
        self.batch, self.num = cut.batch, len(sizes)
        self._cut, self._ends = cut, list(accumulate(sizes, initial=0))

    def take(self, units: Sequence[int]) -> dict[str, Any]:
        """Return the examples of some groups."""
        return self._cut.take([row for unit in units for row in range(self._ends[unit], self._ends[unit + 1])])


def in_groups(cut: Cut, sizes: Sequence[int] | None) -> Cut:
    """Return a cut between groups of examples; what does not have a unit per example is not cut at all.

    Args:
        cut: of a micro-batch.
        sizes: the number of examples of every group, in order; None if examples stand for themselves.
    """
    if sizes is None or cut.why_whole or max(sizes) == 1:
        return cut
    if cut.num != sum(sizes):
        return Whole(
            cut.batch, f"its {sum(sizes)} examples stay together in groups, but are not its {cut.num} {cut.unit}s"
        )
    return Grouped(cut, sizes)


@final
class Sequences(Cut):
    """The sequences of a single row, as padding-free collators make it.

    Args:
        batch: its inputs; ``position_ids`` begin again where a sequence does.
        shifts: the loss predicts the next label, so that the first label of a sequence belongs to no token of it.
    """

    unit = "sequence"

    def __init__(self, batch: dict[str, Any], *, shifts: bool = True) -> None:
        self.batch = batch
        self._row = PackedRow(batch)
        self.num = self._row.num
        if shifts:
            self._row.check_labels()

    def take(self, units: Sequence[int]) -> dict[str, Any]:
        """Return a row of some sequences, with the bounds that it has."""
        return self._row.take(units)
