"""regroup: batches of the controller's size, made in the main process from whatever the workers loaded."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import numpy as np

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
from ...errors import ArgumentError, StateMismatchError
from ._progress import AbstractEpochs, Cursor
from ._reading import kind
from .planned import BatchSampler
from .resizable import ResizableBatchSampler, check_length_of

Example = TypeVar("Example")
STATE_VERSION = 2
_EARLIER_RUNS = 64  # version 1 did not hold the order of a planned loader, which then had runs of this many batches


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
        length_of: the tokens of an example; the size then counts tokens: a batch takes examples as long as their tokens
            together are at most the size, and at least one. On one rank only, as a rank does not see the others.

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
        self.controller = as_sized("controller", controller)
        self._length_of = check_length_of(length_of, self.controller, self.world_size)
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
            StateMismatchError: the state is of a later version, another world size, unit or sampler; nothing changes.
            ArgumentError: the order of the loader cannot be repeated.
        """
        state = as_state(state, of="regroup")
        self._source.check_repeatable()
        version = read_whole(state, "version")
        if version != 1:
            check_same("version", version, STATE_VERSION)
        check_same("world_size", state.get("world_size"), self.world_size)
        check_same("size_unit", state.get("size_unit"), None if self._length_of is None else "tokens")
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
        """Return how many of the next examples, one at least, fit in ``size`` tokens, and whether they fill it."""
        start, num, total = self._num_seen - len(self._waiting), 0, 0
        while self.read_up_to(start + num + 1) > start + num:
            length = as_whole("length_of(example)", length_of(self._waiting[num]), least=0)
            if num > 0 and total + length > size:
                return num, True
            num, total = num + 1, total + length
        return num, total >= size

    def take(self, num: int) -> list[Example]:
        """Return the next ``num`` examples."""
        return [self._waiting.popleft() for _ in range(num)]


@final
class Source(Generic[Example]):
    """The examples of a loader, chunk by chunk, in an order that belongs to the epoch.

    Samplers with ``set_epoch`` are told the epoch. Where the sampler draws from a generator, the state of the
    generator before the first chunk is kept, and the epoch begins from it again.
    """

    def __init__(self, loader: Iterable[Sequence[Example]], *, rank: int, world_size: int) -> None:
        if not isinstance(loader, Iterable):
            raise ArgumentError(f"loader must be iterable, got {kind(loader)}")
        if getattr(getattr(loader, "collate_fn", None), "__name__", "") == "default_collate":
            raise ArgumentError(
                "the loader must yield lists of examples, and it has the default collate_fn; pass collate_fn=list"
            )
        self._loader = loader
        self._batch_sampler: Any = getattr(loader, "batch_sampler", None)
        self._sampler: Any = getattr(self._batch_sampler, "sampler", None)
        self._draws: tuple[int, str] | None = None  # an epoch, and the generator before its first chunk
        self._order: tuple[int, Mapping[str, Any]] | None = None  # an epoch, and the start of it in our sampler
        _check_ranks(self._batch_sampler, self._sampler, rank, world_size)

    def __repr__(self) -> str:
        return kind(self._loader)

    def open(self, epoch: int, num_consumed: int) -> Iterator[Sequence[Example]]:
        """Begin an epoch after the first ``num_consumed`` of its examples."""
        for part in (self._loader, self._batch_sampler, self._sampler, getattr(self._loader, "dataset", None)):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)  # type: ignore[union-attr]
        self._draw_again(epoch)
        skip = seek(self._batch_sampler, epoch, self.order_at(epoch), num_consumed)
        for chunk in self._loader:
            if not isinstance(chunk, list | tuple):
                raise ArgumentError(
                    f"the loader must yield lists of examples, got {type(chunk).__name__}; pass collate_fn=list"
                )
            yield chunk[skip:]
            skip = max(0, skip - len(chunk))
        if skip:
            raise StateMismatchError(
                f"the state was saved after {num_consumed} examples, and the loader ended {skip} examples earlier; "
                "give the same data"
            )

    def check_repeatable(self) -> None:
        """Refuse a loader that cannot give the order of an epoch again, where that can be seen."""
        if not getattr(self._loader, "in_order", True):
            raise ArgumentError(
                "the loader has in_order=False, so its order cannot be repeated; leave it at True to resume"
            )
        if hasattr(self._sampler, "generator") and self._sampler.generator is None:
            raise ArgumentError(
                f"the order of a {type(self._sampler).__name__} without a generator cannot be repeated; pass "
                "generator=torch.Generator() with a seed, or a sampler with set_epoch, to resume"
            )

    def generator_at(self, epoch: int) -> str | None:
        """Return the state of the sampler's generator before the first chunk of an epoch, None without one."""
        generator = getattr(self._sampler, "generator", None)
        if generator is None:
            return None
        if self._draws is not None and self._draws[0] == epoch:
            return self._draws[1]
        return base64.b64encode(bytes(generator.get_state().tolist())).decode()

    def set_generator(self, epoch: int, state: str | None) -> None:
        """Let an epoch begin from a saved state of the sampler's generator."""
        has_generator = getattr(self._sampler, "generator", None) is not None
        if has_generator != (state is not None) or not isinstance(state, str | None):
            raise StateMismatchError(
                f"the state was saved {'with' if isinstance(state, str) else 'without'} a generator of the sampler, "
                f"here there is {'one' if has_generator else 'no generator'}; use the same loader"
            )
        if state is not None:
            self._check_generator(state)
        self._draws = None if state is None else (epoch, state)

    def order_at(self, epoch: int) -> dict[str, Any] | None:
        """Return the state of a ``BatchSampler`` at the start of an epoch, None for any other sampler."""
        if not isinstance(self._batch_sampler, BatchSampler):
            return None
        if self._order is not None and self._order[0] == epoch:
            return dict(self._order[1])
        return self._batch_sampler.start_of(epoch)

    def earlier_order(self, epoch: int) -> dict[str, Any] | None:
        """Return the same under the rules of the first version."""
        order = self.order_at(epoch)
        if order is None:
            return None
        runs = self._batch_sampler.settings.balance_over or _EARLIER_RUNS
        return {**order, "version": 1, "settings": {**order["settings"], "balance_over": runs}}

    def check_order(self, epoch: int, order: Any) -> None:
        """Refuse the order of another sampler, or of another epoch."""
        is_planned = isinstance(self._batch_sampler, BatchSampler)
        if is_planned != isinstance(order, Mapping):
            raise StateMismatchError(
                f"the state was saved {'without' if is_planned else 'with'} a BatchSampler in the loader, "
                f"here there is {'one' if is_planned else 'none'}; use the same loader"
            )
        if is_planned:
            check_same("epoch", self._batch_sampler.read_state(order)[0], epoch)

    def set_order(self, epoch: int, order: Mapping[str, Any] | None) -> None:
        """Let an epoch have a saved order."""
        self._order = None if order is None else (epoch, order)

    def _check_generator(self, state: str) -> None:
        """Refuse a state that the generator would not take when the epoch begins; the generator stays as it is."""
        generator = self._sampler.generator
        before = generator.get_state()
        try:
            generator.set_state(before.new_tensor(list(base64.b64decode(state, validate=True))))
        except (RuntimeError, TypeError, ValueError) as error:
            raise StateMismatchError(f"the state holds no valid generator of the sampler: {error}") from error
        finally:
            generator.set_state(before)

    def _draw_again(self, epoch: int) -> None:
        state = self.generator_at(epoch)
        if state is None:
            return
        if self._draws is not None and self._draws[0] == epoch:
            generator = self._sampler.generator
            generator.set_state(generator.get_state().new_tensor(list(base64.b64decode(state))))
        self._draws = (epoch, state)


