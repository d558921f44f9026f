"""regroup: batches of the controller's size, made in the main process from whatever the workers loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

from ..errors import ArgumentError
from ._regroup_source import Source
from ._resizable_controller import HasSize, check_controller, read_size
from ._resizable_progress import Cursor, Progress
from ._settings import check_ranks
from ._state import check_same, read_whole

Example = TypeVar("Example")
STATE_VERSION = 1


def regroup(
    loader: Iterable[Sequence[Example]],
    controller: HasSize,
    *,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = False,
) -> Regrouped[Example]:
    """Turn a loader of lists of examples into batches of ``controller.size``, a new size at once.

    The size is read when a batch is asked for, whatever the workers have prefetched. Every example comes once an
    epoch; the last batch is what is left. ``Stepper`` with ``collate`` takes the batches as they are.

    Ranks: the size counts over all of them, and each reads its own loader. Example ``i`` of the epoch is number
    ``i // world_size`` of rank ``i % world_size``, so shares and totals stay within one of each other. All ranks end at
    the same step if every loader gives equally many examples, as ``DistributedSampler`` makes sure; nothing is
    communicated. So that every rank has an example in every step, a size below ``world_size`` counts as
    ``world_size``, and fewer than ``world_size`` examples left over join the last batch.

    Args:
        loader: yields lists, ``DataLoader(…, collate_fn=list)``; a batch is as large as the controller says, so chunks
            of about 32 examples serve.
        controller: has ``.size``, a whole number of 1 or more; a ``BatchSizeController``.
        rank: this process, from 0.
        world_size: processes.
        drop_last: leave out a last batch that is short of examples.

    Returns:
        An object to iterate over, one epoch a loop, with ``state_dict`` and ``load_state_dict``.

    >>> from types import SimpleNamespace
    >>> list(regroup([["a", "b"], ["c", "d"], ["e"]], SimpleNamespace(size=3)))
    [['a', 'b', 'c'], ['d', 'e']]
    """
    return Regrouped(loader, controller, rank=rank, world_size=world_size, drop_last=drop_last)


@final
class Regrouped(Generic[Example]):
    """Batches of the controller's size; what ``regroup`` makes.

    ``iter()`` fixes its epoch; only exhausting it moves to the next. A sampler with ``set_epoch`` is told the epoch, so
    a loop that was left begins the same order again.

    The state counts the examples consumed, over all ranks; save it instead of that of the loader or its sampler, and
    ``controller.state_dict()`` beside it. Resuming reads the epoch again and skips what was consumed, which takes the
    time of loading it. Over a ``BatchSampler`` or ``ResizableBatchSampler`` nothing but a part of one batch is loaded
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
    ) -> None:
        check_ranks(rank, world_size)
        if not isinstance(drop_last, bool):
            raise ArgumentError(f"drop_last must be True or False, got {drop_last!r}")
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.controller = check_controller(controller)
        self._source = Source(loader, rank=rank, world_size=world_size)
        self._progress = Progress()

    @property
    def epoch(self) -> int:
        """Return the epoch the next ``iter()`` runs."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a place restored within that very epoch is kept."""
        self._progress.set_epoch(epoch)

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
        stop = start + max(read_size(self.controller), self.world_size)
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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on the same world size: how samplers divide the data is not known here.

        Raises:
            StateMismatchError: the state is of another version or world size; nothing changes.
            ArgumentError: the order of the loader cannot be repeated.
        """
        self._source.check_repeatable()
        check_same("version", state.get("version"), STATE_VERSION)
        check_same("world_size", state.get("world_size"), self.world_size)
        epoch, consumed = read_whole(state, "epoch"), read_whole(state, "consumed")
        self._source.set_generator(epoch, state.get("generator"))
        self._progress.move(epoch, consumed)


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

    def take(self, num: int) -> list[Example]:
        """Return the next ``num`` examples."""
        return [self._waiting.popleft() for _ in range(num)]
