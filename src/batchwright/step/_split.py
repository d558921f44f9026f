"""Cut a logical batch into micro-batches: by number, by budget, or by what has fitted so far."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.typing as npt

from .._lengths import as_lengths
from ..errors import ArgumentError
from ..plan import Budget
from ._tree import leaves, num_examples, take
from ._tree import split as split_tree

Lengths = npt.NDArray[np.int32]
Part = Sequence[int]  # the places of a micro-batch's examples; a range where they are neighbours


class LogicalBatch(ABC):
    """Examples of one update; they can be taken apart and put together in any order."""

    num_examples: int
    lengths: Lengths | None  # (B, axes) as the micro-batch will be padded

    @abstractmethod
    def take(self, indices: Part) -> Any:
        """Return the micro-batch of some examples."""

    def take_all(self, parts: Sequence[Part]) -> Iterable[Any]:
        """Return the micro-batches of all parts, each made when it is asked for."""
        return map(self.take, parts)

    @property
    @abstractmethod
    def gains_from_sorting(self) -> bool:
        """Return whether micro-batches of short examples are narrower."""

    @property
    @abstractmethod
    def num_elements(self) -> int:
        """Return an upper bound of what a loss may sum over."""


@final
class TensorBatch(LogicalBatch):
    """Nested tensors, split on their first dimension; kept at their width unless ``trim`` is given."""

    def __init__(self, batch: Any, *, lengths: Callable[[Any], Any] | None, trim: Callable[[Any], Any] | None) -> None:
        self._batch = batch
        self._trim = trim
        self.num_examples = num_examples(batch)
        self.lengths = None if lengths is None else _checked(lengths(batch), self.num_examples)
        if self.lengths is not None and trim is None:
            # Rows keep the width of the whole batch, so that is what each costs.
            self.lengths = np.broadcast_to(self.lengths.max(axis=0), self.lengths.shape)

    def take(self, indices: Part) -> Any:
        """Return a slice or selection of every tensor, trimmed."""
        part = take(self._batch, indices, num=self.num_examples)
        return part if self._trim is None else self._trim(part)

    def take_all(self, parts: Sequence[Part]) -> Iterable[Any]:
        """Return the micro-batches of all parts; neighbours are cut at once, which takes no copy."""
        if self._trim is None and len(parts) > 1 and all(isinstance(part, range) for part in parts):
            found = split_tree(self._batch, list(map(len, parts)))
            if found is not None:
                return found
        return map(self.take, parts)

    @property
    def gains_from_sorting(self) -> bool:
        """Return True where rows are trimmed."""
        return self._trim is not None and self.lengths is not None

    @property
    def num_elements(self) -> int:
        """Return the elements of the largest tensor."""
        return max(tensor.numel() for tensor in leaves(self._batch))


@final
class ExampleBatch(LogicalBatch):
    """A list of examples and the function that collates some of them."""

    def __init__(
        self, examples: Sequence[Any], collate: Callable[[list[Any]], Any], lengths: Callable[[Any], Any] | None
    ) -> None:
        if not examples:
            raise ArgumentError("the batch is empty; give at least one example")
        self._examples = examples
        self._collate = collate
        self.num_examples = len(examples)
        found = None if lengths is None else [lengths(example) for example in examples]
        self.lengths = None if found is None else _checked(found, self.num_examples)

    def take(self, indices: Part) -> Any:
        """Return the collated examples."""
        return self._collate([self._examples[index] for index in indices])

    @property
    def gains_from_sorting(self) -> bool:
        """Return True where lengths are known."""
        return self.lengths is not None

    @property
    def num_elements(self) -> int:
        """Return the examples times the longest, or times 2**16 where lengths are not known."""
        longest = 1 << 16 if self.lengths is None else int(self.lengths.sum(axis=1).max())
        return self.num_examples * longest


def _checked(lengths: Any, num: int) -> Lengths:
    array = as_lengths(lengths)
    if len(array) != num:
        raise ArgumentError(f"lengths must give one row an example, {num}, got {len(array)}")
    return array


def split(
    batch: LogicalBatch,
    *,
    budget: Budget | None,
    limit: float,
    order: npt.NDArray[np.int64] | None = None,
    least_parts: int = 1,
) -> list[Part]:
    """Cut a logical batch so that every micro-batch costs at most ``limit``; one example may cost more.

    Args:
        batch: the logical batch.
        budget: counts the cost as a share of the budget; None counts tokens where lengths are known, else items.
        limit: the most a micro-batch may cost.
        order: the order to cut in; None sorts by length, longest first, where that makes micro-batches narrower.
        least_parts: at least so many micro-batches, if there are so many examples.

    Returns:
        The places of the examples of each micro-batch.
    """
    if order is None and batch.gains_from_sorting:
        order = _longest_first(batch)
    most = -(-batch.num_examples // max(1, least_parts))
    if batch.lengths is None:
        most = min(most, batch.num_examples if math.isinf(limit) else max(1, math.floor(limit)))
        return _near_equal(order, batch.num_examples, -(-batch.num_examples // most))
    order = np.arange(batch.num_examples) if order is None else order
    parts: list[Part] = []
    place = 0
    while place < len(order):
        size = _longest_prefix(batch.lengths[order[place : place + most]], budget, limit)
        parts.append(order[place : place + size].tolist())
        place += size
    return parts


def cost_of(batch: LogicalBatch, part: Part, budget: Budget | None) -> float:
    """Return the cost of a micro-batch in the unit of ``split``."""
    if batch.lengths is None:
        return float(len(part))
    return float(_costs(batch.lengths[part], budget)[-1])


def _costs(lengths: Lengths, budget: Budget | None) -> npt.NDArray[np.float64]:
    """Return the cost of the first 1, 2, … examples."""
    tops = np.maximum.accumulate(lengths, axis=0).astype(np.int64)
    counts = np.arange(1, len(lengths) + 1)
    if budget is None:
        return (counts * tops.sum(axis=1)).astype(np.float64)
    return np.asarray(budget.fraction(counts, tops), dtype=np.float64)


def _longest_prefix(lengths: Lengths, budget: Budget | None, limit: float) -> int:
    over = _costs(lengths, budget) > limit
    return max(1, int(np.argmax(over))) if over.any() else len(lengths)


def _longest_first(batch: LogicalBatch) -> npt.NDArray[np.int64]:
    assert batch.lengths is not None
    return np.argsort(-batch.lengths.sum(axis=1), kind="stable")


def _near_equal(order: npt.NDArray[np.int64] | None, num: int, num_parts: int) -> list[Part]:
    """Return parts that differ by one example at most, the larger ones first, in an order or in that of the batch."""
    places: Part = range(num) if order is None else order.tolist()
    size, rest = divmod(num, num_parts)
    stops = [size * place + min(place, rest) for place in range(num_parts + 1)]
    return [places[start:stop] for start, stop in pairwise(stops)]
