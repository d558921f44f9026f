"""regroup: batches of the controller's size, made in the main process from whatever the workers loaded."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

from ..._checks import (
    HasSize,
    as_flag,
    as_sized,
    as_state,
    as_whole,
    check_ranks,
    check_same,
    peek_size,
    read_size,
    read_whole,
)
from ...errors import ArgumentError
from ._progress import AbstractEpochs, Cursor
from ._source import Source

Example = TypeVar("Example")
# Version 1 did not hold the order of a planned loader, which then had runs of 64 batches.
STATE_VERSION = 2


def regroup(
    loader: Iterable[Sequence[Example]],
    controller: HasSize,
    *,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = False,
    length_of: Callable[[Example], int] | None = None,
) -> Regrouped[Example]:
    """Turn a loader of lists of examples into batches of ``controller.size``; a new size applies at once.

    The size is read when a batch is asked for, whatever the workers have prefetched. Every example comes once per
    epoch; the last batch is what is left. ``Stepper`` with ``collate`` takes the batches as they are.

    Ranks: the size counts over all of them, and each reads its own loader. Example ``i`` of the epoch is number
    ``i // world_size`` of rank ``i % world_size``, so shares and totals stay within one of each other. All ranks end at
    the same step if every loader gives the same number of examples, as ``DistributedSampler`` ensures; nothing is
    communicated. So that every rank has an example in every step, a size below ``world_size`` counts as
    ``world_size``, and fewer than ``world_size`` examples left over join the last batch.

    Args:
        loader: yields lists, ``DataLoader(…, collate_fn=list)``; a batch is as large as the controller says, so chunks
            of about 32 examples serve.
        controller: a ``BatchSizeController``, anything else with a ``.size``, or a fixed number of examples.
        rank: this process, from 0.
        world_size: processes.
        drop_last: leave out a last batch that has too few examples.
        length_of: the tokens of an example; the size then counts tokens. A batch takes examples as long as their tokens
            together are at most the size, and at least one. On one rank only, as a rank does not see the lengths of
            the others; ``ResizableBatchSampler(…, size_unit="tokens")`` does.

    Returns:
        An object to iterate over, one epoch per loop, with ``state_dict`` and ``load_state_dict``.

    >>> from types import SimpleNamespace
    >>> list(regroup([["a", "b"], ["c", "d"], ["e"]], SimpleNamespace(size=3)))
    [['a', 'b', 'c'], ['d', 'e']]
    >>> list(regroup([["six", "five", "four"], ["a", "b"]], 8, length_of=len))
    [['six', 'five'], ['four', 'a', 'b']]
    """
    return Regrouped(loader, controller, rank=rank, world_size=world_size, drop_last=drop_last, length_of=length_of)


@final
class Regrouped(AbstractEpochs, Generic[Example]):
    """Batches of the controller's size; what ``regroup`` makes.

    ``iter()`` fixes its epoch; only exhausting it moves to the next. A sampler with ``set_epoch`` is told the epoch, so
    a loop that was left begins the same order again.

    The state counts the examples consumed, over all ranks; save it instead of that of the loader or its sampler, and
    ``controller.state_dict()`` beside it. Resuming reads the epoch again and skips what was consumed, which takes the
    time of loading it. Over a ``BatchSampler`` or ``ResizableBatchSampler`` only part of one batch is loaded
    again. A sampler that draws from a generator, as ``DataLoader(shuffle=True, generator=g)`` has, adds the state of
    the generator, about 7 kB. Without a generator its order cannot be repeated, and ``load_state_dict`` says so; other
    sources must yield the same order again.
    """

    def __init__(
        self,
        loader: Iterable[Sequence[Example]],
        controller: HasSize,
        *,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        length_of: Callable[[Example], int] | None = None,
    ) -> None:
        self.rank, self.world_size = check_ranks(rank, world_size)
        self.drop_last = as_flag("drop_last", drop_last)
        self._length_of = _check_length_of(length_of, self.world_size)
        self.controller = as_sized("controller", controller)
        self._source = Source(loader, rank=self.rank, world_size=self.world_size)
        super().__init__()

    def __iter__(self) -> Iterator[list[Example]]:
        # Not a generator: the epoch is fixed now, not at the first next().
        return self._run(self._progress.begin())

    def _run(self, cursor: Cursor) -> Iterator[list[Example]]:
        num_own = self._num_own(cursor.start)
        stream = _Stream(self._source.open(cursor.epoch, num_own), num_own)
        while (stop := self._next_stop(stream, cursor.given)) > cursor.given:
            num_own = self._num_own(stop) - self._num_own(cursor.given)
            cursor.give(stop - cursor.given)
            yield stream.take(num_own)
        self._progress.end(cursor)

    def _num_own(self, num_examples: int) -> int:
        """Return how many of the first examples of the epoch are ours: those with ``i % world_size == rank``."""
        return (num_examples - self.rank + self.world_size - 1) // self.world_size

    def _next_stop(self, stream: _Stream[Example], start: int) -> int:
        """Return where the batch that begins at ``start`` ends, counted over all ranks; ``start`` at the end.

        All ranks give ``n`` examples, ``n × world_size`` in all. A rank that finds its own end within what it reads
        ahead knows ``n``, and what it reads ahead is the same on every rank: so all find the last batch in one step.
        """
        size = read_size(self.controller)
        if self._length_of is not None:
            num, is_full = stream.num_within(size, self._length_of)
            return start + (num if is_full or not self.drop_last else 0)
        stop = start + max(size, self.world_size)
        needed = -(-stop // self.world_size)
        if stop % self.world_size and not self.drop_last:
            needed += 1  # to see whether fewer examples than ranks would be left
        num_seen = stream.read_up_to(needed)
        if num_seen == needed:
            return stop
        return start if self.drop_last else num_seen * self.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, as JSON values; the state of the controller is its own."""
        return {
            "version": STATE_VERSION,
            "world_size": self.world_size,
            "epoch": self._progress.epoch,
            "consumed": self._progress.position,
            "generator": self._source.generator_at(self._progress.epoch),
            "sampler": self._source.order_at(self._progress.epoch),
            **({} if self._length_of is None else {"size_unit": "tokens"}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on the same world size: how samplers divide the data is not known here.

        Raises:
            StateMismatchError: the state is of a later version, another world size, another unit of sizes or another
                sampler of ours; nothing changes.
            ArgumentError: the order of the loader cannot be repeated.
        """
        state = as_state(state, of="regroup")
        self._source.check_repeatable()
        version = read_whole(state, "version")
        if version != 1:
            check_same("version", version, STATE_VERSION)
        check_same("world_size", state.get("world_size"), self.world_size)
        unit = "examples" if self._length_of is None else "tokens"
        check_same("size_unit", state.get("size_unit", "examples"), unit)  # examples have none in the state
        epoch, consumed = read_whole(state, "epoch"), read_whole(state, "consumed")
        order = self._source.earlier_order(epoch) if version == 1 else state.get("sampler")
        self._source.check_order(epoch, order)
        self._source.set_generator(epoch, state.get("generator"))
        self._source.set_order(epoch, order)
        self._progress.move(epoch, consumed)

    def __repr__(self) -> str:
        place = f"epoch {self.epoch}, rank {self.rank} of {self.world_size}"
        return f"regroup({self._source}, size {peek_size(self.controller)}, {place})"


@final
class _Stream(Generic[Example]):
    """The examples of this rank, read ahead only as far as asked."""

    def __init__(self, chunks: Iterator[Sequence[Example]], num_seen: int) -> None:
        self._chunks = chunks
        self._waiting: deque[Example] = deque()
        self._num_seen = num_seen

    def read_up_to(self, num: int) -> int:
        """Read until ``num`` examples of the epoch were seen; return ``num``, or how many there are if fewer."""
        while self._num_seen < num:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._waiting.extend(chunk)
            self._num_seen += len(chunk)
        return min(num, self._num_seen)

    def num_within(self, size: int, length_of: Callable[[Example], int]) -> tuple[int, bool]:
        """Return how many of the next examples have at most ``size`` tokens together, one at least if there is one.

        The second value says whether they are a full batch, and not only what the end of the stream has left.
        """
        start, total = self._num_seen - len(self._waiting), 0
        for num in itertools.count():
            if self.read_up_to(start + num + 1) == start + num:
                return num, total == size
            length = as_whole("length_of(example)", length_of(self._waiting[num]), least=0)
            if num > 0 and total + length > size:
                return num, True
            total += length
        raise AssertionError

    def take(self, num: int) -> list[Example]:
        """Return the next ``num`` examples."""
        return [self._waiting.popleft() for _ in range(num)]


def _check_length_of(length_of: Callable[[Example], int] | None, world_size: int) -> Callable[[Example], int] | None:
    if length_of is not None and not callable(length_of):
        raise ArgumentError(f"length_of must be a function of an example, got {length_of!r}")
    if length_of is not None and world_size > 1:
        raise ArgumentError(
            "length_of counts tokens on one rank only, as a rank does not see the examples of the others; use "
            'ResizableBatchSampler(…, size_unit="tokens"), which knows all lengths'
        )
    return length_of
