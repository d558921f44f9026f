"""Random bits that stay the same forever.

NumPy promises the raw stream of a bit generator, but not the methods of ``Generator``: ``permutation`` may draw
differently in the next release. A resumed epoch is planned anew, so every draw here comes from the raw stream.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MIN_CHANCE_BITS = 20


class Purpose(IntEnum):
    """What bits are drawn for: each purpose has a stream of its own, so that one cannot move another."""

    GROUP = 0
    ORDER = 1
    ROWS = 2


def bit_stream(seed: int, epoch: int, purpose: Purpose) -> np.random.PCG64:
    """Return the stream of 64-bit words of one purpose in one epoch.

    >>> int(bit_stream(0, 0, Purpose.ORDER).random_raw()) == int(bit_stream(0, 1, Purpose.ORDER).random_raw())
    False
    """
    # Hashed, so that no two of these share a stream, nor any of them that of ``default_rng(seed)``: data drawn with the
    # same seed would otherwise be sorted by their own random numbers.
    name = f"batchwright {seed} {epoch} {int(purpose)}".encode()
    entropy = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.PCG64(np.random.SeedSequence(entropy))


def permutation(num: int, stream: np.random.PCG64) -> npt.NDArray[np.int64]:
    """Return a uniformly random order of ``range(num)``: the order of ``num`` random words.

    >>> sorted(permutation(3, bit_stream(0, 0, Purpose.ORDER)).tolist())
    [0, 1, 2]
    """
    return order_of(words(num, stream))


def order_of(chance: npt.NDArray[np.uint64], ranks: npt.NDArray[np.uint64] | None = None) -> npt.NDArray[np.int64]:
    """Return the order of random words, within ranks where there are some; equal ones stay in turn.

    >>> order_of(np.array([7, 5, 6], dtype=np.uint64), np.array([0, 1, 0], dtype=np.uint64)).tolist()
    [2, 0, 1]
    """
    index_bits = max(1, (len(chance) - 1).bit_length())
    rank_bits = 0 if ranks is None or len(ranks) == 0 else int(ranks.max()).bit_length()
    if index_bits + rank_bits <= 64 - _MIN_CHANCE_BITS:
        # Rank, the high bits of the words and the index in one key: sorting plain integers is several times as fast.
        keys = chance >> np.uint64(index_bits + rank_bits) << np.uint64(index_bits)
        keys |= np.arange(len(chance), dtype=np.uint64)
        if ranks is not None and rank_bits:
            keys |= ranks << np.uint64(64 - rank_bits)
        keys.sort()
        ties = np.flatnonzero((keys[1:] ^ keys[:-1]) >> np.uint64(index_bits) == 0)
        if len(ties) <= _MOST_TIES:
            order = (keys & np.uint64((1 << index_bits) - 1)).astype(np.int64)
            return _settle(order, ties, chance)
    return np.lexsort((chance,) if ranks is None else (chance, ranks))


_MOST_TIES = 1000


def _settle(
    order: npt.NDArray[np.int64], ties: npt.NDArray[np.int64], chance: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Sort the places that tie with the next by their whole words, and return the order."""
    for run in np.split(ties, np.flatnonzero(np.diff(ties) > 1) + 1) if len(ties) else ():
        tied = order[run[0] : run[-1] + 2]
        order[run[0] : run[-1] + 2] = tied[np.argsort(chance[tied], kind="stable")]
    return order


def words(num: int, stream: np.random.PCG64) -> npt.NDArray[np.uint64]:
    """Return the next ``num`` random words as an array."""
    return np.asarray(stream.random_raw(num), dtype=np.uint64)


def below(limit: int, stream: np.random.PCG64) -> int:
    """Return a random integer in ``range(limit)``; the bias is below limit / 2**64."""
    return (int(stream.random_raw()) * limit) >> 64
