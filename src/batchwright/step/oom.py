"""Running out of memory: recognise it, undo what a failed attempt left behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Iterator
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from .._oom import is_out_of_memory as is_out_of_memory


def free_memory(devices: Iterable[torch.device]) -> None:
    """Collect what nothing refers to and return the allocator's unused blocks to the device.

    Call it outside the ``except`` block: there the traceback still holds the activations.
    """
    gc.collect()
    for device in devices:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif device.type == "mps":
            torch.mps.empty_cache()


@final
class Snapshot:
    """Random state and a module's buffers as they were, to make a second attempt the first one again."""

    def __init__(self, buffers: Iterable[Tensor], devices: Iterable[torch.device]) -> None:
        self._buffers: list[tuple[Tensor, Tensor]] = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices = [(device, _get_device_state(device)) for device in devices]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            _set_device_state(device, state)


@final
class Buffers:
    """The buffers of a module at any time, without the walk through all its parts that ``module.buffers()`` takes."""

    def __init__(self, module: nn.Module) -> None:
        # The dictionaries stay the same objects when buffers are added or replaced.
        self._of_parts = [part._buffers for part in module.modules()]

    def __iter__(self) -> Iterator[Tensor]:
        for buffers in self._of_parts:
            for buffer in buffers.values():
                if buffer is not None:
                    yield buffer


def devices_of(module: nn.Module) -> list[torch.device]:
    """Return the devices a module lies on, the CPU left out."""
    found = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


def _get_device_state(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    if device.type == "mps":
        return torch.mps.get_rng_state()
    return None


def _set_device_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
