"""Random numbers in worker processes: those of a batch depend on the batch, not on where its epoch was begun."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from ._batches import BatchSource


class _Seeded(NamedTuple):
    seed: int
    item: Any


@final
class SeededItems:
    """The items of a source, each with a seed of its own.

    Workers that are started within an epoch must draw what they would have drawn without a break, whichever of them
    gets which batch. So each batch is seeded by its epoch and its place, on every rank apart.

    Args:
        batches: what is given out.
        seed: of the training.
    """

    def __init__(self, batches: BatchSource, seed: int) -> None:
        self._batches, self._seed = batches, seed

    def __iter__(self) -> Iterator[_Seeded]:
        epoch = self._batches.epoch
        for item in self._batches:
            yield _Seeded(self._seed_of(*self._batches.name_of(epoch, item)), item)

    def _seed_of(self, epoch: int, place: int) -> int:
        name = f"batchwright worker {self._seed} {epoch} {place} {self._batches.sampler.rank}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")


@final
class SeededData(Dataset[Any]):
    """A data set that is asked for seeded items; in a worker, all random numbers of an item come from its seed.

    Args:
        dataset: what the loader read without workers.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, given: _Seeded) -> list[Any]:
        """Return what an item asks for."""
        if get_worker_info() is not None:
            random.seed(given.seed)
            np.random.seed(given.seed % (1 << 32))
            torch.manual_seed(given.seed)
        fetch = getattr(self._dataset, "__getitems__", None)
        return list(fetch(given.item)) if callable(fetch) else [self._dataset[index] for index in given.item]
