"""Sort examples by (group, value, chance) in one pass over 64-bit keys.

A key holds the group, the value to sort by, random bits and the index of the example, from the highest bit to the
lowest. One in-place sort of plain integers (vectorised in NumPy) then replaces a shuffle, an argsort and three random
gathers, and needs 8 bytes an example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..._random import words
from .base import UInt64Array

# fields(start, stop, random words) -> (group, value) of the examples start..stop
Fields = Callable[[int, int, UInt64Array], tuple[UInt64Array, UInt64Array]]

_CHUNK = 1 << 16  # keys are built in pieces that stay in the cache
_MIN_RANDOM_BITS = 8  # fewer would leave equal values in the order of the data


@final
class SortedKeys(NamedTuple):
    """Examples in order, the value each was sorted by, and where each group starts."""

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.int32]
    group_offsets: npt.NDArray[np.int64]


def sort_examples(
    num_examples: int,
    fields: Fields,
    *,
    num_groups: int,
    max_value: int,
    stream: np.random.PCG64 | None,
) -> SortedKeys:
    """Order the examples by group, then value, then chance (or index, without a stream).

    Args:
        num_examples: how many there are.
        fields: returns group and value of a range of examples; it also gets 64 random bits for each.
        num_groups: groups are below this.
        max_value: values are at most this.
        stream: source of the random bits; None keeps ties in the order of the data.
    """
    widths = _widths(num_examples, num_groups, max_value)
    if widths is None:
        return _sort_wide(num_examples, fields, num_groups, stream)
    return _unpack(_sorted_keys(num_examples, fields, widths, stream, num_groups=num_groups), widths, num_groups)


def order_examples(
    num_examples: int,
    fields: Fields,
    *,
    num_groups: int,
    max_value: int,
    stream: np.random.PCG64 | None,
) -> npt.NDArray[np.int32]:
    """Return only the order of the examples: as ``sort_examples``, without the values and the groups."""
    widths = _widths(num_examples, num_groups, max_value)
    if widths is None:
        return _sort_wide(num_examples, fields, num_groups, stream).indices
    keys = _sorted_keys(num_examples, fields, widths, stream, num_groups=num_groups)
    indices = np.empty(num_examples, dtype=np.int32)
    mask = np.uint64((1 << widths.index_bits) - 1)
    return np.bitwise_and(keys, mask, out=indices, casting="unsafe", dtype=np.uint64)


@final
class _Widths(NamedTuple):
    """The bits of a key, from the lowest."""

    index_bits: int
    chance_bits: int
    value_bits: int


def _sorted_keys(
    num_examples: int, fields: Fields, widths: _Widths, stream: np.random.PCG64 | None, *, num_groups: int
) -> UInt64Array:
    # group | value | chance | index, from the highest bit: one sort of plain numbers orders by group, then by value,
    # shuffles ties, and carries the example along. Indices differ, so the order is the same whatever the algorithm.
    keys = np.empty(num_examples, dtype=np.uint64)
    mask = np.uint64((1 << widths.chance_bits) - 1)
    shifts = [np.uint64(sum(widths[:num])) for num in (1, 2, 3)]
    for start in range(0, num_examples, _CHUNK):
        stop = min(start + _CHUNK, num_examples)
        chance = _chance(stop - start, stream)
        group, value = fields(start, stop, chance)
        key = keys[start:stop]
        np.left_shift(value, shifts[1], out=key)
        if num_groups > 1:
            key |= group << shifts[2]
        if stream is not None:
            key |= (chance & mask) << shifts[0]
        key |= np.arange(start, stop, dtype=np.uint64)
    keys.sort()
    return keys


def _widths(num_examples: int, num_groups: int, max_value: int) -> _Widths | None:
    """Return the bits of index, chance and value, or None when 64 are too few."""
    index_bits = max(1, (num_examples - 1).bit_length())
    value_bits = max(1, max_value.bit_length())
    random_bits = min(32, 64 - index_bits - value_bits - (num_groups - 1).bit_length())
    return None if random_bits < _MIN_RANDOM_BITS else _Widths(index_bits, random_bits, value_bits)


def _chance(num: int, stream: np.random.PCG64 | None) -> UInt64Array:
    return np.zeros(num, dtype=np.uint64) if stream is None else words(num, stream)


def _unpack(keys: UInt64Array, widths: _Widths, num_groups: int) -> SortedKeys:
    inner = np.searchsorted(keys, np.arange(1, num_groups, dtype=np.uint64) << np.uint64(sum(widths)))
    indices = np.empty(len(keys), dtype=np.int32)
    values = np.empty(len(keys), dtype=np.int32)
    index_mask, value_mask = np.uint64((1 << widths.index_bits) - 1), np.uint64((1 << widths.value_bits) - 1)
    for start in range(0, len(keys), _CHUNK):
        part = keys[start : start + _CHUNK]
        indices[start : start + _CHUNK] = part & index_mask
        values[start : start + _CHUNK] = (part >> np.uint64(widths.index_bits + widths.chance_bits)) & value_mask
    return SortedKeys(indices, values, np.concatenate([[0], inner, [len(keys)]]).astype(np.int64))


def _sort_wide(num_examples: int, fields: Fields, num_groups: int, stream: np.random.PCG64 | None) -> SortedKeys:
    """Sort by three separate arrays: lengths so large that they and the index do not share 64 bits."""
    chance = _chance(num_examples, stream)
    group, value = fields(0, num_examples, chance)
    # Only the low half decides ties: the high half may have chosen the group.
    indices = np.lexsort((chance & np.uint64(0xFFFFFFFF), value, group))
    offsets = np.searchsorted(group[indices], np.arange(num_groups + 1, dtype=np.uint64))
    return SortedKeys(indices.astype(np.int32), value[indices].astype(np.int32), offsets.astype(np.int64))
