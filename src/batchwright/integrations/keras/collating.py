"""How examples become a batch of Keras: padded to planned lengths, and trial batches that show which axes vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from ...errors import ArgumentError
from ...plan import BatchSampler

# collate(examples, lengths): what Keras gets, padded to the planned length per axis; None: to the longest example
Collate: TypeAlias = Callable[[list[Any], "tuple[int, ...] | None"], Any]

# Examples whose shapes are compared where no plan says which axes vary.
_NUM_SAMPLES = 256


def pad_collate(examples: Sequence[Any], lengths: tuple[int, ...] | None = None) -> Any:
    """Stack examples ``x``, ``(x, y)`` or ``(x, y, weight)``; sequences are filled with 0 to the planned lengths.

    Inputs are of the first axis of lengths; targets and weights are of the second if there is one. Numbers are stacked
    as they are, and dicts are stacked by key.

    >>> x, y = pad_collate([([5, 6, 7], 0), ([8], 1)], (4,))
    >>> x.tolist(), y.tolist()
    ([[5, 6, 7, 0], [8, 0, 0, 0]], [0, 1])
    """
    if not isinstance(examples[0], tuple):
        return _stack(examples, None if lengths is None else lengths[0])
    parts = list(zip(*examples, strict=True))
    axes = [None if lengths is None else lengths[min(place, 1, len(lengths) - 1)] for place in range(len(parts))]
    return tuple(_stack(part, length) for part, length in zip(parts, axes, strict=True))


def _stack(values: Sequence[Any], length: int | None) -> Any:
    if isinstance(values[0], Mapping):
        return {name: _stack([value[name] for value in values], length) for name in values[0]}
    arrays = [np.asarray(value) for value in values]
    if arrays[0].ndim == 0:
        return _narrow(np.stack(arrays))
    longest = max(map(len, arrays))
    width = longest if length is None else length
    if longest > width:
        raise ArgumentError(f"an example of length {longest} does not fit the planned length {width}")
    stacked = np.zeros((len(arrays), width, *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return _narrow(stacked)


def _narrow(array: Any) -> Any:
    """Return Python's numbers in the types that Keras computes in."""
    kinds = {np.dtype(np.int64): np.int32, np.dtype(np.float64): np.float32}
    return array.astype(kinds.get(array.dtype, array.dtype), copy=False)


@final
class BatchMaker:
    """Makes batches of examples."""

    def __init__(self, sampler: Any, examples: Any, collate: Collate | None) -> None:
        num = sampler.state_dict()["num_examples"]
        if len(examples) != num:
            raise ArgumentError(f"there are {len(examples)} examples, but the sampler plans {num}")
        if isinstance(sampler, BatchSampler) and sampler.settings.grouping.row_capacity is not None:
            raise ArgumentError(f"{sampler.settings.grouping} joins examples in rows; use WindowSort or Buckets")
        self._sampler, self._examples = sampler, examples
        self._collate = pad_collate if collate is None else collate

    def make(self, indices: Sequence[Any], lengths: tuple[int, ...] | None) -> Any:
        """Return the batch of some examples."""
        return self._collate([self._examples[index] for index in indices], lengths)

    def samples(self) -> list[Any]:
        """Return batches to read types and axes from."""
        if isinstance(self._sampler, BatchSampler):
            return [self.extreme(largest=False), self.extreme(largest=True)]
        step = math.ceil(len(self._examples) / _NUM_SAMPLES)
        return [self.make([index], None) for index in range(0, len(self._examples), step)]

    def extreme(self, *, largest: bool) -> Any:
        """Return a batch of one example of the smallest planned shape, or of two of the largest."""
        plan = self._sampler.plan
        choose = np.max if largest else np.min
        first = int(plan[int(np.argmin(plan.shapes[:, 1:].sum(axis=1)))][0])
        lengths = tuple(choose(plan.shapes[:, 1:], axis=0).tolist())
        return self.make([first] * (1 + largest), lengths)
