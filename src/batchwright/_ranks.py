"""Ranks: exact sums over a process group, however each rank splits its share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .errors import ArgumentError

_BUCKET_BYTES = 32 * 2**20


@final
class Ranks:
    """The process group of a model: that of DDP, that of ``fully_shard`` (FSDP2), or none.

    Under DDP, micro-batches run on the unwrapped module without synchronisation, and one reduction follows. Forward and
    backward hold no collective, so a rank that runs out of memory tries again while the others wait for it. Under FSDP2
    every forward gathers parameters, so all ranks must run the same number of micro-batches: ``agree_on_parts``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        if self._ddp is not None:
            _refuse_unsupported(self._ddp)
        self.is_sharded = bool(_sharded_parts(model))
        for part in _sharded_parts(model):
            part.set_gradient_divide_factor(1.0)  # sums; Stepper divides them itself
        self.module: nn.Module = model if self._ddp is None else self._ddp.module
        self.group: Any = None if self._ddp is None else self._ddp.process_group
        self.world_size = dist.get_world_size(self.group) if self._ddp is not None or self.is_sharded else 1

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context in which DDP does not reduce gradients."""
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    def sum(self, values: Sequence[Tensor | float], device: torch.device) -> list[float]:
        """Return the sums over all ranks, in one collective and one copy from the device."""
        if self.world_size == 1:
            return [float(value) for value in values]
        dtype = _widest(device)
        packed = torch.stack([torch.as_tensor(value, dtype=dtype, device=device) for value in values])
        dist.all_reduce(packed, group=self.group)
        return packed.tolist()

    def maximum(self, value: int, device: torch.device) -> int:
        """Return the largest value over all ranks."""
        if self.world_size == 1:
            return value
        packed = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=self.group)
        return int(packed.item())

    def largest(self, values: Sequence[float], device: torch.device) -> list[float]:
        """Return the largest of each value over all ranks."""
        if self.world_size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=_widest(device), device=device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=self.group)
        return packed.tolist()

    def agree_on_parts(self, num_parts: int, device: torch.device) -> int:
        """Return how many micro-batches this rank runs: its own number, or under FSDP2 the largest of all ranks."""
        return self.maximum(num_parts, device) if self.is_sharded else num_parts

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up ``.grad`` over all ranks; a parameter unused on every rank keeps None."""
        if self.world_size == 1 or self.is_sharded or not parameters:
            return  # FSDP2 has reduced them already
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        used = used.to(parameters[0].device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        shared = [parameter for parameter, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in shared if parameter.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, group=self.group)
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def share_buffers(self) -> None:
        """Give every rank the buffers of the first rank, as DDP does before a forward."""
        if self.world_size == 1:
            return
        first = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=first, group=self.group)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64


def _sharded_parts(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was applied to; each reduces its own gradients."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gather gradients of one type and device into buckets, so that one call reduces each bucket."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        kind = (gradient.dtype, gradient.device)
        if bucket and (size > _BUCKET_BYTES or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket


def _refuse_unsupported(model: DistributedDataParallel) -> None:
    if model.static_graph:
        raise ArgumentError("DDP(static_graph=True) cannot run without synchronisation; leave static_graph out")
    if getattr(model, "_comm_hooks", None):
        raise ArgumentError("DDP communication hooks would not see Stepper's reduction; remove the hook")
