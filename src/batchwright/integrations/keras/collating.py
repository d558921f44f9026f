"""How examples become a batch of Keras: padded to planned lengths, and trial batches that show which axes vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np

from ...errors import ArgumentError
from ...plan import BatchSampler

# collate(examples, lengths): what Keras gets, padded to the planned length per axis; None: to the longest example
Collate: TypeAlias = Callable[[list[Any], "tuple[int, ...] | None"], Any]

# Where a part of an example is: a place in its tuple, then keys of its dicts.
Path: TypeAlias = "tuple[int | str, ...]"

# Examples whose shapes are compared to tell which axes vary.
_NUM_SAMPLES = 256


def pad_collate(
    examples: Sequence[Any], lengths: tuple[int, ...] | None = None, *, fixed: Collection[Path] = ()
) -> Any:
    """Stack examples ``x``, ``(x, y)`` or ``(x, y, weight)``; sequences are filled with 0 to the planned lengths.

    Inputs are of the first axis of lengths; targets and weights are of the second if there is one. Numbers are stacked
    as they are, and dicts are stacked by key.

    Args:
        examples: of one batch.
        lengths: the planned length per axis; None pads to the longest example.
        fixed: parts that are vectors of one size and no sequences, such as ``(1,)`` for targets or ``(0, "age")`` for
            a key of inputs; ``PlannedDataset`` and ``to_tf_data`` find them in the examples.

    >>> x, y = pad_collate([([5, 6, 7], [0, 1]), ([8], [1, 0])], (4,), fixed={(1,)})
    >>> x.tolist(), y.tolist()
    ([[5, 6, 7, 0], [8, 0, 0, 0]], [[0, 1], [1, 0]])
    """
    if not isinstance(examples[0], tuple):
        return _stack(examples, None if lengths is None else lengths[0], (), fixed)
    parts = list(zip(*examples, strict=True))
    axes = [None if lengths is None else lengths[min(place, 1, len(lengths) - 1)] for place in range(len(parts))]
    return tuple(
        _stack(part, length, (place,), fixed) for place, (part, length) in enumerate(zip(parts, axes, strict=True))
    )


def _stack(values: Sequence[Any], length: int | None, path: Path, fixed: Collection[Path]) -> Any:
    if isinstance(values[0], Mapping):
        return {name: _stack([value[name] for value in values], length, (*path, name), fixed) for name in values[0]}
    arrays = [np.asarray(value) for value in values]
    if arrays[0].ndim == 0:
        return _narrow(np.stack(arrays))
    longest = max(map(len, arrays))
    width = longest if length is None or path in fixed else length
    if longest > width:
        raise ArgumentError(f"an example of length {longest} does not fit the planned length {width}")
    if path in fixed and min(map(len, arrays)) != longest:
        raise ArgumentError(f"part {path} of the examples is of no fixed size; pad it in a collate of your own")
    stacked = np.zeros((len(arrays), width, *arrays[0].shape[1:]), dtype=np.result_type(*arrays))
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return _narrow(stacked)


def _narrow(array: Any) -> Any:
    """Return Python's numbers in the types that Keras computes in; whole numbers that do not fit stay as they are."""
    limits = np.iinfo(np.int32)
    if array.dtype == np.int64 and array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        return array
    kinds = {np.dtype(np.int64): np.int32, np.dtype(np.float64): np.float32}
    return array.astype(kinds.get(array.dtype, array.dtype), copy=False)


def fixed_parts(examples: Sequence[Any]) -> frozenset[Path]:
    """Return the parts of examples that are vectors of one size while others are sequences, whose sizes vary.

    Where no size varies, parts as long as the first one are sequences.

    >>> sorted(fixed_parts([({"ids": [5, 6], "age": [1.0]}, [0, 1]), ({"ids": [7], "age": [2.0]}, [1, 0])]))
    [(0, 'age'), (1,)]
    """
    sizes: dict[Path, set[int]] = {}
    for example in examples:
        for path, size in _sizes(example, ()):
            sizes.setdefault(path, set()).add(size)
    if any(len(found) > 1 for found in sizes.values()):
        return frozenset(path for path, found in sizes.items() if len(found) == 1)
    first = next(iter(sizes.values()), set())
    return frozenset(path for path, found in sizes.items() if found != first)


def _sizes(value: Any, path: Path) -> Iterator[tuple[Path, int]]:
    if isinstance(value, Mapping | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in items:
            yield from _sizes(part, (*path, name))
    elif np.ndim(value):
        yield path, len(value)


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
        self._collate = partial(pad_collate, fixed=fixed_parts(self._spread())) if collate is None else collate

    def _spread(self) -> list[Any]:
        """Return examples from all over the data."""
        step = math.ceil(len(self._examples) / _NUM_SAMPLES)
        return [self._examples[index] for index in range(0, len(self._examples), step)]

    def make(self, indices: Sequence[Any], lengths: tuple[int, ...] | None) -> Any:
        """Return the batch of some examples."""
        return self._collate([self._examples[index] for index in indices], lengths)

    def samples(self) -> list[Any]:
        """Return batches to read types and axes from."""
        if isinstance(self._sampler, BatchSampler):
            return [self.extreme(largest=False), self.extreme(largest=True)]
        return [self._collate([example], None) for example in self._spread()]

    def extreme(self, *, largest: bool) -> Any:
        """Return a batch of one example of the smallest planned shape, or of two of the largest."""
        plan = self._sampler.plan
        choose = np.max if largest else np.min
        first = int(plan[int(np.argmin(plan.shapes[:, 1:].sum(axis=1)))][0])
        lengths = tuple(choose(plan.shapes[:, 1:], axis=0).tolist())
        return self.make([first] * (1 + largest), lengths)
