"""What frameworks with ranks need from a loader: its options, its sampler, its rank, and the place in its epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from ..errors import ArgumentError
from ..plan.sampler.resizable import ResizableBatchSampler
from ._size_log import SizeLog

_PARTS = ("rank", "world_size", "epoch", "set_epoch", "state_dict", "load_state_dict")
# Figures of a report that every rank measures for itself.
_LOCAL = ("seconds", "memory_fraction")
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


def loader_options(loader: Any) -> dict[str, Any]:
    """Return the options of a loader, except its data and its batches.

    >>> from torch.utils.data import DataLoader
    >>> loader_options(DataLoader([1, 2], batch_size=2, pin_memory=True))["pin_memory"]
    True
    """
    return {name: getattr(loader, name) for name in _LOADER_OPTIONS if hasattr(loader, name)}


def is_stream(dataset: Any) -> bool:
    """Say whether a data set gives examples one after the other, and not by their number."""
    return isinstance(dataset, IterableDataset) or (dataset is not None and not isinstance(dataset, Sized))


def check_no_stream(name: str, dataset: Any) -> None:
    """Refuse a stream as the data set of ``name``, which draws examples by their number."""
    if is_stream(dataset):
        raise ArgumentError(
            f"{name} draws examples by their number, but a stream has no numbers; give a data set with a length, or "
            "batch the stream with batchwright.StreamBatcher"
        )


def sampler_of(loader: Any) -> Any:
    """Return what counts a loader's epochs: its sampler, or the loader itself if ``regroup`` made it; else None.

    >>> from torch.utils.data import DataLoader
    >>> import batchwright as bw
    >>> sampler = bw.BatchSampler([3, 1, 2], bw.MaxTokens(4))
    >>> sampler_of(DataLoader([0, 1, 2], batch_sampler=sampler)) is sampler
    True
    >>> sampler_of(DataLoader([0, 1, 2], batch_size=2)) is None
    True
    """
    for part in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if part is not None and all(hasattr(part, name) for name in _PARTS):
            return part
    return None


def give_rank(sampler: Any, *, rank: int, world_size: int, is_loader: bool = False) -> bool:
    """Let a sampler that was made for a single process draw for a rank.

    Args:
        sampler: has ``rank`` and ``world_size``.
        rank: of this process.
        world_size: number of processes.
        is_loader: it reads from a loader of its own, which only its maker can divide over ranks.

    Returns:
        True if the data was divided now, False if it was divided before.
    """
    found = (sampler.rank, sampler.world_size)
    if found == (rank, world_size):
        return False
    name = type(sampler).__name__
    if found != (0, 1) or is_loader:
        raise ArgumentError(
            f"the {name} draws for rank {found[0]} of {found[1]}, this process is rank {rank} of {world_size}; "
            + ("pass rank and world_size to regroup" if is_loader else "leave rank and world_size out")
        )
    sampler.rank, sampler.world_size = rank, world_size
    sampler.set_epoch(sampler.epoch)  # earlier iterators counted steps of another world size
    return True


def num_batches(sampler: Any) -> int | None:
    """Return how many batches are left in the epoch, None if the sizes are not known yet."""
    try:
        return len(sampler)
    except TypeError:
        return None


def is_at_end(sampler: Any, num_left: int | None) -> bool:
    """Say whether the newest batch was the last one of its epoch; False if that cannot be known.

    Args:
        sampler: of the loader.
        num_left: the number of batches that are left, None if it is not known.
    """
    if num_left is not None:
        return num_left == 0
    if not isinstance(sampler, ResizableBatchSampler):
        return False
    return bool(sampler.state_dict()["position"] == sampler.num_in_epoch)


def controller_of(sampler: Any, controller: Any) -> Any:
    """Return the controller that observes training: the given one, else the sampler's, else None."""
    own = getattr(sampler, "controller", None)
    own = own.controller if isinstance(own, SizeLog) else own
    if controller is None:
        return own if hasattr(own, "observe") else None
    if isinstance(controller, str) and controller == "auto":
        raise ArgumentError(
            "controller='auto' needs batches whose size it can change, and their gradient noise, which adaptive "
            "trainers, prepare for Accelerate and AdaptiveBatching for Lightning have; pass a BatchSizeController here"
        )
    if not (hasattr(controller, "observe") and hasattr(controller, "state_dict")):
        raise ArgumentError(
            f"controller needs observe and state_dict, as a BatchSizeController has, got {type(controller).__name__}; "
            "write BatchSizeController(size.goodput(), min_size=…, max_size=…)"
        )
    if own is not None and own is not controller:
        raise ArgumentError("the sampler takes its sizes from another controller; pass the same one, or leave it out")
    return controller


def agree(figures: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return an observation that is the same on all ranks, so that all ranks choose the same size.

    Every rank measures its own seconds and memory; the largest values count.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return dict(figures)
    values = [-1.0 if figures[name] is None else float(figures[name]) for name in _LOCAL]
    packed = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    largest = [None if value < 0 else value for value in packed.tolist()]
    return {**figures, **dict(zip(_LOCAL, largest, strict=True))}


@final
class Meeting:
    """Where ranks tell each other what they read; a single process meets nobody.

    Args:
        device: of the numbers that are sent.
        world_size: processes.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._world_size = world_size

    def bounds(self, value: int) -> tuple[int, int]:
        """Return the least and the largest value of all ranks; a collective."""
        if self._world_size == 1:
            return value, value
        found = torch.tensor([value, -value], dtype=torch.int64, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        least, most = found.tolist()
        return least, -most

    def all_have(self, has_batch: bool) -> bool:
        """Say whether all ranks have a batch; a collective."""
        return self.bounds(int(has_batch))[0] == 1

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks; a collective."""
        found: list[Any] = [value] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(found, value)
        return found
