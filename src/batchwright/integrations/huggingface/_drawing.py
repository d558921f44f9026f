"""What draws examples: orders that plans would replace are refused, and workers draw random numbers by batch."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
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


def updates_with_saved(
    checkpoint: str | None, sampler: Any, num_updates: int, *, num_epochs: float, accumulation: int
) -> int:
    """Return how many updates a training has in all, those of its checkpoint included.

    On another number of ranks an epoch has another number of updates, so those that ran cannot be taken from it.

    Args:
        checkpoint: that it resumes from, None if it begins.
        sampler: of the planned batches of this rank.
        num_updates: of a training that begins, on these ranks.
        num_epochs: of the training.
        accumulation: planned batches of an update.
    """
    path = None if checkpoint is None else Path(checkpoint) / "trainer_state.json"
    state = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    ours = state.get("stateful_callbacks", {}).get("batchwright")
    feed = ours.get("feed") if isinstance(ours, dict) else None
    if not isinstance(feed, dict) or "sampler" not in feed or state.get("max_steps") == num_updates:
        return num_updates  # as many as it was going to have
    sampler = copy.copy(sampler)
    sampler.load_state_dict(feed["sampler"])
    total = int(state["global_step"])
    for epoch in range(sampler.epoch, math.ceil(num_epochs)):
        sampler.set_epoch(epoch)
        position, plan = sampler.state_dict()["position"], sampler.plan
        num = position + len(plan.indices) - plan.num_repeated
        done, wanted = position / max(1, num), min(1.0, num_epochs - epoch)
        if done < wanted:
            total += math.ceil((wanted - done) / (1 - done) * -(-len(sampler) // accumulation))
    return total
