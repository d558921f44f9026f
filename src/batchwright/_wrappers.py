"""Wrappers of a model that reduce gradients: find the ranks that share an update, or refuse the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .errors import ArgumentError


def unwrap(model: nn.Module) -> tuple[DistributedDataParallel | None, nn.Module]:
    """Return DDP, if it is around the model or inside ``torch.compile``, and the module to run."""
    ddp, inner = None, getattr(model, "_orig_mod", model)
    module = model
    if isinstance(inner, DistributedDataParallel):
        ddp = inner
        _refuse_unsupported(ddp)
        # What compiled DDP compiles the module under it, which runs without DDP's collectives.
        module = ddp.module if inner is model else model.dynamo_ctx(ddp.module)  # type: ignore[operator]
    for name, part in module.named_modules():
        wrapper = _hidden_wrapper(part)
        if wrapper is not None:
            raise ArgumentError(
                f"{wrapper} lies inside the model ({name or 'the model itself'}), where Stepper cannot see which ranks "
                "share an update; wrap the whole model in DistributedDataParallel, or use fully_shard"
            )
    return ddp, module


def _hidden_wrapper(part: nn.Module) -> str | None:
    """Return the name of a wrapper that reduces gradients by itself, out of our sight."""
    if isinstance(part, DistributedDataParallel):
        return "DistributedDataParallel"
    if not dist.is_available():
        return None
    kinds = [kind.__name__ for kind in type(part).__mro__]
    if "FSDPModule" in kinds:
        return None
    for name in ("FullyShardedDataParallel", "DeepSpeedEngine"):
        if name in kinds:
            return name
    from torch.distributed._composable.contract import _get_registry

    registry = _get_registry(part)
    return "replicate" if registry is not None and "replicate" in registry else None


def sharded_parts(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was applied to; each reduces its own gradients."""
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def groups_of_shards(parts: Sequence[Any]) -> list[Any]:
    """Return the groups whose ranks hold different data, one per axis of the mesh that parts are sharded over."""
    meshes = []
    for part in parts:
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        meshes += [group.mesh_info.mesh for group in groups if group is not None]
    if any(mesh != meshes[0] for mesh in meshes):
        raise ArgumentError(
            "parts of the model are sharded over different meshes, so no one group of ranks shares an update; call "
            "fully_shard with the same mesh everywhere"
        )
    return [] if not meshes else [meshes[0].get_group(axis) for axis in range(meshes[0].ndim)]


def _refuse_unsupported(model: DistributedDataParallel) -> None:
    if model.static_graph:
        raise ArgumentError("DDP(static_graph=True) cannot run without synchronisation; leave static_graph out")
    if getattr(model, "_comm_hooks", None):
        raise ArgumentError("DDP communication hooks would not see Stepper's reduction; remove the hook")
    if getattr(model, "mixed_precision", None) is not None:
        raise ArgumentError("DDP(mixed_precision=…) casts in its own forward, which Stepper leaves out; use autocast=")
