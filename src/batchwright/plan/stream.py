"""StreamBatcher: the same budgets and groupings over an iterable, through a bounded buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Generic, TypeVar, final

import numpy as np

from ..errors import ArgumentError, BudgetError, LengthsError
from ._arrays import as_lengths
from ._plan import Plan, plan_epoch
from ._settings import Oversize, PlanSettings, check_whole
from ._state import check_same
from .budget import Budget, check_budget
from .grouping import Grouping, WindowSort
from .shapes import SizeLadder

Example = TypeVar("Example")
STATE_VERSION = 1


@final
class StreamBatcher(Generic[Example]):
    """Batches of examples from an iterable: read a buffer, plan it, hand out its batches, read the next.

    Memory is bounded by ``buffer_size`` examples. A buffer is planned as an epoch of ``plan_batches`` is, so budgets,
    groupings and ``pad_multiple_of`` mean the same; each ends with at most one batch that is short of examples (a few
    with a size ladder). Read with workers by giving a ``DataLoader`` with ``batch_size=None`` as the source.

    ``state_dict`` holds the state of the source where the current buffer begins, and the batches handed out since. A
    source with ``state_dict`` and ``load_state_dict`` continues there; any other is read again from its start and
    skipped, which is exact when it yields the same examples again.

    Args:
        source: anything that can be iterated.
        length_of: the length of an example, or a tuple of lengths.
        budget: what a batch may cost.
        grouping: as for ``plan_batches``.
        buffer_size: examples held at the most.
        seed: with the number of the pass and of the buffer, the source of all chance.
        shuffle: and the other options: as for ``plan_batches``.

    >>> from batchwright import InOrder, MaxTokens
    >>> list(StreamBatcher(["aa", "b", "cccc"], length_of=len, budget=MaxTokens(4), grouping=InOrder()))
    [['aa', 'b'], ['cccc']]
    """

    def __init__(
        self,
        source: Iterable[Example],
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
        if not isinstance(source, Iterable):
            raise ArgumentError(f"source must be iterable, got {type(source).__name__}")
        if not callable(length_of):
            raise ArgumentError(f"length_of must be a function from an example to its length, got {length_of!r}")
        check_whole("buffer_size", buffer_size, least=1)
        self.source = source
        self.budget = check_budget(budget)
        self.buffer_size = buffer_size
        self.settings = PlanSettings(
            grouping=grouping,
            shuffle=shuffle,
            seed=seed,
            size_multiple_of=size_multiple_of,
            size_ladder=size_ladder,
            pad_multiple_of=pad_multiple_of,
            oversize=oversize,
            balance_over=1,  # a stream is not divided over ranks here
        )
        self._length_of = length_of
        self._place = _Place()

    @property
    def epoch(self) -> int:
        """Return the pass over the source that the next ``iter()`` begins or continues."""
        return self._place.epoch

    def __iter__(self) -> Iterator[list[Example] | list[list[Example]]]:
        place = self._place
        stream = iter(self.source)
        if place.source is None:
            _skip(stream, place.num_read)
        skip = place.num_given
        while True:
            state = _state_of(self.source) if skip == 0 else place.source
            examples = list(islice(stream, self.buffer_size))
            if not examples:
                break
            plan = self._plan(examples, place)
            for index in range(skip, len(plan)):
                self._place = replace(place, num_given=index + 1, source=state)
                yield _pick(examples, plan[index])
            skip = 0
            place = place.next_buffer(len(examples))
        self._place = _Place(epoch=place.epoch + 1)

    def _plan(self, examples: list[Example], place: _Place) -> Plan:
        lengths = as_lengths([self._length(example, place.num_read + i) for i, example in enumerate(examples)])
        # One number for the pass and the buffer: chance differs in every buffer of every pass.
        epoch = (place.epoch << 32) | place.buffer
        try:
            return plan_epoch(lengths, self.budget, self.settings, epoch)
        except BudgetError as error:
            raise BudgetError(f"in the buffer that begins at example {place.num_read}: {error}") from None

    def _length(self, example: Example, position: int) -> int | tuple[int, ...]:
        length = self._length_of(example)
        if np.min(length) < 1:
            raise LengthsError(f"length_of must give 1 or more, got {length!r} for example {position} of the stream")
        return length

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands; JSON values, if the state of the source is."""
        return {
            "version": STATE_VERSION,
            "budget": repr(self.budget),
            "settings": self.settings.to_state(),
            "seed": self.settings.seed,
            "buffer_size": self.buffer_size,
            **self._place.to_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            StateMismatchError: the state is of another budget, other settings or another version.
        """
        mine = self.state_dict()
        for key in ("version", "budget", "settings", "seed", "buffer_size"):
            check_same(key, state.get(key), mine[key])
        self._place = _Place(**{item.name: state[item.name] for item in fields(_Place)})
        if self._place.source is not None:
            getattr(self.source, "load_state_dict")(self._place.source)  # noqa: B009 - any source may lack it


@final
@dataclass(frozen=True)
class _Place:
    """Where a stream stands: the pass, the buffer and what was read before it, the batches given out since."""

    epoch: int = 0
    buffer: int = 0
    num_read: int = 0
    num_given: int = 0
    source: Any = None  # the state of the source where the buffer begins

    def next_buffer(self, num_examples: int) -> _Place:
        return _Place(self.epoch, self.buffer + 1, self.num_read + num_examples)

    def to_state(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def _state_of(source: object) -> Any:
    if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
        return source.state_dict()
    return None


def _skip(stream: Iterator[Any], num: int) -> None:
    skipped = sum(1 for _ in islice(stream, num))
    if skipped < num:
        raise ArgumentError(
            f"the stream ended after {skipped} examples, the state was taken after {num}; "
            "give the same source, from its start"
        )


def _pick(examples: list[Example], batch: Any) -> Any:
    if batch and isinstance(batch[0], list):
        return [[examples[index] for index in row] for row in batch]
    return [examples[index] for index in batch]