def seek(batch_sampler: Any, epoch: int, order: Mapping[str, Any] | None, num_examples: int) -> int:
    """Move one of our samplers to the last batch that begins at or before this many examples.

    Args:
        batch_sampler: that of a loader.
        epoch: the epoch to begin.
        order: the state of a ``BatchSampler`` at the start of the epoch; None for others.
        num_examples: how many were consumed.

    Returns:
        How many examples are still to be skipped; all of them where the sampler is not ours.
    """
    if not _is_ours(batch_sampler):
        return num_examples
    batch_sampler.set_epoch(epoch)
    state = order or {**batch_sampler.state_dict(), "position": 0}
    batch_sampler.load_state_dict(state)
    start = _last_start(batch_sampler, num_examples)
    batch_sampler.load_state_dict({**state, "position": start})
    return num_examples - start


def _is_ours(batch_sampler: Any) -> bool:
    return isinstance(batch_sampler, BatchSampler | ResizableBatchSampler)


def _last_start(batch_sampler: BatchSampler | ResizableBatchSampler, num_examples: int) -> int:
    if isinstance(batch_sampler, ResizableBatchSampler):
        return num_examples  # a batch may begin anywhere
    plan = batch_sampler.plan
    if plan.row_offsets is not None:  # the loader hands out rows, the plan counts the examples inside
        return 0
    return int(plan.offsets[np.searchsorted(plan.offsets, num_examples, side="right") - 1])


def _check_ranks(batch_sampler: Any, sampler: Any, rank: int, world_size: int) -> None:
    if _is_ours(batch_sampler) and max(world_size, batch_sampler.world_size) > 1:
        raise ArgumentError(
            f"regroup over ranks needs the same number of examples on every rank, which {type(batch_sampler).__name__} "
            "does not promise; use DataLoader(sampler=DistributedSampler(dataset), batch_size=32, collate_fn=list)"
        )
    for part in (batch_sampler, sampler):
        told = (rank, world_size)
        found = (getattr(part, "rank", rank), getattr(part, "num_replicas", world_size))
        if found != told:
            raise ArgumentError(
                f"the loader is sampled for rank {found[0]} of {found[1]}, regroup was told {told[0]} of {told[1]}; "
                "pass the same rank and world_size"
            )
