"""What draws examples: orders that plans would replace are refused, and workers draw random numbers by batch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import Dataset, SequentialSampler, get_worker_info

from ...errors import ArgumentError
from .._ranked import is_stream
from ._batches import BatchSource

# Trainers whose order of examples is known to be random, or is looked at elsewhere.
_KNOWN_TRAINERS = ("batchwright", "transformers", "trl", "sentence_transformers")
DECIDES = (
    "decides which examples are drawn, and so does the plan: it would replace yours. Leave the method out; give the "
    "examples as train_dataset, their order with grouping= or curriculum=, or use the trainer without adaptive()"
)


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


@final
class Unused(SequentialSampler):
    """The order of the trainer's own loader, which planned batches take the place of."""


def check_order(kind: type) -> None:
    """Refuse a trainer class with an order of examples of its own, which planned batches would replace."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] not in _KNOWN_TRAINERS and "_get_train_sampler" in vars(base):
            raise ArgumentError(f"{base.__name__}._get_train_sampler {DECIDES}")


def check_loader(trainer: Any, base: Any) -> None:
    """Refuse a loader of the user that draws examples in an order of its own, or other examples."""
    kinds = [kind for kind in type(trainer).__mro__ if "get_train_dataloader" in vars(kind)]
    name = next((one.__name__ for one in kinds if one.__module__.split(".")[0] not in _KNOWN_TRAINERS), None)
    by = None if name is None else f"{name}.get_train_dataloader"
    if "_get_train_sampler" in vars(trainer):
        by = "a _get_train_sampler that was set by hand"
    if by is None:
        return
    batches: Any = getattr(base, "batch_sampler", None)
    dataset = trainer.train_dataset
    while hasattr(batches, "batch_sampler"):  # those of Accelerate give each rank its share
        batches = batches.batch_sampler
    is_ours = isinstance(getattr(batches, "sampler", None), Unused)
    if is_stream(dataset) or not is_ours or len(base.dataset) != len(dataset):
        raise ArgumentError(f"{by} {DECIDES}")
