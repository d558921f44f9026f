"""What the loader of an adaptive trainer draws from: micro-batches of this rank, and where its epochs stand."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from .._lengths import as_lengths, pad_up
from ..errors import StateMismatchError
from ..plan.budget import Budget
from ..plan.sampler.planned import BatchSampler
from ..plan.sampler.resizable import ResizableBatchSampler
from ..step.splitting import LogicalBatch, split
from ._size_log import SizeLog

# The examples of the micro-batches that one item of the loader holds.
Parts: TypeAlias = "list[list[int]]"


class Counted(NamedTuple):
    """What micro-batches hold: examples, tokens, tokens as padded, and how many they are."""

    examples: int
    tokens: int
    padded: int
    parts: int


class Item(NamedTuple):
    """What the loader gives out at once.

    Attributes:
        parts: the examples of its micro-batches.
        is_repeat: fewer examples than ranks were left, and this rank runs that of another; it counts for nothing.
    """

    parts: Parts
    is_repeat: bool


class Feed(ABC):
    """Gives out items of this rank, an epoch at a time, and counts what the trainer has received.

    Args:
        sampler: a ``BatchSampler`` or ``ResizableBatchSampler`` of this rank.
        lengths: of the examples.
        pad_multiple_of: of the collator.
    """

    def __init__(self, sampler: Any, lengths: npt.ArrayLike, pad_multiple_of: int) -> None:
        self.sampler = sampler
        self.lengths = as_lengths(lengths)
        self._multiple = pad_multiple_of
        self._given: deque[Item] = deque()
        self._received: list[Item] = []
        self._total = 0  # examples of the epoch that was begun last

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Give out what the loader fetches."""

    @abstractmethod
    def begin(self, epoch: int) -> int:
        """Go to an epoch, and return the most items that are left of it."""

    @abstractmethod
    def num_updates(self, num_epochs: float, accumulation: int) -> int:
        """Return how many updates so many epochs have, as far as that is known."""

    @property
    def epoch(self) -> int:
        """Return the epoch that runs."""
        return int(self.sampler.epoch)

    @property
    def position(self) -> int:
        """Return the examples of the epoch that were received."""
        return int(self.sampler.state_dict()["position"])

    @property
    def progress(self) -> float:
        """Return the epochs that were received, with the part of the one that runs."""
        return self.epoch + self.position / max(1, self._total)

    @property
    def num_left(self) -> int:
        """Return the examples of the epoch that were not received."""
        return self._total - self.position

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a place restored within that very epoch is kept."""
        self.sampler.set_epoch(epoch)

    def track(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader of this feed, counting what is received and not what was fetched ahead."""
        self._given.clear()
        for item in self.sampler.track(loader):
            self._received.append(self._given.popleft())
            yield item

    def take(self) -> tuple[Counted, list[bool]]:
        """Return what was received since the last call, and which of its micro-batches are repeated."""
        items, self._received = self._received, []
        found = [self.lengths[part] for item in items for part in item.parts if not item.is_repeat]
        padded = sum(len(rows) * int(pad_up(rows.max(axis=0), self._multiple).sum()) for rows in found)
        repeats = [item.is_repeat for item in items for _ in item.parts]
        return Counted(sum(map(len, found)), int(sum(rows.sum() for rows in found)), padded, len(repeats)), repeats

    def _is_repeat(self, num_repeated: int) -> bool:
        """Say whether this rank is one of the last, which have no example of their own."""
        return bool(self.sampler.rank >= self.sampler.world_size - num_repeated)

    def place(self) -> dict[str, Any]:
        """Return where training stands, as JSON values."""
        return {"sampler": self.sampler.state_dict()}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Continue where a place was taken; at the end of an epoch that is the next one."""
        try:
            self.sampler.load_state_dict(place["sampler"])
        except (KeyError, TypeError) as error:
            raise StateMismatchError(f"the place in the data is not one that was saved: {error!r}") from error
        self.begin(self.epoch)
        if self.num_left == 0:
            self.set_epoch(self.epoch + 1)


@final
class PlannedFeed(Feed):
    """A planned batch an item."""

    sampler: BatchSampler

    def __iter__(self) -> Iterator[Any]:
        plan = self.sampler.plan
        last = len(plan) // self.sampler.world_size - 1
        for step, batch in enumerate(self.sampler):
            is_repeat = step == last and self._is_repeat(plan.num_repeated)
            self._given.append(Item([batch], is_repeat))  # type: ignore[list-item]  # rows of packed plans are refused
            yield batch

    def begin(self, epoch: int) -> int:
        """Go to an epoch, and return how many items are left of it."""
        self.set_epoch(epoch)
        plan = self.sampler.plan
        self._total = self.position + len(plan.indices) - plan.num_repeated
        return len(plan) // self.sampler.world_size

    def num_updates(self, num_epochs: float, accumulation: int) -> int:
        """Return how many updates so many epochs have; each is planned for that."""
        sampler, total = copy.copy(self.sampler), 0
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "position": 0})
        for epoch in range(math.ceil(num_epochs)):
            sampler.set_epoch(epoch)
            updates = -(-len(sampler) // accumulation)
            total += math.ceil(min(1.0, num_epochs - epoch) * updates)
        return total


@final
class ResizableFeed(Feed):
    """As many examples as a controller wants an item, cut into micro-batches under a budget.

    Args:
        sampler: draws for this rank.
        lengths: of the examples, as padded alone.
        pad_multiple_of: of the collator.
        budget: of a micro-batch.
        is_random: micro-batches are random parts, at least two over all ranks, for gradient noise.
    """

    sampler: ResizableBatchSampler

    def __init__(
        self,
        sampler: ResizableBatchSampler,
        lengths: npt.ArrayLike,
        pad_multiple_of: int,
        *,
        budget: Budget,
        is_random: bool,
    ) -> None:
        super().__init__(sampler, lengths, pad_multiple_of)
        self._padded = pad_up(self.lengths, pad_multiple_of)
        self._budget = budget
        self._is_random = is_random
        self._controller = sampler.controller
        self._sizes = SizeLog(self._controller)
        self.sampler.controller = self._sizes
        self._replay: list[int] = []
        self._num_received = 0

    def __iter__(self) -> Iterator[Any]:
        for share in self.sampler:
            parts = self._cut(share)
            # Only the last batch of an epoch can be short of examples.
            self._given.append(Item(parts, self._is_repeat(self.sampler.num_repeated)))
            yield parts

    def _cut(self, share: list[int]) -> Parts:
        order = None
        if self._is_random:
            # From the batch itself, so that a resumed run draws the same.
            order = np.random.default_rng([self.epoch, len(share), *share[:4]]).permutation(len(share))
        least = 2 if self._is_random and self.sampler.world_size == 1 else 1
        batch = _Share(self._padded[share])
        places = split(batch, budget=self._budget, limit=1.0, order=order, least_parts=least)
        return [[share[place] for place in part] for part in places]

    def begin(self, epoch: int) -> int:
        """Go to an epoch, and return the most items that are left of it."""
        self.set_epoch(epoch)
        self._total = len(self.sampler._order_of(epoch).indices)
        least = max(getattr(self._controller, "min_size", 1), self.sampler.world_size)
        return -(-self.num_left // least) + len(self._replay)

    def num_updates(self, num_epochs: float, accumulation: int) -> int:
        """Return how many updates so many epochs have if the size stays what it is."""
        return math.ceil(num_epochs * -(-len(self.lengths) // int(self._controller.size)))

    def track(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader of this feed; sizes of a saved run come first."""
        self._sizes.begin(self._replay)
        self._replay, self._num_received = [], 0
        for item in super().track(loader):
            self._num_received += 1
            yield item

    def place(self) -> dict[str, Any]:
        """Return where training stands, and the sizes of items formed ahead."""
        return {**super().place(), "sizes": [*self._sizes.behind(self._num_received), *self._replay]}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Continue where a place was taken."""
        super().go_to(place)
        self._replay = [int(size) for size in place.get("sizes", [])]


@final
class _Share(LogicalBatch):
    """The lengths of the examples that a rank has of a batch."""

    def __init__(self, lengths: npt.NDArray[np.int32]) -> None:
        self.lengths = lengths
        self.num_examples = len(lengths)

    def take(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the places themselves."""
        return indices

    @property
    def gains_from_sorting(self) -> bool:
        """Return True: micro-batches of short examples are narrower."""
        return True

    @property
    def num_elements(self) -> int:
        """Return the tokens as padded together."""
        assert self.lengths is not None
        return self.num_examples * int(self.lengths.sum(axis=1).max())
