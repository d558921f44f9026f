"""How a stream is read: a buffer is read, planned and handed out, on every rank its share; where all of this stands."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, final

from ..._lengths import as_lengths
from ...errors import ArgumentError, BudgetError, LengthsError, StateMismatchError
from .._oversize import fits
from .._ranks import shard
from .._settings import PlanSettings
from ..budget import Budget
from ..plan import Plan, plan_epoch

Example = TypeVar("Example")
Item = TypeVar("Item")

ADVICE = (
    "pass something that can be read again: a list, an object whose __iter__ begins anew, or a function that returns "
    "a new reader or generator, e.g. StreamBatcher(lambda: read(path), ...)"
)


@final
@dataclass(frozen=True)
class Place:
    """Where a stream stands: the pass, the buffer and what was read before it, the batches given out since.

    The batches are those of the plan before it is divided over ranks, so the place is the same on any number of them.
    """

    epoch: int = 0
    buffer: int = 0
    num_read: int = 0
    num_given: int = 0
    source: Any = None  # the state of the source where the buffer begins
    rules: int = 0  # of the plans in this pass; 0 stands for the newest
    balance_over: int | None = None  # of the plans in this pass; None stands for the ranks of today

    def next_buffer(self, num_examples: int) -> Place:
        """Return the place at the start of the next buffer."""
        return replace(self, buffer=self.buffer + 1, num_read=self.num_read + num_examples, num_given=0, source=None)

    def to_state(self) -> dict[str, Any]:
        """Return the place as JSON values, if the state of the source is one; the rest stands with the settings."""
        return {item.name: getattr(self, item.name) for item in fields(self)[:5]}


@final
@dataclass(frozen=True)
class Share:
    """Which part of the stream is ours.

    Attributes:
        rank: this process.
        world_size: processes.
        agree: says whether all ranks have a batch, where each reads a stream of its own; None if all read the same one.
    """

    rank: int = 0
    world_size: int = 1
    agree: Callable[[bool], bool] | None = None

    @property
    def num_in_plan(self) -> int:
        """Return over how many ranks a plan is divided."""
        return 1 if self.agree is not None else self.world_size

    def of(self, base: Plan, num_given: int) -> Generator[tuple[int, int, Any], None, None]:
        """Yield how many batches of a plan are given out after each step, the ranks that repeat, and our batch."""
        num, rank = self.num_in_plan, 0 if self.agree is not None else self.rank
        plan = shard(base, num, first_batch=num_given)
        last = len(plan) // num - 1
        for step in range(last + 1):
            given = min(num_given + (step + 1) * num, len(base))
            yield given, plan.num_repeated if step == last else 0, plan[step * num + rank]


class Step(NamedTuple):
    """A batch of this rank, and where the stream stands after it."""

    place: Place
    num_repeated: int
    batch: Any


@final
@dataclass
class Reader(Generic[Example]):
    """What a pass needs; it knows no batcher, for a cycle would keep the workers of a source alive.

    Attributes:
        place: after the batch that was given out last.
        seen: after the batch that a tracked loop received last; None if no loop is tracked.
        ahead: given out to a tracked loop, and not received yet.
        num_repeated: ranks without an example of their own in the step that was given out last.
    """

    source: Iterable[Example] | Callable[[], Iterable[Example]]
    length_of: Callable[[Example], int | tuple[int, ...]]
    budget: Budget
    settings: PlanSettings
    buffer_size: int
    share: Share = Share()
    place: Place = Place()
    seen: Place | None = None
    ahead: deque[Step] = field(default_factory=deque)
    num_repeated: int = 0
    num_opened: int = 0
    has_given: bool = False
    begins: tuple[int, str] | None = None  # the pass that was opened last and its first example, in short
    continued: int | None = None  # the pass in which the source was given a state
    is_left: bool = False  # a pass was ended before the source was
    loop: object = None  # the tracked loop under way

    @property
    def stands_at(self) -> Place:
        """Return the place that counts: what was received where the loop is tracked, else what was given out."""
        return self.place if self.seen is None else self.seen

    def move(self, place: Place) -> None:
        """Let the next pass begin at a place; a tracked loop ends."""
        self.check_unread()
        self.place, self.seen, self.loop = place, None, None
        self.ahead.clear()

    def run(self) -> Generator[Any, None, None]:
        """Run a pass, or what is left of it."""
        epoch = self.place.epoch
        for step in self._agreed(self._steps(self.place)):
            self._give(step)
            yield step.batch
            del step  # before the next buffer is read, so that one is held and not two
        self.place = Place(epoch=epoch + 1)

    def again(self, rest: Generator[Any, None, None] | None) -> Generator[Any, None, None]:
        """Give out again what a tracked loop fetched ahead and never received, then the rest of the pass."""
        steps = list(self.ahead)
        self.ahead.clear()
        return self._again(steps, self.place, rest)

    def _again(
        self, steps: list[Step], end: Place, rest: Generator[Any, None, None] | None
    ) -> Generator[Any, None, None]:
        is_over = end.epoch > steps[-1].place.epoch
        for step in steps:
            self._give(step)
            yield step.batch
        self.place = end
        if rest is None or getgeneratorstate(rest) == GEN_CLOSED:
            rest = None if is_over else self.run()  # an error ended it
        if rest is not None:
            yield from rest

    def _give(self, step: Step) -> None:
        self.place, self.num_repeated = step.place, step.num_repeated
        if self.loop is None:
            self.seen = None
        else:
            self.ahead.append(step)

    def track(self, loader: Iterable[Item]) -> Generator[Item, None, None]:
        """Iterate over a loader, counting what the loop receives."""
        loop = self.loop = object()
        self.seen = self.stands_at
        try:
            for item in loader:
                if self.loop is not loop:
                    return  # another state was loaded, or another loop began
                if not self.ahead:
                    raise ArgumentError(
                        "track() counts one item per batch of this stream, and the loader gave an item for which the "
                        "stream gave no batch; pass batch_sampler=stream to the loader, or use stream.loader(…)"
                    )
                self.seen = self.ahead.popleft().place
                yield item
            if self.loop is loop and not self.ahead:
                self.seen = None  # all was received, so both places are the same
        finally:
            if self.loop is loop:
                self.loop = None

    def _agreed(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """Yield steps as long as all ranks have one."""
        agree = self.share.agree
        if agree is None:
            yield from steps
            return
        while True:
            try:
                step = next(steps, None)
            except Exception:
                agree(False)  # the others wait for this answer
                raise
            if not agree(step is not None) or step is None:
                self.is_left = self.is_left or step is not None
                return
            yield step
            del step

    def _steps(self, place: Place) -> Generator[Step, None, None]:
        stream = self._open(place)
        while True:
            state = self._state_at(place) if place.source is None else place.source
            if state is not None:
                self.place = replace(place, source=state)  # an error in this buffer must not move the source on
            examples = list(islice(stream, min(self.buffer_size, sys.maxsize)))
            self._check_gives(examples, place)
            plan = self._plan(examples, place)
            _check_reached(0 if plan is None else len(plan), place)
            for num_given, num_repeated, batch in () if plan is None else self.share.of(plan, place.num_given):
                after = replace(place, num_given=num_given, source=state)
                yield Step(after, num_repeated, _pick(examples, batch))
            if not examples:
                return
            place = place.next_buffer(len(examples))
            del examples, plan

    def _state_at(self, place: Place) -> Any:
        # At its start, a source that is told the pass may still show where someone else had read to.
        is_told = place.num_read == 0 and hasattr(self.source, "set_epoch")
        return None if is_told else state_of(self.source)

    def check_unread(self) -> None:
        """Refuse to begin again with what goes on where it was left, such as a generator or a ``csv.DictReader``."""
        # Not asked with iter(), which may move what is read.
        goes_on = isinstance(self.source, Iterator) and not is_stateful(self.source)
        if goes_on and self.num_opened:
            raise ArgumentError(f"{kind(self.source)} can be read only once, and it has been read; {ADVICE}")

    def _check_begins_anew(self, first: Example, place: Place) -> None:
        """Refuse a pass that is opened again and begins elsewhere: a second loop over one open file does."""
        begins = (place.epoch, _fingerprint(first))
        if self.begins is not None and self.begins[0] == place.epoch and self.begins != begins:
            raise ArgumentError(
                f"the source ({kind(self.source)}) began pass {place.epoch} with another example before: it goes on "
                f"where it was left, or its order changes, so examples would be lost; {ADVICE}"
            )
        self.begins = begins

    def _check_gives(self, examples: list[Example], place: Place) -> None:
        if not examples and self.has_given and place.num_read == 0:
            raise ArgumentError(
                f"the source ({kind(self.source)}) gave examples in an earlier pass and none in pass {place.epoch}; "
                f"{ADVICE}"
            )
        self.has_given = self.has_given or bool(examples)

    def _make_source(self) -> Any:
        made = self.source if isinstance(self.source, Iterable) else self.source()
        if not isinstance(made, Iterable):
            raise ArgumentError(f"the function given as source must return something iterable, got {kind(made)}")
        return made

    def _open(self, place: Place) -> Iterator[Example]:
        self.num_opened += 1
        source = self._make_source()
        if hasattr(source, "set_epoch"):
            source.set_epoch(place.epoch)
        if place.source is not None:
            source.load_state_dict(copy.deepcopy(place.source))  # a copy, which the source may change as it reads
            self.continued, self.is_left = place.epoch, False
            return _begin(source)
        self._check_begins_at_start(source, place)
        stream: Iterator[Example] = _begin(source)
        if is_stateful(self.source):
            _skip(stream, place.num_read)
            return stream
        first = list(islice(stream, 1))
        if first:
            self._check_begins_anew(first[0], place)
        whole = _chained(first, stream)
        _skip(whole, place.num_read)
        return whole

    def _check_begins_at_start(self, source: Any, place: Place) -> None:
        """Refuse a source with a state that would go on in the middle, where its start is needed."""
        if not is_stateful(source):
            return
        is_told = hasattr(source, "set_epoch")
        if self.continued == place.epoch if is_told else self.is_left:
            raise ArgumentError(
                f"the source ({kind(source)}) stands in the middle of a pass, and pass {place.epoch} must begin at its "
                "start; give the batcher a new source"
            )

    def _plan(self, examples: list[Example], place: Place) -> Plan | None:
        if not examples:
            return None
        # One number for the pass and the buffer: chance differs in every buffer of every pass.
        epoch = (place.epoch << 32) | place.buffer
        lengths = [self.length_of(example) for example in examples]
        settings = replace(self.settings_at(place), rules=place.rules)
        try:
            array = as_lengths(lengths)
            if settings.oversize == "drop" and not fits(array, self.budget, settings).any():
                return None
            return plan_epoch(array, self.budget, settings, epoch)
        except (BudgetError, LengthsError) as error:
            raise type(error)(f"in the buffer that begins at example {place.num_read}: {error}") from None

    def settings_at(self, place: Place) -> PlanSettings:
        """Return the settings of the plans in a pass; the order of one that began on other ranks stays as it was."""
        return self.settings.resolved(place.balance_over or self.share.num_in_plan)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "place": self.stands_at, "seen": None, "ahead": deque(), "loop": None}


def kind(source: object) -> str:
    """Return what a source is, for messages."""
    return f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__


def is_stateful(source: object) -> bool:
    """Say whether a source goes on from its state with the very next example."""
    has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    return has_state and not _loses_examples(source)


def _loses_examples(source: object) -> bool:
    """Say whether a stream of ``datasets`` holds a shuffle buffer, whose examples its state leaves out."""
    parts = [getattr(source, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = getattr(part, "ex_iterable", None)
        parts += [*([] if inner is None else [inner]), *(getattr(part, "ex_iterables", None) or [])]
    return False


def state_of(source: Any) -> Any:
    """Return the state of a source, None if it has none."""
    # Copied, for it is kept while the source reads on.
    return copy.deepcopy(source.state_dict()) if is_stateful(source) else None


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


def _check_reached(num_batches: int, place: Place) -> None:
    if place.num_given > num_batches:
        raise StateMismatchError(
            f"the state was taken after {place.num_given} batches of the buffer that begins at example "
            f"{place.num_read}, which holds {num_batches}; give the same source, from its start"
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
