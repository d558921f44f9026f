"""The batches that a trainer's loader draws: micro-batches of this rank, and the place in the epoch."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_state, read_size
from ..._lengths import as_lengths, pad_up
from ..._types import IntArray
from ...plan.budget import Budget
from ...plan.sampler.planned import BatchSampler
from ...plan.sampler.resizable import ResizableBatchSampler
from ...step.splitting import split_by_budget
from .._size_log import SizeLog, read_sizes
from ._packing import Packing


class Counted(NamedTuple):
    """What some micro-batches hold together."""

    examples: int
    tokens: int
    padded_tokens: int
    micro_batches: int


class Item(NamedTuple):
    """What the loader gives out at once.

    Attributes:
        parts: the examples of each micro-batch.
        is_repeat: fewer examples than ranks were left, so this rank runs another rank's example with weight 0.
        is_measured: the micro-batches are random parts, from which gradient noise is measured.
        num_padded: the tokens of packed micro-batches, with padding; None if they are padded to their longest example.
        groups: the number of examples of every group that stays together, of an item of one micro-batch; None if
            examples stand for themselves.
    """

    parts: list[list[int]]
    is_repeat: bool
    is_measured: bool = False
    num_padded: int | None = None
    groups: list[int] | None = None


class Received(NamedTuple):
    """What the trainer has received for an update.

    Attributes:
        counted: what its micro-batches hold, without repeats.
        repeats: for each of them, whether it is a repeat that counts on another rank.
        is_measured: gradient noise is measured.
        groups: for each of them, the sizes of the groups that stay together; None if examples stand for themselves.
    """

    counted: Counted
    repeats: list[bool]
    is_measured: bool
    groups: list[list[int] | None] | None = None


class BatchSource(ABC):
    """Gives out the items of this rank, one epoch at a time, and counts what the trainer has received.

    Args:
        sampler: a ``BatchSampler`` or ``ResizableBatchSampler`` of this rank.
        lengths: of the examples; None if the parts of items are lengths themselves.
        pad_multiple_of: of the collator.

    Attributes:
        is_flat: the collator joins the examples of a micro-batch without padding.
        num_tokens: of every example, None if they are the sum of its lengths.
    """

    is_flat: bool = False
    num_tokens: IntArray | None = None

    def __init__(self, sampler: Any, lengths: npt.ArrayLike | None, pad_multiple_of: int) -> None:
        self.sampler = sampler
        self.lengths = np.empty((0, 1), dtype=np.int32) if lengths is None else as_lengths(lengths)
        self._multiple = pad_multiple_of
        self._fetched: deque[Item] = deque()
        self._received: list[Item] = []
        self._num_in_epoch = 0  # examples of the epoch that was begun last

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Yield the indices that the loader fetches per item."""

    @abstractmethod
    def begin_epoch(self, epoch: int) -> int:
        """Go to an epoch, and return an upper bound of the items that are left in it."""

    @abstractmethod
    def num_updates(self, num_epochs: float, accumulation: int) -> int:
        """Return the expected number of updates in that many epochs."""

    def name_of(self, epoch: int, item: Any) -> tuple[int, int]:
        """Return the epoch and the place of an item that was given out now, the same wherever the epoch was begun.

        Args:
            epoch: that the loop began in.
            item: as it was given out; every example comes once per epoch, so the first one tells it apart.
        """
        first = item
        while isinstance(first, list):
            first = first[0]
        return epoch, int(first)

    @property
    def epoch(self) -> int:
        """Return the running epoch."""
        return int(self.sampler.epoch)

    @property
    def position(self) -> int:
        """Return how many examples of the epoch were received."""
        return int(self.sampler.state_dict()["position"])

    @property
    def epochs_done(self) -> float:
        """Return the epochs that were received, with the fraction of the running one."""
        return self.epoch + self.position / max(1, self._num_in_epoch)

    @property
    def num_left(self) -> int:
        """Return how many examples of the epoch were not received yet."""
        return self._num_in_epoch - self.position

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a position restored within that same epoch is kept."""
        self.sampler.set_epoch(epoch)

    def track(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader of this source; count what is received, not what was fetched ahead."""
        self._fetched.clear()
        for item in self.sampler.track(loader):
            self._received.append(self._fetched.popleft())
            yield item

    def take_received(self) -> Received:
        """Return what was received since the last call."""
        items, self._received = self._received, []
        given = [item for item in items if not item.is_repeat]
        parts = [part for item in given for part in item.parts]
        tokens = sum(self._tokens_of(part) for part in parts)
        padded = tokens if self.is_flat else sum(map(self._num_padded, given))
        repeats = [item.is_repeat for item in items for _ in item.parts]
        counted = Counted(sum(map(len, parts)), tokens, padded, len(repeats))
        groups = [item.groups for item in items for _ in item.parts]
        return Received(counted, repeats, any(item.is_measured for item in items), groups)

    def _lengths_of(self, part: Any) -> IntArray:
        """Return the lengths of the examples of a micro-batch."""
        return self.lengths[part]

    def _tokens_of(self, part: Any) -> int:
        found = self._lengths_of(part) if self.num_tokens is None else self.num_tokens[part]
        return int(found.sum())

    def _num_padded(self, item: Item) -> int:
        if item.num_padded is not None:
            return item.num_padded
        found = (self._lengths_of(part) for part in item.parts)
        return sum(len(rows) * sum(self._padded_lengths(rows)) for rows in found)

    def _padded_lengths(self, lengths: IntArray) -> Sequence[int]:
        """Return what the examples of a micro-batch are padded to, by axis."""
        return pad_up(lengths.max(axis=0), self._multiple).tolist()

    def _is_repeat(self, num_repeated: int) -> bool:
        """Say whether this rank is one of the last ones, which have no example of their own."""
        return bool(self.sampler.rank >= self.sampler.world_size - num_repeated)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data as JSON values."""
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; the end of an epoch continues with the next epoch."""
        self.sampler.load_state_dict(as_state(state, of="the batches of a trainer", needs=["sampler"])["sampler"])
        self.begin_epoch(self.epoch)
        if self.num_left == 0:
            self.set_epoch(self.epoch + 1)


