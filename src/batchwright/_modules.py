"""Modules of torch: wrappers that reduce gradients, which are found or refused, and parts, which are walked once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .errors import ArgumentError

Child: TypeAlias = "ref[nn.Module] | None"


def unwrap(model: nn.Module) -> tuple[DistributedDataParallel | None, nn.Module]:
    """Return DDP, if it is around the model or inside ``torch.compile``, and the module to run."""
    if not hasattr(model, "named_modules"):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(model)!r}")
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


@final
class Parts:
    """The parts of a module and the parts that each of them had; none of them is kept alive.

    Parameters and buffers are read anew whenever they are asked for, so one that was replaced, frozen or added counts.

    Args:
        module: whose parts these are.

    >>> layer = nn.Linear(2, 3)
    >>> parts = Parts(layer)
    >>> [tuple(one.shape) for one in parts.parameters()], parts.is_outdated
    ([(3, 2), (3,)], False)
    >>> layer.add_module("more", nn.Linear(1, 1))
    >>> parts.is_outdated
    True
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts: list[tuple[ref[nn.Module], tuple[Child, ...]]] = [
            (ref(part), tuple(None if child is None else ref(child) for child in part._modules.values()))
            for part in module.modules()
        ]

    @property
    def is_outdated(self) -> bool:
        """Return whether the module has other parts now."""
        for place, before in self._parts:
            part = place()
            if part is None or len(part._modules) != len(before):
                return True
            for child, known in zip(part._modules.values(), before, strict=True):
                if child is not (None if known is None else known()):
                    return True
        return False

    def _living(self) -> Iterator[nn.Module]:
        return (part for place, _ in self._parts if (part := place()) is not None)

    def parameters(self) -> list[nn.Parameter]:
        """Return what ``module.parameters()`` gives, each parameter once, in its order."""
        found = {id(one): one for part in self._living() for one in part._parameters.values() if one is not None}
        return list(found.values())

    def buffers(self) -> list[Tensor]:
        """Return what ``module.buffers()`` gives, each buffer once, in its order."""
        found = {id(one): one for part in self._living() for one in part._buffers.values() if one is not None}
        return list(found.values())


_KNOWN: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


def parts_of(module: nn.Module) -> Parts:
    """Return the parts of a module as they are now; the walk of the last call is used again if it still holds."""
    found = _KNOWN.get(module)
    if found is None or found.is_outdated:
        found = _KNOWN[module] = Parts(module)
    return found


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return what ``module.parameters()`` gives, without its walk.

    >>> layer = nn.Linear(2, 3)
    >>> all(map(lambda one, other: one is other, parameters_of(layer), layer.parameters()))
    True
    """
    kind = type(module)
    if kind.parameters is not nn.Module.parameters or kind.named_parameters is not nn.Module.named_parameters:
        return list(module.parameters())
    return parts_of(module).parameters()


def recomputes_activations(model: object) -> bool:
    """Say whether a model of transformers computes activations again in the backward pass.

    Release 5.23 renamed the property, and warns of the name that older releases have.
    """
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):  # asked of adapters too, which hand it on
        if hasattr(model, name):
            return bool(getattr(model, name))
    return False
