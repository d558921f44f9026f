"""Failures of one rank that all ranks raise, so that nobody waits for a rank that is gone."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist

from .._ranks import common_error, failure_of


def raise_together(error: Exception | None, device: torch.device, *, world_size: int) -> None:
    """Raise on all processes if any of them has an error; a collective, so all call it.

    Args:
        error: of this process, None if it has none.
        device: of the flag that is sent.
        world_size: 1 raises without a collective.
    """
    if world_size > 1:
        flag = torch.tensor([error is not None], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if int(flag.item()):
            raise_gathered(error)
    elif error is not None:
        raise error


def raise_gathered(error: Exception | None) -> NoReturn:
    """Raise on all processes, of which at least one has an error; a collective."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, failure_of(error))
    raise common_error(error, found)
