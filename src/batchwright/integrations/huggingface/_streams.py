"""Streams as training data: a ``StreamBatcher`` under the loader of a trainer, and ranks that read alike or apart."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ..._checks import as_state, read_whole
from ..._lengths import as_lengths
from ..._types import IntArray
from ...errors import ArgumentError, StateMismatchError
from ...plan.budget import Budget
from ...plan.grouping.sorting import WindowSort
from ...plan.sampler.stream import StreamBatcher
from .._devices import Devices
from .._failures import raise_together
from .._ranked import Meeting, is_stream
from ._batches import BatchSource, Item
from ._lengths import StreamLengths, has_decoder
from ._settings import Settings

# Options of a plan that need the whole epoch.
_OF_EPOCHS = ("keep_first", "balance_over", "cost", "groups")
# What a rank tells the others instead of what it has read.
_FAILED, _ENDED = -2, -1
_DIFFERENT = (
    "ranks read different examples, so some would be lost; give every rank the same stream, or pass "
    "plan_options={'sharded': True} if it was split beforehand, as split_by_node does"
)
# Examples of a stream that is read twice: one alone may look like a later one.
_COMPARED = 4
_INSTEAD = "give a budget such as MaxTokens(8192)"


def check_stream(settings: Settings, trainer: Any) -> None:
    """Refuse what a stream cannot do; data with numbers passes."""
    args = trainer.args
    if not is_stream(trainer.train_dataset):
        return
    reasons = {
        "a controller draws examples by their number, and a stream has none; leave the controller out, or give a data "
        "set with a length": settings.controller is not None,
        "a stream needs max_steps: how many updates a pass has is known only at its end": args.max_steps <= 0,
        "lengths= gives a row per example of a data set; the lengths of a stream are measured as it is read, from "
        f"input_ids, or taken from the column {args.length_column_name!r}": settings.lengths is not None,
        "dataloader_drop_last leaves out the last batch of an epoch, which a stream does not know; leave it out": (
            bool(args.dataloader_drop_last)
        ),
        "gradient_accumulation_steps above 1 on a stream needs the whole model on every rank; leave it at 1": (
            args.gradient_accumulation_steps > 1 and Devices.of(trainer).is_divided
        ),
        "Packed needs a data set with a length in an adaptive trainer; use WindowSort or Buckets for a stream": (
            settings.grouping is not None and settings.grouping.row_capacity is not None
        ),
    }
    for reason in [reason for reason, holds in reasons.items() if holds]:
        raise ArgumentError(reason)
    for name in [name for name in _OF_EPOCHS if name in settings.plan_options]:
        raise ArgumentError(f"plan_options={{{name!r}: …}} needs the whole epoch, a stream is planned buffer by buffer")


@contextmanager
def accumulating(trainer: Any, num: int | None) -> Iterator[None]:
    """Let a trainer accumulate over so many items inside the context; None changes nothing."""
    if num is None:
        yield
        return
    args, accelerator = trainer.args, trainer.accelerator
    before = args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps
    args.gradient_accumulation_steps = num
    accelerator.gradient_accumulation_steps = min(num, before[1])
    try:
        yield
    finally:
        args.gradient_accumulation_steps, accelerator.gradient_accumulation_steps = before


def make_batches(
    dataset: Any, settings: Settings, *, devices: Devices, model: Any, pad_multiple_of: int, options: Mapping[str, Any]
) -> StreamBatches:
    """Return the batches of a stream.

    Args:
        dataset: the stream.
        settings: what the user asked for.
        devices: the ranks that share it.
        model: tells whether labels have lengths of their own.
        pad_multiple_of: of the collator.
        options: of the batcher: seed, order, rank and world size.
    """
    args = devices.args
    lengths = _lengths_for(args, model)
    given = {"pad_multiple_of": pad_multiple_of, **settings.plan_options}
    given["sharded"] = _is_sharded(dataset, given.get("sharded"), devices)
    meeting = Meeting(args.device, args.world_size)
    assert isinstance(settings.budget, Budget)
    stream: StreamBatcher[Any] = StreamBatcher(
        _own_copy(dataset),
        length_of=lengths,
        budget=settings.budget,
        grouping=settings.grouping or WindowSort(),
        agree=meeting.all_have if given["sharded"] else None,
        **options,
        **given,
    )
    return StreamBatches(
        stream,
        lengths,
        given["pad_multiple_of"],
        meeting=meeting,
        is_sharded=given["sharded"],
        accumulation=args.gradient_accumulation_steps,
        max_steps=args.max_steps,
    )


def first_buffer(dataset: Any, settings: Settings, devices: Devices, model: Any) -> tuple[list[Any], IntArray]:
    """Return the first examples of a stream and their lengths, the same on all ranks; the stream stays unread.

    Args:
        dataset: the stream.
        settings: what the user asked for.
        devices: the ranks; a collective.
        model: tells whether labels have lengths of their own.
    """
    args, options = devices.args, settings.plan_options
    meeting, lengths = Meeting(args.device, args.world_size), _lengths_for(args, model)
    examples: list[Any] = []
    rows: list[tuple[int, ...]] = []
    failure: Exception | None = None
    try:
        if _is_sharded(dataset, options.get("sharded"), devices) and devices.world_size > 1:
            raise ArgumentError(f"ranks that read streams of their own would measure different batches; {_INSTEAD}")
        examples = list(islice(_apart(dataset), options.get("buffer_size", 20_000)))
        rows = [lengths(example) for example in examples]
        _check_unread(dataset, examples)
    except Exception as error:
        failure = error
    raise_together(failure, args.device, world_size=args.world_size)
    least, most = meeting.bounds(lengths.digest)
    if least != most:
        raise ArgumentError(_DIFFERENT)
    return examples, as_lengths(rows)


def _check_unread(dataset: Any, examples: list[Any]) -> None:
    """Refuse a stream that was moved by looking at it, such as one around a generator: what was read would be lost."""
    again = list(islice(_apart(dataset), _COMPARED))
    if not examples or not _is_same(examples[:_COMPARED], again):
        raise ArgumentError(
            "budget='auto' reads the first examples of the stream twice, and it does not begin anew with them; "
            f"{_INSTEAD}"
        )


def _is_same(one: Any, other: Any) -> bool:
    """Say whether two examples are equal; of what is neither a number, a text nor a list of these, only its type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return not isinstance(one, str | bytes | int | float) or one == other or one != one


