"""Ceiling: the largest batch that memory holds, learned from batches that failed and batches that fitted."""

from __future__ import annotations

from typing import final

# Only a batch that uses this share of the ceiling raises it: a smaller one says nothing about memory.
_NEAR = 0.75
# Around the size that failed the ceiling rises slowly, elsewhere quickly: memory that is still short fails again only
# after about 250 such batches, memory that is free again is soon used.
_AROUND = (0.9, 1.1)
_QUICK, _SLOW = 1.01, 1.0005


@final
class Ceiling:
    """The most padded tokens in a batch: halved when memory runs out, rising slowly while it does not.

    >>> ceiling = Ceiling()
    >>> ceiling.lower(8192)
    >>> ceiling.limit(16_384), ceiling.limit(1000), ceiling.limit(None)
    (4096, 1000, 4096)
    """

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._failed = 0.0

    def limit(self, max_tokens: int | None) -> int | None:
        """Return the smaller of the ceiling and the setting."""
        if self._tokens is None:
            return max_tokens
        tokens = int(self._tokens)
        return tokens if max_tokens is None else min(tokens, max_tokens)

    def lower(self, tokens: int) -> None:
        """Note that a batch of this many tokens did not fit: half of it is the new ceiling, unless that is higher."""
        self._failed = float(tokens)
        self._tokens = max(1.0, min(tokens / 2, self._tokens or tokens / 2))

    def rise(self, tokens: int) -> None:
        """Note that a batch of this many tokens fitted; near the ceiling it raises the ceiling a little."""
        if self._tokens is not None and tokens >= _NEAR * int(self._tokens):
            is_around = _AROUND[0] <= self._tokens / self._failed <= _AROUND[1]
            self._tokens *= _SLOW if is_around else _QUICK
