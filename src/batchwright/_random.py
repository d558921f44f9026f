"""Random bits that stay the same for ever.

NumPy promises the raw stream of a bit generator, but not the methods of ``Generator``: ``permutation`` may draw
differently in the next release. A resumed epoch is planned anew, so every draw here comes from the raw stream.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np
import numpy.typing as npt


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
    return np.argsort(words(num, stream), kind="stable")


def words(num: int, stream: np.random.PCG64) -> npt.NDArray[np.uint64]:
    """Return the next ``num`` random words as an array."""
    return np.asarray(stream.random_raw(num), dtype=np.uint64)


def below(limit: int, stream: np.random.PCG64) -> int:
    """Return a random integer in ``range(limit)``; the bias is below limit / 2**64."""
    return (int(stream.random_raw()) * limit) >> 64
