"""Measured lengths on disk, found again by the content they were measured from."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..._files import write_atomic
from ...errors import ArgumentError, StoreError

# Part of every key: a change of what is stored or hashed must not find old files.
FORMAT = b"batchwright lengths 2"
DIGEST_BYTES = 20


@final
class ContentHash:
    """A hash over parts in order; each part goes in with its length, so that their borders count.

    >>> ContentHash().add_texts(["ab", "c"]).key() == ContentHash().add_texts(["a", "bc"]).key()
    False
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(FORMAT, digest_size=DIGEST_BYTES)

    def add(self, part: bytes) -> ContentHash:
        """Add one part."""
        self._hash.update(len(part).to_bytes(8, "little"))
        self._hash.update(part)
        return self

    def add_texts(self, texts: Iterable[str]) -> ContentHash:
        """Add each text as one part."""
        for text in texts:
            # A lone surrogate is not valid text, but that is for the tokenizer to say.
            self.add(text.encode("utf-8", "surrogatepass"))
        return self

    def key(self) -> str:
        """Return the hash of everything added so far, as a name for a file."""
        return self._hash.hexdigest()


@final
@dataclass(frozen=True)
class LengthCache:
    """A directory of ``.npy`` files, each followed by a checksum that ``np.load`` does not read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     cache = LengthCache.open(directory)
    ...     cache.save("a1", np.array([3, 5], dtype=np.int32))
    ...     cache.load("a1", (2,)).tolist(), cache.load("b2", (2,))
    ([3, 5], None)
    """

    directory: Path

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> LengthCache:
        """Make the directory if it is not there, or say why it cannot be one."""
        try:
            path = Path(directory)
            path.mkdir(parents=True, exist_ok=True)
        except (TypeError, OSError) as error:
            raise ArgumentError(
                f"cache must be a directory or a path where one can be made, got {directory!r} ({error})"
            ) from error
        return cls(path)

    def load(self, key: str, shape: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """Return the lengths of that key, or None; damaged ones are None too, with a warning."""
        path = self._path(key)
        try:
            return _unpack(path.read_bytes(), shape)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warnings.warn(f"the cached lengths in {path} are damaged ({error}); measuring again", stacklevel=3)
            return None

    def save(self, key: str, lengths: npt.NDArray[np.int32]) -> None:
        """Store lengths so that a reader finds the whole file or none; a full disk is only warned of."""
        path = self._path(key)
        try:
            write_atomic(path, _pack(lengths))
        except StoreError as error:
            warnings.warn(f"the lengths could not be stored: {error}", stacklevel=3)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.npy"


def _pack(lengths: npt.NDArray[np.int32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, lengths, allow_pickle=False)
    return buffer.getvalue() + _checksum(buffer.getvalue())


def _unpack(data: bytes, shape: tuple[int, ...]) -> npt.NDArray[np.int32]:
    body, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if _checksum(body) != checksum:
        raise ValueError("the checksum differs")
    lengths: npt.NDArray[Any] = np.load(io.BytesIO(body), allow_pickle=False)
    if lengths.dtype != np.int32 or lengths.shape != shape:
        raise ValueError(f"expected int32 {shape}, found {lengths.dtype} {lengths.shape}")
    return lengths


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
