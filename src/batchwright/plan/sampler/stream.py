"""StreamBatcher: the same budgets and groupings over an iterable, through a bounded buffer."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice
from typing import Any, Generic, TypeVar, final

from ..._checks import as_state, as_whole, check_same, read_whole
from ..._lengths import as_lengths
from ...errors import ArgumentError, BudgetError, LengthsError, StateMismatchError
from .._cost import as_saved
from .._oversize import fits
from .._settings import Oversize, PlanSettings
from ..budget import Budget, check_budget
from ..grouping.base import Grouping, SizeLadder
from ..grouping.sorting import WindowSort
from ..plan import Batch, Plan, plan_epoch

Example = TypeVar("Example")


@final
class StreamBatcher(Generic[Example]):
    """Batches of examples from an iterable: read a buffer, plan it, hand out its batches, read the next.

    Memory is bounded by ``buffer_size`` examples. A buffer is planned as an epoch of ``plan_batches`` is, so budgets,
    groupings and ``pad_multiple_of`` mean the same; each ends with at most one batch that has too few examples (a few
    with a size ladder or buckets on several axes), and ``Buckets`` counts the shapes of one buffer. Read with workers
    by giving a ``DataLoader`` with ``batch_size=None`` as the source. ``DataLoader(stream, batch_size=None)`` hands the
    batches on, without workers of its own: each of those would read the whole source. Import torch before the batcher
    is made, for that.

    One pass is under way at a time, as with a file: after a ``break``, ``iter()`` goes on where the loop was left;
    after the end it begins the next pass.

    ``state_dict`` holds the state of the source where the current buffer begins, and the batches handed out since. A
    source with ``state_dict`` and ``load_state_dict`` continues there; any other is read again from its start and
    skipped, which is exact when it yields the same examples again. A source with ``set_epoch`` is told the pass.

    Args:
        source: anything that can be iterated, or a function that returns it anew for every pass. What is its own
            iterator, such as a generator, a file or a ``csv.DictReader``, can be read only once, and a second pass
            over it is refused, unless it has ``state_dict`` and ``load_state_dict``. A source whose pass is read
            again, to go back to a state, must begin it with the same example.
        length_of: the length of an example, or a tuple of lengths.
        budget: what a batch may cost.
        grouping: as for ``plan_batches``.
        buffer_size: the largest number of examples held.
        seed: decides all random choices, together with the number of the pass and of the buffer.
        shuffle: and the other options: as for ``plan_batches``.

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
    ) -> None:
        self.settings = PlanSettings.of(locals(), balance_over=1)  # a stream is not divided over ranks here
        if not isinstance(source, Iterable) and (not callable(source) or isinstance(source, type)):
            raise ArgumentError(
                f"source must be iterable, or a function that returns something iterable, got {_kind(source)}"
            )
        if not callable(length_of):
            raise ArgumentError(f"length_of must be a function from an example to its length, got {length_of!r}")
        buffer_size = as_whole("buffer_size", buffer_size, least=1)
        if oversize == "truncate":
            raise ArgumentError(
                'a stream cannot truncate: no plan outlives its buffer to say how far; cut in the source or pass "drop"'
            )
        self.source = source
        self.budget = check_budget(budget)
        self.buffer_size = buffer_size
        self._reader = _Reader(source, length_of, self.budget, self.settings, buffer_size)
        self._running: Generator[Any, None, None] | None = None
        _register_with_torch()

    @property
    def epoch(self) -> int:
        """Return the pass over the source that the next ``iter()`` begins or continues."""
        return self._reader.place.epoch

    def __iter__(self) -> Iterator[list[Example] | list[list[Example]]]:
        # A source that can be read only once could not begin again, and a long one should not.
        if self._running is None or getgeneratorstate(self._running) == GEN_CLOSED:
            _check_no_worker(self)
            self._reader.check_unread()
            self._running = self._reader.run()
        return self._running

    def __len__(self) -> int:
        raise TypeError(
            "the number of batches of a stream is not known before it is read; for DataLoader(stream, batch_size=None) "
            "import torch before the StreamBatcher is made"
        )

    def __bool__(self) -> bool:
        return True  # asked of len() otherwise, which raises

    def state_dict(self) -> dict[str, Any]:
        """Return where the pass under way stands; JSON values, if the state of the source is."""
        return {
            "version": self._reader.place.rules or self.settings.rules,
            "budget": self.budget.to_state(),
            "settings": self.settings.to_state(),
            "seed": self.settings.seed,
            "buffer_size": self.buffer_size,
            **self._reader.place.to_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            StateMismatchError: the state is of another budget, other settings or another version; nothing changes.
        """
        state = as_state(state, of="StreamBatcher")
        rules = self.settings.read_rules(state)  # a pass that began under earlier rules ends under them
        mine = {**self.state_dict(), "version": rules}
        for key in ("version", "budget", "settings", "seed", "buffer_size"):
            check_same(key, state.get(key), as_saved(mine[key], state.get(key)))
        counts = {name: read_whole(state, name) for name in ("epoch", "buffer", "num_read", "num_given")}
        source = state.get("source")
        if source is not None and not _is_stateful(self.source):
            raise StateMismatchError(
                f"the state holds the state of a source, {type(self.source).__name__} has no load_state_dict; "
                "give the same source"
            )
        self._reader.check_unread()
        if self._running is not None:
            self._running.close()  # a loop over it ends
        self._reader.place = _Place(**counts, source=source, rules=rules)

    def __repr__(self) -> str:
        parts = (_kind(self.source), f"{self.budget}", f"{self.settings.grouping}", f"buffer of {self.buffer_size:,}")
        return f"StreamBatcher({', '.join(parts)}, epoch {self.epoch})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": None}


@final
@dataclass(frozen=True)
class _Place:
    """Where a stream stands: the pass, the buffer and what was read before it, the batches given out since."""

    epoch: int = 0
    buffer: int = 0
    num_read: int = 0
    num_given: int = 0
    source: Any = None  # the state of the source where the buffer begins
    rules: int = 0  # of the plans in this pass; 0 stands for the newest

    def next_buffer(self, num_examples: int) -> _Place:
        return _Place(self.epoch, self.buffer + 1, self.num_read + num_examples, rules=self.rules)

    def to_state(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "rules"}


@final
@dataclass
class _Reader(Generic[Example]):
    """What a pass needs; it knows no batcher, for a cycle would keep the workers of a source alive."""

    source: Iterable[Example] | Callable[[], Iterable[Example]]
    length_of: Callable[[Example], int | tuple[int, ...]]
    budget: Budget
    settings: PlanSettings
    buffer_size: int
    place: _Place = _Place()
    num_opened: int = 0
    has_given: bool = False
    begins: tuple[int, str] | None = None  # the pass that was opened last and its first example, in short

    def run(self) -> Generator[Any, None, None]:
        place = self.place
        stream = self._open(place)
        skip = place.num_given
        while True:
            state = _state_of(self.source) if place.source is None else place.source
            if state is not None:
                self.place = replace(place, source=state)  # an error in this buffer must not move the source on
            examples = list(islice(stream, min(self.buffer_size, sys.maxsize)))
            self._check_gives(examples, place)
            batches = self._plan(examples, place)
            _check_reached(len(batches), skip, place)
            for index in range(skip, len(batches)):
                self.place = replace(place, num_given=index + 1, source=state)
                yield _pick(examples, batches[index])
            if not examples:
                break
            skip, place = 0, place.next_buffer(len(examples))
            del examples  # before the next buffer is read, so that one is held and not two
        self.place = _Place(epoch=place.epoch + 1)

    def check_unread(self) -> None:
        """Refuse to begin again with what goes on where it was left, such as a generator or a ``csv.DictReader``."""
        # Not asked with iter(), which may move what is read.
        goes_on = isinstance(self.source, Iterator) and not _is_stateful(self.source)
        if goes_on and self.num_opened:
            raise ArgumentError(f"{_kind(self.source)} can be read only once, and it was read; {_ADVICE}")

    def _check_begins_anew(self, first: Example, place: _Place) -> None:
        """Refuse a pass that is opened again and begins elsewhere: a second loop over one open file does."""
        begins = (place.epoch, _fingerprint(first))
        if self.begins is not None and self.begins[0] == place.epoch and self.begins != begins:
            raise ArgumentError(
                f"the source ({_kind(self.source)}) began pass {place.epoch} with another example before, so examples "
                f"would be lost; {_ADVICE}"
            )
        self.begins = begins

    def _check_gives(self, examples: list[Example], place: _Place) -> None:
        if not examples and self.has_given and place.num_read == 0:
            raise ArgumentError(
                f"the source ({_kind(self.source)}) gave examples in an earlier pass and none in pass {place.epoch}; "
                f"{_ADVICE}"
            )
        self.has_given = self.has_given or bool(examples)

    def _make_source(self) -> Any:
        made = self.source if isinstance(self.source, Iterable) else self.source()
        if not isinstance(made, Iterable):
            raise ArgumentError(f"the function given as source must return something iterable, got {_kind(made)}")
        return made

    def _open(self, place: _Place) -> Iterator[Example]:
        self.num_opened += 1
        source = self._make_source()
        if hasattr(source, "set_epoch"):
            source.set_epoch(place.epoch)
        if place.source is not None:
            source.load_state_dict(copy.deepcopy(place.source))  # a copy, which the source may change as it reads
            return _begin(source)
        stream: Iterator[Example] = _begin(source)
        if _is_stateful(self.source):
            _skip(stream, place.num_read)
            return stream
        first = list(islice(stream, 1))
        if first:
            self._check_begins_anew(first[0], place)
        whole = _chained(first, stream)
        _skip(whole, place.num_read)
        return whole

    def _plan(self, examples: list[Example], place: _Place) -> Plan | list[Batch]:
        if not examples:
            return []
        # One number for the pass and the buffer: chance differs in every buffer of every pass.
        epoch = (place.epoch << 32) | place.buffer
        lengths = [self.length_of(example) for example in examples]
        try:
            array = as_lengths(lengths)
            if self.settings.oversize == "drop" and not fits(array, self.budget, self.settings).any():
                return []
            return plan_epoch(array, self.budget, replace(self.settings, rules=place.rules), epoch)
        except (BudgetError, LengthsError) as error:
            raise type(error)(f"in the buffer that begins at example {place.num_read}: {error}") from None


_ADVICE = (
    "pass something that can be read again: a list, an object whose __iter__ begins anew, or a function that returns "
    "a new reader or generator, e.g. StreamBatcher(lambda: read(path), ...)"
)


def _kind(source: object) -> str:
    return f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__


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
            "workers to the source, StreamBatcher(DataLoader(source, batch_size=None, num_workers=…), …)"
        )


def _begin(source: Iterable[Example]) -> Iterator[Example]:
    # A generator around it: islice asks for iter() again, with which some iterators begin anew.
    return (example for example in source)


def _chained(first: list[Example], rest: Iterator[Example]) -> Generator[Example, None, None]:
    while first:  # handed on, and not held here
        yield first.pop()
    yield from rest


def _fingerprint(example: Any) -> str:
    """Return a text that differs between examples of plain values, and is the same for one that is read again.

    >>> _fingerprint({"text": "a b", "ids": [1, 2]}) == _fingerprint({"text": "a b", "ids": [1, 3]})
    False
    """
    return hashlib.blake2b(_shown(example).encode("utf-8", "backslashreplace")).hexdigest()


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if hasattr(value, "tolist"):  # arrays and tensors
        return repr(value.tolist())
    # What is of another type may be random, or show its address.
    return repr(value) if isinstance(value, str | bytes | int | float | None) else type(value).__name__


def _is_stateful(source: object) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _state_of(source: Any) -> Any:
    # Copied, for it is kept while the source reads on.
    return copy.deepcopy(source.state_dict()) if _is_stateful(source) else None


def _check_reached(num_batches: int, num_given: int, place: _Place) -> None:
    if num_given > num_batches:
        raise StateMismatchError(
            f"the state was taken after {num_given} batches of the buffer that begins at example {place.num_read}, "
            f"which holds {num_batches}; give the same source, from its start"
        )


def _skip(stream: Iterator[Any], num: int) -> None:
    skipped = sum(1 for _ in islice(stream, min(num, sys.maxsize)))
    if skipped < num:
        raise StateMismatchError(
            f"the stream ended after {skipped} examples, the state was taken after {num}; "
            "give the same source, from its start"
        )


def _pick(examples: list[Example], batch: Any) -> Any:
    if batch and isinstance(batch[0], list):
        return [[examples[index] for index in row] for row in batch]
    return [examples[index] for index in batch]
