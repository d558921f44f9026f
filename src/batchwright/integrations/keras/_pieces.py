"""How a batch of Keras is cut: its rows, its padded lengths, and how many rows a piece may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

import numpy as np
from keras import tree

from ..._ceiling import Ceiling
from ..._checks import HasSize, as_whole, has_size, read_size
from ...errors import ArgumentError, BudgetError
from ...plan import Budget

MicroBatch: TypeAlias = "int | Literal['auto'] | Budget | HasSize"
# lengths(x): the padded length per axis of the inputs of a batch
LengthsOf: TypeAlias = Callable[[Any], "int | tuple[int, ...]"]

# A size that ran out of memory is tried again after this many updates: what filled the device may be gone.
FORGET_AFTER = 512


def leaves(data: Any) -> list[Any]:
    """Return the tensors and arrays of a nested batch, without None."""
    return [leaf for leaf in tree.flatten(data) if leaf is not None]


def as_array(value: Any) -> Any:
    """Return a tensor of any backend, or a number, as an array of float64."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double()
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value, dtype=np.float64)


def num_rows(data: Any) -> int:
    """Return the rows that all parts of a batch share, or say which part has others.

    >>> num_rows(({"ids": np.zeros((3, 5))}, np.zeros(3), None))
    3
    """
    found: dict[int, tuple[int, ...]] = {}
    for leaf in leaves(data):
        if getattr(leaf, "shape", None) is None or len(leaf.shape) == 0:
            raise ArgumentError(f"every part of a batch needs a first axis of examples, got {type(leaf).__name__}")
        found.setdefault(int(leaf.shape[0]), tuple(leaf.shape))
    if len(found) != 1:
        shapes = ", ".join(map(str, found.values())) or "nothing"
        raise ArgumentError(f"all parts of a batch must have the same number of rows, got shapes {shapes}")
    (num,) = found
    if num == 0:
        raise ArgumentError("the batch is empty; give at least one example")
    return num


def take_rows(data: Any, start: int, stop: int) -> Any:
    """Return neighbouring rows of a nested batch.

    >>> take_rows({"x": np.arange(4), "y": None}, 1, 3)
    {'x': array([1, 2]), 'y': None}
    """
    return tree.map_structure(lambda leaf: None if leaf is None else _slice(leaf, start, stop), data)


def _slice(leaf: Any, start: int, stop: int) -> Any:
    kind = type(leaf).__name__
    if "Sparse" in kind or "Ragged" in kind or str(getattr(leaf, "layout", "torch.strided")) != "torch.strided":
        raise ArgumentError(
            f"a {kind} cannot be cut into micro-batches; give dense tensors, or let the batch run whole"
        )
    return leaf[start:stop]


def padded_lengths(x: Any, lengths_of: LengthsOf | None) -> tuple[int, ...]:
    """Return the padded length per axis: what the user's function says, or axis 1 of the first input with one.

    >>> padded_lengths({"ids": np.zeros((3, 5))}, None), padded_lengths(np.zeros(3), None)
    ((5,), (1,))
    """
    if lengths_of is not None:
        found = lengths_of(x)
        values = found if isinstance(found, tuple | list) else (found,)
        return tuple(as_whole("lengths", value, least=1) for value in values)
    sized = [leaf for leaf in leaves(x) if len(leaf.shape) > 1]
    return (max(1, _padded_length(sized[0])),) if sized else (1,)


def _padded_length(leaf: Any) -> int:
    is_ragged = leaf.shape[1] is None
    return int(leaf.bounding_shape(axis=1) if is_ragged else leaf.shape[1])


def bounds(num: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield where pieces of at most ``most`` rows begin and end: all but the last are full, so shapes are few.

    >>> list(bounds(7, 3))
    [(0, 3), (3, 6), (6, 7)]
    """
    for start in range(0, num, most):
        yield start, min(start + most, num)


@final
@dataclass
class PieceSizes:
    """How many rows a piece may have: the setting of the user, and what memory has taught.

    Args:
        micro_batch: a number, ``"auto"`` for whole batches as long as they fit, a budget, or anything with ``.size``.
        learned: the most padded tokens (rows × lengths) of a piece that are believed to fit.
    """

    micro_batch: MicroBatch = "auto"
    learned: Ceiling = field(default_factory=Ceiling)

    def __post_init__(self) -> None:
        given = self.micro_batch
        if isinstance(given, str) and given == "auto":
            return
        if isinstance(given, Budget) or has_size(given):
            return
        self.micro_batch = as_whole('micro_batch, if not "auto", a budget or a controller,', given, least=1)

    def most(self, num: int, lengths: tuple[int, ...]) -> int:
        """Return the most rows of a piece of a batch of ``num`` rows."""
        wanted = min(num, self._wanted(num, lengths))
        width = sum(lengths)
        return wanted if math.isinf(self.learned.limit) else max(1, min(wanted, int(self.learned.limit // width)))

    def _wanted(self, num: int, lengths: tuple[int, ...]) -> int:
        given: Any = self.micro_batch
        if isinstance(given, str):
            return num
        if isinstance(given, Budget):
            fits = int(given.max_items(np.array([lengths], dtype=np.int64))[0])
            if fits < 1:
                raise BudgetError(f"one example of padded length {lengths} is over {given}; raise the budget")
            return fits
        return given if isinstance(given, int) else read_size(given, "micro_batch")

    def after_failure(self, num: int, lengths: tuple[int, ...]) -> None:
        """Halve the limit after a piece of this many rows ran out of memory."""
        width = sum(lengths)
        self.learned = self.learned.fall((num // 2) * width, failed_at=num * width)

    def after_success(self) -> None:
        """Count an update that ran; after many of them the failure is forgotten."""
        counted = self.learned.count(forget_after=FORGET_AFTER)
        self.learned = counted if math.isfinite(counted.failed_at) else Ceiling()
