"""Where a sampler stands in its epochs, counted in examples: one cursor under every sampler."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, final

import numpy as np

from ..._checks import as_state, as_whole, check_same, read_whole
from ..._types import IntArray
from ...errors import ArgumentError, StateMismatchError
from .._cost import as_saved

Item = TypeVar("Item")


@final
class Cursor:
    """How far one iterator has come: the examples of the epoch consumed after each of its batches.

    Args:
        epoch: the epoch that the iterator runs.
        start: the examples of that epoch consumed before it began.
        num_batches: how many batches it will give; None where nobody knows in advance.
    """

    def __init__(self, epoch: int, start: int, num_batches: int | None) -> None:
        self.epoch = epoch
        self.start = start
        self.num_batches = num_batches
        self.num_repeated = 0
        self.has_ended = False
        self.num_received: int | None = None  # None: the loop is not tracked
        self._ends = array("q", [start])

    @property
    def given(self) -> int:
        """Return the examples of the epoch that are given out, prefetched ones too."""
        return self._ends[-1]

    @property
    def position(self) -> int:
        """Return the examples of the epoch consumed: received by the loop where it is tracked, else given out."""
        return self._ends[-1 if self.num_received is None else self.num_received]

    @property
    def is_received(self) -> bool:
        """Return whether a tracked loop has received the whole epoch."""
        known = self.num_batches is not None or self.has_ended
        return known and self.num_received == (self.num_batches or len(self._ends) - 1)

    def give(self, num_examples: int, *, num_repeated: int = 0) -> None:
        """Count a batch with this many new examples as given out."""
        self._ends.append(self._ends[-1] + num_examples)
        self.num_repeated += num_repeated

    def receive(self) -> None:
        """Count an item that reached the loop; more of them than batches cannot be placed."""
        num_received, num_formed = (self.num_received or 0) + 1, len(self._ends) - 1
        if num_received > num_formed:
            raise ArgumentError(
                f"track() counts one item per batch, and the loader gave more than the {num_formed} batches formed; "
                "track the loader before anything divides its batches"
            )
        self.num_received = num_received


@final
class Progress:
    """The epoch the next ``iter()`` runs, the examples consumed before it begins, and the newest iterator.

    Exhausting an iterator moves to the next epoch. One from before ``set_epoch`` or ``move`` went elsewhere does not
    move what they set.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.start = 0
        self.newest: Cursor | None = None

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a place restored within that very epoch is kept."""
        epoch = as_whole("epoch", epoch, least=0)
        self.move(epoch, self.start if epoch == self.epoch else 0)

    def move(self, epoch: int, start: int) -> None:
        """Let the next iterator begin at a place."""
        self.epoch, self.start, self.newest = epoch, start, None

    def begin(self, num_batches: int | None = None) -> Cursor:
        """Return the cursor of a new iterator, which will give ``num_batches`` where that is known."""
        self.newest = Cursor(self.epoch, self.start, num_batches)
        return self.newest

    def end(self, cursor: Cursor) -> None:
        """Note that an iterator is exhausted."""
        cursor.has_ended = True
        if cursor.num_received is None:  # otherwise only the prefetcher has reached the end
            self._finish(cursor)

    def _finish(self, cursor: Cursor) -> None:
        if (self.epoch, self.start) == (cursor.epoch, cursor.start):
            self.epoch, self.start = cursor.epoch + 1, 0

    @property
    def position(self) -> int:
        """Return the examples of the epoch that the newest iterator has consumed."""
        if self.newest is not None and self.newest.epoch == self.epoch:  # otherwise the epoch is over
            return self.newest.position
        return self.start

    def track(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over a loader, counting what the loop receives instead of what was prefetched."""
        if not getattr(loader, "in_order", True):
            raise ArgumentError("track() counts batches in order, the loader has in_order=False; leave it at True")
        before, place = self.newest, (self.epoch, self.start)
        cursor = None
        for item in loader:
            # Looked up now: a wrapper may begin its loader as late as the first item.
            cursor = cursor or self._begin_tracking(before, place)
            cursor.receive()
            yield item
        cursor = cursor or self._begin_tracking(before, place)
        if cursor.is_received:  # otherwise a wrapper ended early, as a break would
            self._finish(cursor)

    def _begin_tracking(self, before: Cursor | None, place: tuple[int, int]) -> Cursor:
        cursor = self.newest
        if cursor is None or cursor is before:
            raise ArgumentError(
                "track() needs a loader that draws from this sampler, batch_sampler=sampler, and has not begun yet"
            )
        cursor.num_received = 0
        self.epoch, self.start = place  # a short epoch may have been prefetched to its end already
        return cursor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "newest": None}


class AbstractEpochs:
    """Epochs that begin with ``iter()`` and end when an iterator is exhausted."""

    def __init__(self) -> None:
        self._progress = Progress()

    @property
    def epoch(self) -> int:
        """Return the epoch the next ``iter()`` runs."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a place restored within that very epoch is kept."""
        self._progress.set_epoch(epoch)

    def _move_to(self, epoch: int, position: int, *, is_there: bool, fault: str) -> None:
        """Go to a place of a saved state, or refuse one that does not exist."""
        if not is_there:
            raise StateMismatchError(
                f"position {position} of the state {fault} epoch {epoch}; the state was changed by hand"
            )
        self._progress.move(epoch, position)


def read_place(state: Mapping[str, Any], mine: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epoch and the position of a saved state, or refuse one of other data or other settings than mine."""
    state = as_state(state, of="a sampler")
    for key in ("version", "num_examples", "lengths", "budget", "settings", "seed"):
        check_same(key, state.get(key), as_saved(mine[key], state.get(key)))
    return read_whole(state, "epoch"), read_whole(state, "position")


def fingerprint(array: IntArray) -> str:
    """Return a hash of an array's shape and values.

    >>> fingerprint(np.array([1, 2], dtype=np.int32)) == fingerprint(np.array([2, 1], dtype=np.int32))
    False
    """
    digest = hashlib.blake2b(repr(array.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()