@final
class PlannedBatches(BatchSource):
    """One planned batch per item.

    Attributes:
        has_planned_shapes: the collator pads to the lengths of the plan.
        packing: how packed rows are collated and counted, None for batches of examples.
        planned_size: the mean examples per update, if the budget was found; None if nobody needs it.
    """

    sampler: BatchSampler
    planned_size: int | None = None
    has_planned_shapes = False
    packing: Packing | None = None

    def _padded_lengths(self, lengths: IntArray) -> Sequence[int]:
        return self.sampler.pad_to(lengths) if self.has_planned_shapes else super()._padded_lengths(lengths)

    def __iter__(self) -> Iterator[Any]:
        plan = self.sampler.plan
        last = len(plan) // self.sampler.world_size - 1
        for step, batch in enumerate(self.sampler):
            is_repeat = step == last and self._is_repeat(plan.num_repeated_batches)
            if self.packing is None:
                examples: Any = batch  # these are no rows
                self._fetched.append(Item([examples], is_repeat, groups=self._groups_of(examples)))
                yield batch
                continue
            rows: Any = batch
            examples = [index for row in rows for index in row]
            num_padded = self.packing.num_padded(rows, self.lengths)
            self._fetched.append(Item([examples], is_repeat, num_padded=num_padded, groups=self._groups_of(examples)))
            yield rows if self.packing.takes_rows else examples

    def _groups_of(self, batch: Any) -> list[int] | None:
        """Return how many examples of a batch belong to each group, None without groups.

        Members stand next to each other; where packed rows part them, all of the batch is one group.
        """
        groups = self.sampler.settings.groups
        if groups is None:
            return None
        ids = groups.ids[batch].tolist()
        sizes = [len(list(same)) for _, same in groupby(ids)]
        return sizes if len(sizes) == len(set(ids)) else [len(ids)]

    def begin_epoch(self, epoch: int) -> int:
        """Go to an epoch, and return how many items are left in it."""
        self.set_epoch(epoch)
        plan = self.sampler.plan
        self._num_in_epoch = self.position + len(plan.indices) - plan.num_repeated
        return len(plan) // self.sampler.world_size

    def num_updates(self, num_epochs: float, accumulation: int) -> int:
        """Return the number of updates in that many epochs; each epoch is planned for this."""
        sampler, total = self._from_the_beginning(), 0
        for epoch in range(math.ceil(num_epochs)):
            sampler.set_epoch(epoch)
            updates = -(-len(sampler) // accumulation)
            total += math.ceil(min(1.0, num_epochs - epoch) * updates)
        return total

    def mean_size(self, accumulation: int) -> int:
        """Return the examples per update over all ranks, the mean of the first epoch. Call it before a loop begins."""
        sampler = self._from_the_beginning()
        num_updates = -(-len(sampler) // accumulation)
        return max(1, round((len(sampler.plan.indices) - sampler.plan.num_repeated) / max(1, num_updates)))

    def _from_the_beginning(self) -> BatchSampler:
        sampler = copy.copy(self.sampler)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "position": 0})
        return sampler


