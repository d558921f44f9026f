"""What a framework with ranks needs of a loader: its sampler, the rank it draws for, and where its epoch stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError
from ..plan.sampler.resizable import ResizableBatchSampler

_PARTS = ("rank", "world_size", "epoch", "set_epoch", "state_dict", "load_state_dict")
# Figures of a report that every rank measures for itself.
_LOCAL = ("seconds", "memory_fraction")


def sampler_of(loader: Any) -> Any:
    """Return what keeps count of a loader's epochs: its sampler, or what ``regroup`` made; None for other loaders.

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
        rank: this process.
        world_size: processes.
        is_loader: whether it reads from a loader of its own, which must be divided over ranks by who made it.

    Returns:
        Whether the data was divided now; False where it was already.
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
    sampler.set_epoch(sampler.epoch)  # iterators of before counted steps of another world size
    return True


def num_batches(sampler: Any) -> int | None:
    """Return how many batches are left of the epoch, None where the sizes are not known yet."""
    try:
        return len(sampler)
    except TypeError:
        return None


def is_at_end(sampler: Any, num_left: int | None) -> bool:
    """Say whether the batch received last was the last of its epoch; False where that cannot be known.

    Args:
        sampler: of the loader.
        num_left: batches that are left, None where that is not known.
    """
    if num_left is not None:
        return num_left == 0
    if not isinstance(sampler, ResizableBatchSampler):
        return False
    state = sampler.state_dict()
    return int(state["position"]) == len(sampler._order_of(state["epoch"]).indices)


def controller_of(sampler: Any, controller: Any) -> Any:
    """Return the controller that is to observe: the given one, else the sampler's, None where there is none."""
    own = getattr(sampler, "controller", None)
    if controller is None:
        return own if hasattr(own, "observe") else None
    if not (hasattr(controller, "observe") and hasattr(controller, "state_dict")):
        raise ArgumentError(
            f"controller needs observe and state_dict, as a BatchSizeController has, got {type(controller).__name__}"
        )
    if own is not None and own is not controller:
        raise ArgumentError("the sampler asks another controller for its sizes; give the same one, or leave it out")
    return controller


def agree(figures: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return an observation that is the same on all ranks, so that all choose the same size.

    Seconds and memory are measured by each rank; all take the largest.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return dict(figures)
    values = [-1.0 if figures[name] is None else float(figures[name]) for name in _LOCAL]
    packed = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    largest = [None if value < 0 else value for value in packed.tolist()]
    return {**figures, **dict(zip(_LOCAL, largest, strict=True))}
