"""StreamBatcher: the same budgets and groupings over an iterable, through a bounded buffer, on any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Generic, TypeVar, final

from ..._checks import as_flag, as_state, as_whole, check_ranks, check_same, read_whole
from ..._optional import require
from ...errors import ArgumentError, StateMismatchError
from .._cost import as_saved
from .._settings import Oversize, PlanSettings, Remainder
from ..budget import Budget, check_budget
from ..grouping.base import Grouping, SizeLadder
from ..grouping.sorting import WindowSort
from ._reading import Place, Reader, Share, is_stateful, kind

Example = TypeVar("Example")
Item = TypeVar("Item")

# These come from the stream.
_NOT_IN_LOADER = ("dataset", "batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "in_order")


@final
class StreamBatcher(Generic[Example]):
    """Batches of examples from an iterable: read a buffer, plan it, hand out its batches, read the next.

    Memory is bounded by ``buffer_size`` examples. A buffer is planned as an epoch of ``plan_batches`` is, so budgets,
    groupings and ``pad_multiple_of`` mean the same; each ends with at most one batch that has too few examples (a few
    with a size ladder or buckets on several axes), and ``Buckets`` counts the shapes of one buffer. Read with workers
    by giving a ``DataLoader`` with ``batch_size=None`` as the source, and collate with workers by ``stream.loader``.
    ``DataLoader(stream, batch_size=None)`` hands the batches on, without workers of its own: each of those would read
    the whole source. Import torch before the batcher is made, for that.

    Ranks: every rank reads the whole source, plans the same buffers and takes its share, so nothing is communicated;
    each buffer ends as an epoch of ``plan_batches`` does, with the same number of steps on every rank. Or the source is
    divided beforehand, ``sharded=True``: every rank reads and plans its own, and all of them end a pass as soon as one
    has no batch left, which ``agree`` finds out; what the others still hold of that pass is left out.

    One pass is under way at a time, as with a file: after a ``break``, ``iter()`` goes on where the loop was left;
    after the end it begins the next pass.

    ``state_dict`` holds the state of the source where the current buffer begins, and the batches handed out since. A
    source with ``state_dict`` and ``load_state_dict`` continues there; any other is read again from its start and
    skipped, which is exact when it yields the same examples again; so is a stream of ``datasets`` with a shuffle
    buffer, whose own state loses examples. A source with ``set_epoch`` is told the pass. The state holds neither rank
    nor world size, and a pass goes on exactly on another number of ranks; that of a sharded stream belongs to its rank.

    Args:
        source: anything that can be iterated, or a function that returns it anew for every pass. What is its own
            iterator, such as a generator, a file or a ``csv.DictReader``, can be read only once, and a second pass
            over it is refused, unless it has ``state_dict`` and ``load_state_dict``. A source whose pass is read
            again, to go back to a state, must begin it with the same example.
        length_of: the length of an example, or a tuple of lengths.
        budget: what a batch may cost.
        grouping: as for ``plan_batches``.
        buffer_size: the largest number of examples held; at least ``world_size``.
        seed: decides all random choices, together with the number of the pass and of the buffer.
        shuffle: and the other options: as for ``plan_batches``.
        remainder: the last batches of a buffer that fill no step: ``"spread"`` splits them over the ranks, ``"drop"``
            leaves them out.
        rank: this process, from 0.
        world_size: processes.
        sharded: the source of every rank holds other examples, as after ``split_dataset_by_node`` or
            ``split_by_node``.
        agree: for a sharded stream, a function that every rank calls with whether it has a batch, and that returns
            whether all have; called before each batch.

    >>> from batchwright import InOrder, MaxTokens
    >>> list(StreamBatcher(["aa", "b", "cccc"], length_of=len, budget=MaxTokens(4), grouping=InOrder()))
    [['aa', 'b'], ['cccc']]
    """

    def __init__(
        self,
        source: Iterable[Example] | Callable[[], Iterable[Example]],
        *,
        length_of: Callable[[Example], int | tuple[int, ...]],
        budget: Budget,
        grouping: Grouping = WindowSort(),  # noqa: B008 - frozen
        buffer_size: int = 20_000,
        seed: int = 0,
        shuffle: bool = True,
        size_multiple_of: int = 1,
        size_ladder: SizeLadder | None = None,
        pad_multiple_of: int = 1,
        oversize: Oversize = "error",
        remainder: Remainder = "spread",
        rank: int = 0,
        world_size: int = 1,
        sharded: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        settings = PlanSettings.of(locals())
        if not isinstance(source, Iterable) and (not callable(source) or isinstance(source, type)):
            raise ArgumentError(
                f"source must be iterable, or a function that returns something iterable, got {kind(source)}"
            )
        if not callable(length_of):
            raise ArgumentError(f"length_of must be a function from an example to its length, got {length_of!r}")
        buffer_size = as_whole("buffer_size", buffer_size, least=1)
        if oversize == "truncate":
            raise ArgumentError(
                'a stream cannot truncate: no plan outlives its buffer to say how far; cut in the source or pass "drop"'
            )
        share = _share_of(rank, world_size, is_sharded=as_flag("sharded", sharded), agree=agree)
        if buffer_size < share.num_in_plan:
            raise ArgumentError(
                f"buffer_size must be at least world_size, {share.num_in_plan}, so that every rank has an example of "
                f"each buffer; got {buffer_size}"
            )
        self.source = source
        self.budget = check_budget(budget)
        self.buffer_size = buffer_size
        self._reader = Reader(source, length_of, self.budget, settings, buffer_size, share)
        self._running: Generator[Any, None, None] | None = None
        _register_with_torch()

    @property
    def settings(self) -> PlanSettings:
        """Return the options of the plans in the pass under way."""
        return self._reader.settings_at(self._reader.stands_at)

    @property
    def rank(self) -> int:
        """Return whose batches these are."""
        return self._reader.share.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._reader.share.world_size

    @property
    def num_repeated(self) -> int:
        """Return how many of the last ranks repeat an example of another one in the step that was given out last."""
        return self._reader.num_repeated

    @property
    def epoch(self) -> int:
        """Return the pass over the source that the next ``iter()`` begins or continues."""
        return self._reader.stands_at.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of a pass; a place within that very pass is kept."""
        epoch = as_whole("epoch", epoch, least=0)
        if epoch != self.epoch:
            self._reader.is_left = self._reader.is_left or self._is_open
            self._move(Place(epoch=epoch))

    def __iter__(self) -> Iterator[list[Example] | list[list[Example]]]:
        # A source that can be read only once could not begin again, and a long one should not.
        if self._reader.ahead:
            self._running = self._reader.again(self._running)
        elif self._running is None or not self._is_open:
            _check_no_worker(self)
            self._reader.check_unread()
            self._running = self._reader.run()
        return self._running

    @property
    def _is_open(self) -> bool:
        return self._running is not None and getgeneratorstate(self._running) != GEN_CLOSED

    def __len__(self) -> int:
        raise TypeError(
            "the number of batches of a stream is not known before it is read; for DataLoader(stream, batch_size=None) "
            "import torch before the StreamBatcher is made"
        )

    def __bool__(self) -> bool:
        return True  # asked of len() otherwise, which raises

    def loader(
        self,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> StreamLoader:
        """Return a loader whose worker processes collate the batches, in order; ``state_dict`` counts what it gave.

        The source is read and planned in this process, and the examples of a batch are sent to a worker.

        Args:
            collate_fn: makes a batch of a list of examples; None takes torch's own.
            num_workers: processes that collate; 0 collates in this one.
            **options: further ones of ``DataLoader``, such as ``pin_memory``.
        """
        taken = [name for name in _NOT_IN_LOADER if name in options]
        if taken:
            raise ArgumentError(
                f"the batches and their order come from the stream; leave {', '.join(taken)} out of stream.loader"
            )
        data = require("torch.utils.data", extra="torch")
        num_workers = as_whole("num_workers", num_workers, least=0)
        options |= {"collate_fn": collate_fn, "num_workers": num_workers}
        return StreamLoader(self, data.DataLoader(AsGiven(), batch_sampler=self, **options))

    def track(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over a loader of this stream, counting what the loop receives instead of what was prefetched.

        The loader must hand out one item per batch, in order, as ``stream.loader`` does, which is tracked already.
        """
        if not getattr(loader, "in_order", True):
            raise ArgumentError("track() counts batches in order, the loader has in_order=False; leave it at True")
        return self._reader.track(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where the pass under way stands; JSON values, if the state of the source is."""
        place, share = self._reader.stands_at, self._reader.share
        return {
            "version": place.rules or self.settings.rules,
            "budget": self.budget.to_state(),
            "settings": self.settings.to_state(),
            "seed": self.settings.seed,
            "buffer_size": self.buffer_size,
            **place.to_state(),
            **({} if share.agree is None else {"shard": [share.rank, share.world_size]}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; a sharded stream on the same rank of as many.

        Raises:
            StateMismatchError: the state is of another budget, other settings or another version; nothing changes.
        """
        state = as_state(state, of="StreamBatcher")
        rules = self.settings.read_rules(state)  # a pass that began under earlier rules ends under them
        place = Place(balance_over=_order_of(state))  # and one that began on other ranks keeps its order
        settings = self._reader.settings_at(place).to_state()
        mine = {"shard": None, **self.state_dict(), "version": rules, "settings": settings}
        for key in ("version", "budget", "settings", "seed", "buffer_size", "shard"):
            check_same(key, state.get(key), as_saved(mine[key], state.get(key)))
        counts = {name: read_whole(state, name) for name in ("epoch", "buffer", "num_read", "num_given")}
        source = state.get("source")
        if source is not None and not is_stateful(self.source):
            raise StateMismatchError(
                f"the state holds the state of a source, {type(self.source).__name__} has no load_state_dict; "
                "give the same source"
            )
        self._move(Place(**counts, source=source, rules=rules, balance_over=place.balance_over))

    def _move(self, place: Place) -> None:
        self._reader.move(place)
        if self._running is not None:
            self._running.close()  # a loop over it ends

    def __repr__(self) -> str:
        parts = [kind(self.source), f"{self.budget}", f"{self.settings.grouping}", f"buffer of {self.buffer_size:,}"]
        parts.append(f"epoch {self.epoch}")
        if self.world_size > 1:
            parts.append(f"rank {self.rank} of {self.world_size}")
        return f"StreamBatcher({', '.join(parts)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": None}


@final
class AsGiven:
    """A data set whose numbers are the examples themselves, so that the workers of a loader only collate.

    >>> AsGiven()["an example"]
    'an example'
    """

    def __getitem__(self, example: Example) -> Example:
        return example

    def __getitems__(self, examples: list[Example]) -> list[Example]:
        """Return the examples of a batch."""
        return examples


@final
class StreamLoader:
    """Collated batches of a stream; what ``StreamBatcher.loader`` makes.

    Attributes:
        stream: has the state, which counts the batches that a loop over this loader received.
    """

    def __init__(self, stream: StreamBatcher[Any], loader: Any) -> None:
        self.stream = stream
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self.stream.track(self._loader)


def _share_of(rank: Any, world_size: Any, *, is_sharded: bool, agree: Any) -> Share:
    rank, world_size = check_ranks(rank, world_size)
    if agree is not None and not (callable(agree) and is_sharded):
        raise ArgumentError(
            f"agree must be a function that says whether all ranks have a batch, for sharded=True; got agree={agree!r} "
            f"and sharded={is_sharded}"
        )
    if is_sharded and world_size > 1 and agree is None:
        raise ArgumentError(
            f"sharded=True on {world_size} ranks needs agree, a function that says whether all ranks have a batch, so "
            "that all end a pass together; give it, or let every rank read the whole stream with sharded=False"
        )
    return Share(rank, world_size, agree if world_size > 1 else None)


def _order_of(state: Mapping[str, Any]) -> int | None:
    saved = state.get("settings")
    return max(1, read_whole(saved, "balance_over")) if isinstance(saved, Mapping) else None


def _register_with_torch() -> None:
    """Let a ``DataLoader`` take a batcher as the iterable data set that it is, where torch is loaded."""
    data_set = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
    if data_set is not None:
        data_set.register(StreamBatcher)


def _check_no_worker(batcher: StreamBatcher[Any]) -> None:
    """Refuse a ``DataLoader`` with workers over a batcher: each would read all, and the state would stay behind."""
    worker_info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    info = None if worker_info is None else worker_info()
    if info is not None and info.dataset is batcher:
        raise ArgumentError(
            f"DataLoader(stream, num_workers={info.num_workers}) would read the whole source in every worker; give the "
            "workers to the source, StreamBatcher(DataLoader(source, batch_size=None, num_workers=…), …), or let them "
            "collate, stream.loader(num_workers=…)"
        )