def _apart(dataset: Any) -> Iterable[Any]:
    return () if isinstance(dataset, Iterator) else _own_copy(dataset, always=True)


def _lengths_for(args: Any, model: Any) -> StreamLengths:
    return StreamLengths(args.length_column_name, has_decoder=has_decoder(model))


def _own_copy(dataset: Any, *, always: bool = False) -> Any:
    """Return a stream that a state can be loaded into without a trace in the user's own."""
    has_place = all(hasattr(dataset, name) for name in ("set_epoch", "state_dict", "load_state_dict"))
    if not (has_place or always) or not hasattr(dataset, "__dict__"):
        return dataset
    own = object.__new__(type(dataset))  # copy.copy lets streams of datasets share their attributes
    own.__dict__.update(vars(dataset))
    return own


def _is_sharded(dataset: Any, wanted: bool | None, devices: Devices) -> bool:
    """Say whether ranks read streams of their own: as asked, or as ``split_dataset_by_node`` did."""
    split = getattr(dataset, "_distributed", None)  # of a datasets.IterableDataset
    if split is None:
        return False if wanted is None else wanted
    found, mine = (split.rank, split.world_size), (devices.rank, devices.world_size)
    if wanted is False or found != mine:
        raise ArgumentError(
            f"the stream was split for rank {found[0]} of {found[1]}, this process is rank {mine[0]} of {mine[1]}; "
            "split_dataset_by_node needs these, and plan_options must not say sharded=False"
        )
    return True


class _Update(NamedTuple):
    parts: list[list[Any]]  # the examples of each micro-batch
    items: list[Item]
    state: dict[str, Any]  # of the stream, after them


