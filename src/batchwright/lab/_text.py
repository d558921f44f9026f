"""Ids of texts without a vocabulary to learn: each token is hashed into one of a fixed number of ids."""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

from .._demo.corpus import tokenize
from ._records import PADDING, Ids

# Tokens that share an id are rare in a corpus of some thousand texts, and the table of a small model stays small.
VOCABULARY_SIZE = 4096


def hash_ids(text: str, *, max_length: int) -> Ids:
    """Return the ids of the names, numbers, symbols and line ends of a text, the first ``max_length`` of them.

    ``id = 1 + crc32(token) mod (VOCABULARY_SIZE − 1)``: the same in every process, and never the padding's.

    >>> ids = hash_ids("a cat and a dog", max_length=4)
    >>> len(ids), bool(ids[0] == ids[3])
    (4, True)
    """
    return np.array([_hash(token) for token in tokenize(text)[:max_length]], dtype=np.int64)


@lru_cache(maxsize=1 << 16)
def _hash(token: str) -> int:
    # A text out of JSON may hold half of a surrogate pair, which strict UTF-8 refuses.
    return PADDING + 1 + zlib.crc32(token.encode("utf-8", "surrogatepass")) % (VOCABULARY_SIZE - 1)
