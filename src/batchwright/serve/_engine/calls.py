"""Calls of the user's function: what they gave, and how large they may be."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from ..._ceiling import Ceiling
from ...errors import Closed
from .request import Request

Group: TypeAlias = list[Request]


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of the function gave: one value per item, or an error.

    Args:
        values: one per item; an exception object fails only that item.
        error: what was raised instead.
        is_oom: the error means that memory ran out.
        is_final: the error says nothing about the items, so running parts of them would not help.
        is_cut: the call did not come back: its process died, or its time was up. A function may raise the same errors
            itself, as what another batcher said of one item.
        is_lost: the event loop that ran the batch is gone; another one may do better.
        held_seconds: the longest time for which a part of background work that gives way let nobody else run; None: it
            never gave way.
    """

    values: Sequence[Any] = ()
    error: BaseException | None = None
    is_oom: bool = False
    is_final: bool = False
    is_cut: bool = False
    is_lost: bool = False
    held_seconds: float | None = None


@final
@dataclass(frozen=True)
class Call:
    """A group of requests to run now; hand its outcome to ``Core.complete``."""

    requests: Group
    steps: Generator[Group, Outcome, None] = field(repr=False)

    @property
    def items(self) -> list[Any]:
        """Return the list that the function is called with."""
        return [request.item for request in self.requests]


def gone() -> Outcome:
    """Return what becomes of a call whose requests have all ended before it began."""
    return Outcome(error=Closed("nobody waits for these items"), is_lost=True)


# Full collections of garbage take at most this share of the time.
_MOST_COLLECTING = 0.05


@final
class Garbage:
    """Collects garbage after memory ran out: all of it, but without taking much of the time.

    A full collection looks at every object of the program, and takes tenths of a second where there are millions. If
    one item per second runs out of memory, that would be a third of all time. So after a full one that took ``s``
    seconds, those in the next ``20·s`` seconds look only at the younger objects, where what a failed call left is.

    Args:
        clock: returns seconds that never go back.
        collect: collects the garbage of a generation and all younger ones.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, collect: Callable[[int], object] = gc.collect
    ) -> None:
        self._clock, self._collect = clock, collect
        self._next_full = -math.inf

    def collect(self, *, full: bool) -> None:
        """Collect the younger garbage, or all of it if that is due."""
        start = self._clock()
        if not full or start < self._next_full:
            self._collect(1)
            return
        self._collect(2)
        end = self._clock()
        self._next_full = end + (end - start) / _MOST_COLLECTING


# Only a batch that uses this share of the limit raises it: a smaller one says nothing about memory.
_NEAR = 0.75
_GROWTH = 1.01
# Once the failure is forgotten.
_GROWTH_AFTERWARDS = 1.05
# It rises to just below what failed, and past it only after this many such batches: memory that is still short fails
# again about that late, memory that is free again is used from then on.
_BELOW_FAILURE = 0.95
_FORGET_AFTER = 250


@final
class TokenLimit:
    """The most padded tokens in a batch: halved when memory runs out, rising slowly while it does not.

    >>> learned = TokenLimit()
    >>> learned.lower(8192)
    >>> learned.within(16_384), learned.within(1000), learned.within(None)
    (4096, 1000, 4096)
    """

    def __init__(self) -> None:
        self._ceiling = Ceiling()
        self._most_fitted = 0

    def within(self, max_tokens: int | None) -> int | None:
        """Return the smaller of this limit and the setting."""
        if self._ceiling.limit == math.inf:
            return max_tokens
        tokens = int(self._ceiling.limit)
        return tokens if max_tokens is None else min(tokens, max_tokens)

    def lower(self, tokens: int) -> None:
        """Note that a batch of this many tokens did not fit, and its halves did.

        Half of it is the new limit, unless the limit is lower already. If as many tokens have fitted since the last
        such note, the batch may have failed for another reason, and only the next note counts.
        """
        if self._most_fitted >= tokens:
            self._most_fitted = 0
        else:
            self._ceiling = self._ceiling.fall(max(1.0, tokens / 2), failed_at=tokens)

    def rise(self, tokens: int) -> None:
        """Note that a batch of this many tokens fitted; near the limit it raises the limit a little."""
        self._most_fitted = max(self._most_fitted, tokens)
        limit = self._ceiling.limit
        if limit < math.inf and tokens >= _NEAR * int(limit):
            counted = self._ceiling.count(forget_after=_FORGET_AFTER)
            growth = _GROWTH if counted.failed_at < math.inf else _GROWTH_AFTERWARDS
            self._ceiling = counted.rise(limit * growth, share=_BELOW_FAILURE)
