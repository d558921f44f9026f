"""The inputs of a model: count the examples, take some of them.

A micro-batch that runs out of memory is cut into units: ``Rows``, or the ``Sequences`` of a single row that was packed
or flattened; or it stays ``Whole``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .. import _tree
from ..errors import ArgumentError

_IGNORED = -100


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


# Where the sequences of a packed row begin and end, and how long the longest of them is.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


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
class Sequences(Cut):
    """The sequences of a single row, as padding-free collators make it.

    Args:
        batch: its inputs; ``position_ids`` begin again where a sequence does.
    """

    unit = "sequence"

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch
        starts = sequence_starts(batch)
        if starts is None:
            raise ArgumentError("the batch is not a single row with position_ids that begin again at every sequence")
        self._width = int(batch["position_ids"].shape[-1])
        self._bounds = [*starts, self._width]
        self.num = len(starts)
        self._check(starts)

    def _check(self, starts: list[int]) -> None:
        for name in _BOUNDARIES:
            if name in self.batch and self.batch[name].tolist() != self._bounds:
                raise ArgumentError(f"{name} and position_ids disagree about where the sequences begin")
        labels = self.batch.get("labels")
        if isinstance(labels, Tensor) and "shift_labels" not in self.batch and starts[1:]:
            if bool((labels[0, starts[1:]] != _IGNORED).any()):
                # The token before it predicts it, which is gone when the row is cut there.
                raise ArgumentError("the first label of a packed sequence counts, but a cut would drop it")

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of every sequence."""
        return [end - start for start, end in zip(self._bounds, self._bounds[1:], strict=False)]

    def take(self, units: Sequence[int]) -> dict[str, Any]:
        """Return a row of some sequences, with the bounds that it has."""
        spans = [range(self._bounds[unit], self._bounds[unit + 1]) for unit in units]
        places = torch.tensor([place for span in spans for place in span])
        return {name: self._taken(name, value, spans, places) for name, value in self.batch.items()}

    def _taken(self, name: str, value: Any, spans: list[range], places: Tensor) -> Any:
        lengths = torch.tensor([len(span) for span in spans])
        if name in _BOUNDARIES:
            return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(value)
        if name in _LONGEST:
            return lengths.max().to(value) if isinstance(value, Tensor) else int(lengths.max())
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if name == "seq_idx":
            return torch.repeat_interleave(torch.arange(len(spans)), lengths)[None].to(value)
        axis = value.ndim - 1 if name.endswith("position_ids") else 1
        if value.ndim < 2 or value.shape[axis] != self._width:
            raise ArgumentError(
                f"the tensor {name!r} of shape {tuple(value.shape)} does not run along the {self._width} tokens of a "
                "packed row, so the row cannot be cut"
            )
        return value.index_select(axis, places.to(value.device))


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Say whether rows hold several sequences, as far as the inputs tell.

    >>> is_packed({"input_ids": torch.ones(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])})
    True
    """
    if any(name in batch for name in _BOUNDARIES):
        return True
    positions = batch.get("position_ids")
    if not (isinstance(positions, Tensor) and positions.ndim >= 2) or isinstance(batch.get("attention_mask"), Tensor):
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def sequence_starts(batch: Mapping[str, Any]) -> list[int] | None:
    """Return where the sequences of a single row begin; None if its ``position_ids`` do not tell.

    Attention keeps sequences apart by ``position_ids``. Other bounds alone hold for some kinds of attention only.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim < 2 or isinstance(batch.get("attention_mask"), Tensor):
        return None
    rows = positions.flatten(0, -2)
    is_single = positions.shape[-2] == 1
    if not is_single or not bool((rows == rows[0]).all()):
        return None
    return [0, *((rows[0].diff() != 1).nonzero().flatten() + 1).tolist()]