@final
class ResizableBatches(BatchSource):
    """Per item as many examples as a controller wants, cut into micro-batches under a budget.

    Args:
        sampler: draws for this rank.
        lengths: of the examples.
        pad_multiple_of: of the collator.
        budget: of a micro-batch.
        noise_every: every how many updates the micro-batches are random parts, at least two over all ranks, for
            gradient noise; 0 for never.
        noise_first: of so many updates at the beginning of training every second one is measured.
        curriculum: of the sampler, which chooses the examples of an epoch; None takes all of them.

    Attributes:
        num_updates_before: updates of the training that came before the next loop.
    """

    sampler: ResizableBatchSampler

    def __init__(
        self,
        sampler: ResizableBatchSampler,
        lengths: npt.ArrayLike,
        pad_multiple_of: int,
        *,
        budget: Budget,
        noise_every: int,
        noise_first: int = 0,
        curriculum: Any = None,
    ) -> None:
        super().__init__(sampler, lengths, pad_multiple_of)
        self._padded = pad_up(self.lengths, pad_multiple_of)
        self._budget = budget
        self._noise_every = noise_every
        self._noise_first = noise_first
        self._curriculum = curriculum
        self._nums: dict[int, int] = {}  # examples by epoch
        self._controller = sampler.controller
        self._sizes = SizeLog(self._controller)
        self.sampler.controller = self._sizes
        self._replay: list[int] = []  # sizes of the batches that a saved run had formed ahead
        self._num_received = 0
        self.num_updates_before = 0

    def __iter__(self) -> Iterator[Any]:
        for number, share in enumerate(self.sampler, start=self.num_updates_before):
            is_measured = self._is_measured(number)
            parts = self._cut(share, is_random=is_measured)
            # Only the last batch of an epoch can have fewer examples than ranks.
            self._fetched.append(Item(parts, self._is_repeat(self.sampler.num_repeated), is_measured))
            yield parts

    def _is_measured(self, number: int) -> bool:
        """Say whether the noise of an update is measured; by its number, so that ranks and resumed runs agree."""
        every = min(2, self._noise_every) if number < self._noise_first else self._noise_every
        return every > 0 and number % every == 0

    def _cut(self, share: list[int], *, is_random: bool) -> list[list[int]]:
        order = None
        if is_random:
            # Seeded by the batch itself, so that a resumed run draws the same order.
            order = np.random.default_rng([self.epoch, len(share), *share[:4]]).permutation(len(share))
        least = 2 if is_random and self.sampler.world_size == 1 else 1
        places = split_by_budget(self._padded[share], self._budget, order=order, least_parts=least)
        return [[share[place] for place in part] for part in places]

    def begin_epoch(self, epoch: int) -> int:
        """Go to an epoch, and return how many items are left in it if the size falls to its minimum."""
        self.set_epoch(epoch)
        self._num_in_epoch = self._num_in(self.epoch)
        least = max(getattr(self._controller, "min_size", 1), self.sampler.world_size)
        return -(-self.num_left // least) + len(self._replay)

    def num_updates(self, num_epochs: float, accumulation: int = 1, *, size: int | None = None) -> int:
        """Return the number of updates in that many epochs if the size stays as it is, or is a given one."""
        size, shares = read_size(self._controller) if size is None else size, _shares_of(0, num_epochs)
        return sum(math.ceil(share * -(-self._num_in(epoch) // size)) for epoch, share in shares)

    def num_updates_done(self, size: int) -> int:
        """Return how many whole updates of a size the examples received so far would have been."""
        shares = _shares_of(0, self.epochs_done)
        return math.floor(sum(share * -(-self._num_in(epoch) // size) for epoch, share in shares) + 1e-6)

    def num_examples_left(self, num_epochs: float) -> int:
        """Return how many examples are left until that many epochs are done."""
        return round(sum(share * self._num_in(epoch) for epoch, share in _shares_of(self.epochs_done, num_epochs)))

    def _num_in(self, epoch: int) -> int:
        """Return how many examples an epoch covers."""
        if self._curriculum is None:
            return len(self.lengths)
        if epoch not in self._nums:
            self._nums[epoch] = len(self._curriculum.prefix(epoch))
        return self._nums[epoch]

    def track(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader of this source; the first batches get the sizes of a saved run."""
        self._sizes.begin(self._replay)
        self._replay, self._num_received = [], 0
        for item in super().track(loader):
            self._num_received += 1
            self.num_updates_before += 1
            yield item

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, and the sizes of the batches formed ahead."""
        return {**super().state_dict(), "sizes": [*self._sizes.after(self._num_received), *self._replay]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken."""
        sizes = read_sizes(as_state(state, of="the batches of a trainer"))
        super().load_state_dict(state)
        self._replay = sizes


def _shares_of(start: float, end: float) -> list[tuple[int, float]]:
    """Return the epochs from one place to another, and which share of each lies between the two.

    >>> _shares_of(0.75, 2.5)
    [(0, 0.25), (1, 1.0), (2, 0.5)]
    """
    epochs = range(math.floor(start), math.ceil(end))
    return [(epoch, min(1.0, end - epoch) - max(0.0, start - epoch)) for epoch in epochs]
