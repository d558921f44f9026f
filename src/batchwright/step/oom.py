"""Running out of memory: recognise it, and undo what a failed attempt left.

- ``Snapshot``, ``free_memory``: what a second attempt needs.
- ``set_aside``, ``add_back`` and others: gradients that an attempt must not lose.
- ``split_doubts``, ``warn_of_split``: what makes an update depend on how it is split.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._modules import parameters_of, parts_of
from .._oom import is_out_of_memory as is_out_of_memory
from .._ranks import is_expanded
from .._tree import leaves
from .splitting import LogicalBatch

# Gradients set aside, each with its parameter.
Held: TypeAlias = "list[tuple[nn.Parameter, Tensor]]"


def free_memory(devices: Iterable[torch.device]) -> None:
    """Collect objects that nothing refers to, and return the allocator's unused blocks to the device.

    Call it outside the ``except`` block: inside, the traceback still holds the activations.
    """
    gc.collect()
    for device in devices:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif device.type == "mps":
            torch.mps.empty_cache()


def devices_of(module: nn.Module) -> list[torch.device]:
    """Return the devices that a module lies on, without the CPU."""
    found = {tensor.device for tensor in [*parameters_of(module), *parts_of(module).buffers()]}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


@final
class Snapshot:
    """The random state and a module's buffers at one moment, so that a second attempt repeats the first.

    Buffers that a forward pass replaced or added are put back and removed. What it does not hold: attributes that are
    no buffers, such as the sums of a metric or the hidden state of a recurrent model, and a ``torch.Generator`` of your
    own.

    Args:
        buffers: of the module, None for no module.
        devices: whose random state is kept, besides the CPU's.
    """

    def __init__(self, buffers: Buffers | None, devices: Iterable[torch.device]) -> None:
        places = [] if buffers is None else buffers.places
        self._places = [(place, dict(place)) for place in places if place]
        self._empty = [place for place in places if not place]
        self._values = [
            (buffer, buffer.detach().clone())
            for _, held in self._places
            for buffer in held.values()
            if buffer is not None and not is_expanded(buffer)  # nothing can write to an expanded one
        ]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices = [(device, _get_device_state(device)) for device in devices]

    @classmethod
    def of(cls, module: nn.Module) -> Snapshot:
        """Return the state of a module now."""
        return cls(Buffers(module), devices_of(module))

    def restore(self) -> None:
        """Put everything back."""
        for place in self._empty:
            place.clear()
        for place, held in self._places:
            place.clear()
            place.update(held)
        with torch.no_grad():
            for buffer, value in self._values:
                if buffer.shape != value.shape:
                    buffer.data = value  # a forward pass has given it other memory
                else:
                    buffer.copy_(value)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            _set_device_state(device, state)

    def is_random_as(self, other: Snapshot) -> bool:
        """Return whether another snapshot holds the same random state."""
        # NumPy's holds an array, whose text would be cut short.
        numpy, others = ([*map(np.ndarray.tolist, map(np.asarray, one._numpy))] for one in (self, other))
        devices = zip(self._devices, other._devices, strict=True)
        are_same = all(mine is None or torch.equal(mine, its) for (_, mine), (_, its) in devices)
        same = are_same and torch.equal(self._torch, other._torch)
        return same and self._python == other._python and numpy == others


def _get_device_state(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def _set_device_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


@final
class Buffers:
    """Where the buffers of a module lie, without the walk through all its parts that ``module.buffers()`` makes.

    Args:
        modules: whose buffers these are.

    Attributes:
        places: a dictionary per part; it stays the same object when buffers are added or replaced.
    """

    def __init__(self, *modules: nn.Module) -> None:
        parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self.places: list[dict[str, Tensor | None]] = [part._buffers for part in parts]
        self._parents = [(part._modules, tuple(part._modules.values())) for part in parts if part._modules]

    @property
    def is_outdated(self) -> bool:
        """Return whether the module has other parts now."""
        return any(tuple(children.values()) != before for children, before in self._parents)


def set_aside(parameters: Sequence[nn.Parameter]) -> Held:
    """Take the gradients off their parameters and return them."""
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if held:
        drop_gradients(parameters)
    return held


def drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set every gradient to None."""
    for parameter in parameters:
        parameter.grad = None


def add_back(held: Held) -> None:
    """Add gradients to those that are there now, as ``backward`` would."""
    for parameter, gradient in held:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def present(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def split_doubts(module: nn.Module) -> list[Callable[[], str | None]]:
    """Return a function per part whose result may depend on the split: it returns a warning, or None for now."""
    return [partial(_doubt, name, part) for name, part in module.named_modules() if _kind_of(part) is not None]


def _kind_of(part: nn.Module) -> str | None:
    if isinstance(part, _BatchNorm):
        return "BatchNorm"
    hooks = [type(hook).__name__ for hook in part._forward_pre_hooks.values()]
    if type(part).__name__ == "_SpectralNorm" or "SpectralNorm" in hooks:
        return "spectral norm"
    return "max_norm" if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None else None


def _doubt(name: str, part: nn.Module) -> str | None:
    kind = _kind_of(part)
    if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
        mode = "in training mode" if part.training else "without running statistics"
        return (
            f"BatchNorm {mode} ({name}) sees micro-batches, not the batch: its statistics, and so the update, depend "
            "on the split. Use GroupNorm or LayerNorm, or put it into eval mode with running statistics"
        )
    if kind == "max_norm" or (kind == "spectral norm" and part.training):
        return (
            f"{kind} in training mode ({name}) changes its weight in every forward pass, so once per micro-batch: the "
            "update depends on the split. Leave it out, or run batches whole"
        )
    return None


def warn_of_split(module: nn.Module) -> bool:
    """Warn of a part whose result depends on the split, and say whether there is one."""
    warning = next(filter(None, (doubt() for doubt in split_doubts(module))), None)
    if warning is not None:
        warnings.warn(warning, stacklevel=3)
    return warning is not None


def does_not_fit(logical: LogicalBatch, index: int, device: torch.device) -> str:
    """Return the error text about an example that runs out of memory on its own."""
    length = "" if logical.lengths is None else f" of length {logical.lengths[index].tolist()}"
    tensors = [(tuple(tensor.shape), tensor.nbytes) for tensor in leaves(logical.take([index]))]
    size = sum(num_bytes for _, num_bytes in tensors)
    free = ""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        free = f"; {available / 2**30:.2f} of {total / 2**30:.2f} GiB are free on {device}"
    return (
        f"example {index} of the batch{length} does not fit on its own: tensors {[shape for shape, _ in tensors]}, "
        f"{size:,} bytes of input{free}. Shorten it, use a smaller model or activation checkpointing"
    )
