"""Running out of memory: recognised without the library that ran out, and a ceiling that remembers it."""

from __future__ import annotations

from typing import final

from .._memory_errors import is_out_of_memory as is_out_of_memory

# A batch that uses so much of the ceiling raises it: quickly where memory once sufficed or now does, slowly around the
# size that failed. Memory that stays short fails again after some 250 such batches, not sooner.
_NEAR = 0.75
_QUICK, _SLOW = 1.01, 1.0005
_AROUND = (0.9, 1.1)


@final
class Ceiling:
    """The most padded tokens of a batch, lowered when memory runs out, rising slowly while it does not.

    >>> ceiling = Ceiling()
    >>> ceiling.lower(8192)
    >>> ceiling.limit(16_384), ceiling.limit(1000), ceiling.limit(None)
    (4096, 1000, 4096)
    """

    def __init__(self) -> None:
        self._tokens: float | None = None
        self._failed = 0.0

    def limit(self, max_tokens: int | None) -> int | None:
        """Return the smaller of the ceiling and what is set."""
        if self._tokens is None:
            return max_tokens
        tokens = int(self._tokens)
        return tokens if max_tokens is None else min(tokens, max_tokens)

    def lower(self, tokens: int) -> None:
        """Note that a batch of so many tokens did not fit: half of it is the new ceiling."""
        self._failed = float(tokens)
        self._tokens = max(1.0, min(tokens / 2, self._tokens or tokens / 2))

    def rise(self, tokens: int) -> None:
        """Note that a batch of so many tokens fitted; near the ceiling that raises it a little."""
        if self._tokens is not None and tokens >= _NEAR * int(self._tokens):
            is_around = _AROUND[0] <= self._tokens / self._failed <= _AROUND[1]
            self._tokens *= _SLOW if is_around else _QUICK