@final
class StreamBatches(BatchSource):
    """Per item the planned batches of an update; what was received counts, whatever workers have fetched ahead.

    Args:
        sampler: of this rank.
        lengths: measures its examples.
        pad_multiple_of: of the collator.
        meeting: of the ranks.
        is_sharded: every rank reads a stream of its own.
        accumulation: planned batches of an update.
        max_steps: updates of the training.

    Attributes:
        has_ended: a loop came to the end of its pass.
        accumulation: planned batches of an update.
    """

    sampler: StreamBatcher[Any]

    def __init__(
        self,
        sampler: StreamBatcher[Any],
        lengths: StreamLengths,
        pad_multiple_of: int,
        *,
        meeting: Meeting,
        is_sharded: bool,
        accumulation: int,
        max_steps: int,
    ) -> None:
        super().__init__(sampler, None, pad_multiple_of)
        self.has_ended = False
        self.accumulation = accumulation
        self._measured = lengths
        self._meeting = meeting
        self._is_sharded = is_sharded and sampler.world_size > 1
        self._max_steps = max_steps
        self._states: deque[dict[str, Any]] = deque()
        self._state = sampler.state_dict()  # after what was received
        self._num_items = 0  # of the pass, that were received
        self._is_resumed = False
        self._passes_ahead = 0  # of the trainer's epoch
        self._newest = (0, 0)  # pass and number of the item that was given out last

    def _lengths_of(self, part: Any) -> IntArray:
        return np.array(part, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Return the running pass."""
        return int(self._state["epoch"])

    @property
    def epochs_done(self) -> float:
        """Return the passes that were received; a pass of unknown length counts as the whole training."""
        return self.epoch + self._num_items / self._max_steps

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a place restored within that same epoch is kept."""
        epoch += self._passes_ahead
        if epoch != self.epoch:
            self.sampler.set_epoch(epoch)
            self._state, self._num_items = self.sampler.state_dict(), 0

    def begin_epoch(self, epoch: int) -> int:
        """Go to an epoch, and return the most items that can be left in it."""
        self.set_epoch(epoch)
        self.has_ended = False
        return self._max_steps

    def num_updates(self, num_epochs: float, accumulation: int) -> int:
        """Return the number of updates of the training."""
        return self._max_steps

    def __iter__(self) -> Iterator[list[list[Any]]]:
        is_empty = True
        for number, update in enumerate(self._together(self._updates()), start=self._num_items):
            is_empty = False
            yield self._give(update, number)
        if is_empty and self._is_resumed:
            # The state was saved after the last batch of a pass, when nobody knew that it was the last.
            self._passes_ahead += 1
            for number, update in enumerate(self._together(self._updates())):
                yield self._give(update, number)
        self._is_resumed = False

    def _give(self, update: _Update, number: int) -> list[list[Any]]:
        self._fetched.extend(update.items)
        self._states.append(update.state)
        self._newest = update.state["epoch"], number
        return update.parts

    def name_of(self, epoch: int, item: Any) -> tuple[int, int]:
        """Return the pass and the number of the item that was given out last."""
        return self._newest

    def _updates(self) -> Generator[_Update, None, None]:
        """Yield the batches of every update; in the last one of a pass there may be fewer."""
        stream, parts, items = self.sampler, [], []
        for batch in stream:
            parts.append(batch)
            lengths: Any = [self._measured.of(example) for example in batch]
            items.append(Item([lengths], self._is_repeat(stream.num_repeated)))
            if len(parts) == self.accumulation:
                yield _Update(parts, items, stream.state_dict())
                parts, items = [], []
        if parts:
            yield _Update(parts, items, stream.state_dict())

    def _together(self, updates: Generator[_Update, None, None]) -> Generator[_Update, None, None]:
        """Yield updates as long as all ranks have one, and refuse ranks that read what they should not."""
        is_first = True
        while True:
            try:
                update = next(updates, None)
            except Exception:
                self._meeting.bounds(_FAILED)  # the others wait for this answer
                raise
            bounds = self._meeting.bounds(_ENDED if update is None else self._measured.digest)
            if _FAILED in bounds:
                return  # the loader of the failed rank raises, and the trainer raises it on all of them
            self._check_read(bounds, is_first=is_first)
            if update is None:
                return
            yield update
            is_first = False
            del update

    def _check_read(self, bounds: tuple[int, int], *, is_first: bool) -> None:
        is_same = bounds[0] == bounds[1]
        if not (self._is_sharded or is_same):
            raise ArgumentError(_DIFFERENT)
        if self._is_sharded and is_first and is_same and bounds[0] != _ENDED:
            raise ArgumentError(
                "every rank reads the same examples, so each would be trained on several times; split the stream "
                "before, or leave sharded=True out"
            )

    def track(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader of this source; count what is received, not what was fetched ahead."""
        self._fetched.clear()
        self._states.clear()
        for item in loader:
            self._received.extend(self._fetched.popleft() for _ in item)
            state = self._states.popleft()
            self._num_items = 1 if state["epoch"] != self.epoch else self._num_items + 1
            self._state = state
            yield item
        self._state, self._num_items = self.sampler.state_dict(), 0
        self.has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data as JSON values; with shards a collective, as every rank has its own."""
        state = {"sampler": self._state, "axes": self._measured.num_axes, "num_items": self._num_items}
        try:
            json.dumps(state)
        except TypeError as error:
            raise ArgumentError(
                f"the state of the stream ({type(self.sampler.source).__name__}) cannot be saved in a checkpoint, as "
                f"it holds more than JSON values: {error}"
            ) from None
        return {**state, "shards": self._meeting.gathered(self._state)} if self._is_sharded else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; shards on as many ranks."""
        state = as_state(state, of="the batches of a trainer", needs=["sampler", "axes", "num_items"])
        mine, world_size = state["sampler"], self.sampler.world_size
        if self._is_sharded:
            shards = state.get("shards")
            num = len(shards) if isinstance(shards, list) else 0
            if not isinstance(shards, list) or num != world_size:
                raise StateMismatchError(
                    f"the checkpoint holds the places of {num} shards of a stream, and there are {world_size} ranks; "
                    "resume on as many ranks, or set ignore_data_skip=True to begin the pass again"
                )
            mine = shards[self.sampler.rank]
        num_items, axes = read_whole(state, "num_items"), state["axes"]
        self.sampler.load_state_dict(mine)
        self._measured.num_axes = None if axes is None else read_whole(state, "axes")
        self._state, self._num_items, self._is_resumed = self.sampler.state_dict(), num_items, True
