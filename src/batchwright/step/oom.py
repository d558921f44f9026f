"""Running out of memory: recognise it, undo what a failed attempt left behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

# Texts of errors that are no torch.OutOfMemoryError by type: libraries under torch, other back ends, wrapped errors.
_TEXTS = (
    "cuda out of memory",
    "hip out of memory",
    "mps backend out of memory",
    "xpu out of memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # what cuBLAS says when its handle cannot be allocated
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_insufficient_resources",
    "miopenstatusallocfailed",
    "hipblas_status_alloc_failed",
    "cuda error: out of memory",
    "can't allocate memory",
    "not enough memory: you tried to allocate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out: by type, by text, or by one of its causes.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    True
    >>> is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(ValueError("out of luck"))
    False
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(current, RuntimeError) and any(text in str(current).lower() for text in _TEXTS):
            return True
        pending += [current.__cause__, current.__context__]
    return False


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
    """Random state and module buffers as they were, to make a second attempt the first one again."""

    def __init__(self, module: nn.Module, devices: Iterable[torch.device]) -> None:
        self._buffers: list[tuple[Tensor, Tensor]] = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
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
