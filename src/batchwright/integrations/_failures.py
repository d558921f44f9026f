"""Failures of one rank that all ranks raise, so that nobody waits for a rank that is gone."""

from __future__ import annotations

import builtins
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .. import errors


def raise_together(error: Exception | None, device: torch.device, *, group: Any = None, world_size: int = 1) -> None:
    """Raise on all ranks if any rank has an error; a collective, so all ranks call it.

    Args:
        error: of this rank, None if it has none. It is raised as it is; other ranks raise one of the same class.
        device: of the flag that is sent.
        group: the process group, None for all processes.
        world_size: 1 raises without a collective.
    """
    if world_size > 1:
        flag = torch.tensor([error is not None], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        if int(flag.item()):
            raise_gathered(error, group=group)
    elif error is not None:
        raise error


def raise_gathered(error: Exception | None, *, group: Any = None) -> NoReturn:
    """Raise on all ranks, of which at least one has an error; a collective."""
    mine = None if error is None else (type(error).__name__, str(error))
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    if error is not None:
        raise error
    rank, (name, text) = next((rank, told) for rank, told in enumerate(found) if told is not None)
    raise _class_of(name)(f"rank {rank}: {text}")


def _class_of(name: str) -> type[Exception]:
    """Return the class of an error by its name; ``RuntimeError`` for one that takes more than a text."""
    if name == "OutOfMemoryError":
        return torch.OutOfMemoryError
    found = getattr(errors, name, getattr(builtins, name, None))
    is_plain = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, UnicodeError)
    return found if is_plain and found is not None else RuntimeError
