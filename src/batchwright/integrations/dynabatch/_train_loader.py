"""The loader of a trainer with the batches of a sampler in place of its own."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from ...errors import ArgumentError, LengthsError
from ._sampler import DynaBatchSampler

# What a loader is made of besides its batches; the trainer's own loader says how each is set.
_LOADER_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


@final
class EpochLoader(DataLoader[Any]):
    """A loader whose trainer says which epoch begins, as it does not draw batches to the end of the iterator."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def replace_batches(loader: Any, batch_sampler: Any) -> EpochLoader:
    """Return a loader with other batches, and every other option of the one given."""
    options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
    return EpochLoader(loader.dataset, batch_sampler=batch_sampler, **options)


def check_dataset(dataset: Any, sampler: Any) -> None:
    """Refuse a stream, and a data set the sampler was not made for."""
    if not isinstance(sampler, DynaBatchSampler):
        raise ArgumentError(f"dynabatch_sampler must be a DynaBatchSampler, got {type(sampler).__name__}")
    if dataset is None:
        return  # the trainer complains itself
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise ArgumentError(
            "dynabatch_sampler draws examples by their number, which a stream does not have; "
            "batch a stream with batchwright.StreamBatcher"
        )
    if len(dataset) != sampler.num_examples:
        raise LengthsError(
            f"train_dataset has {len(dataset)} examples but dynabatch_sampler was made for {sampler.num_examples}; "
            "make the sampler from the texts of the data set that is trained on"
        )
