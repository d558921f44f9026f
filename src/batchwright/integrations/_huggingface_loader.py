"""The loaders of an adaptive trainer: those that the trainer would make, with other batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import ArgumentError
from ._huggingface_feed import Feed, ResizableFeed

# What a loader is made of besides its batches; the trainer's own loader says how each is set.
_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def options_of(loader: Any) -> dict[str, Any]:
    """Return how a loader is set, besides its data, its batches and how they are collated."""
    return {name: getattr(loader, name) for name in _OPTIONS}


@final
class TrainLoader(DataLoader[Any]):
    """A trainer's loader with the items of a feed; a loop runs one epoch, or what is left of it.

    Its worker processes are seeded from the seed and the epoch, and not from the global random state: a run that
    begins in the middle of an epoch must draw nothing that one without a break does not draw.

    Args:
        base: the trainer's own loader.
        feed: what is given out instead.
        seed: of the workers.
    """

    def __init__(self, base: Any, feed: Feed, *, seed: int) -> None:
        self.feed = feed
        self._seed = seed
        dataset, collate = base.dataset, base.collate_fn
        if isinstance(feed, ResizableFeed):
            dataset, collate = Parted(dataset), CollateParts(collate)
        super().__init__(
            dataset,
            batch_sampler=feed,
            collate_fn=collate,
            generator=torch.Generator(),
            **options_of(base),
        )

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch."""
        self.feed.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the items of the epoch; where sizes change, as many as there are if they stay."""
        return self.feed.num_updates(1, 1) if isinstance(self.feed, ResizableFeed) else self.feed.begin(self.feed.epoch)

    def __iter__(self) -> Any:
        return self.feed.track(_Begin(self._begin))

    def _begin(self) -> Iterator[Any]:
        self.generator.manual_seed(self._seed + 1_000_003 * self.feed.epoch)
        return super().__iter__()


@final
@dataclass(frozen=True)
class _Begin:
    """Something to loop over that begins by a call."""

    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


@final
class Parted(Dataset[list[Any]]):
    """A data set asked for several examples at once, those of a micro-batch.

    >>> Parted(["a", "b", "c"])[[2, 0]]
    ['c', 'a']
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: list[int]) -> list[Any]:
        fetch = getattr(self.dataset, "__getitems__", None)
        return list(fetch(indices)) if callable(fetch) else [self.dataset[index] for index in indices]


@final
@dataclass(frozen=True)
class CollateParts:
    """Collate every micro-batch of an item by itself.

    >>> CollateParts(sum)([[1, 2], [3]])
    [3, 3]
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, parts: list[list[Any]]) -> list[Any]:
        """Return one batch a part."""
        return [self.collate(part) for part in parts]


def check_dataset(dataset: Any) -> None:
    """Refuse a stream, whose examples cannot be drawn by their number."""
    if dataset is None:
        return  # the trainer complains itself
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise ArgumentError(
            "adaptive trainers draw examples by their number, which a stream does not have; batch it with "
            "batchwright.StreamBatcher, or give a data set with a length"
        )
