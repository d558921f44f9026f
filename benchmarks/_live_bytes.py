"""Memory without a GPU: the bytes of live tensors, counted as operations make them and as they are freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@final
class LiveBytes(TorchDispatchMode):
    """A memory source for ``MemoryMonitor``: the storages of tensors made while it is entered.

    It sees what an allocator sees, less the workspaces of kernels, and runs out of memory as one does. So a benchmark
    of GPU memory can be tried on a CPU.

    Args:
        total_bytes: what the pretended device has.
    """

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def reset_peak(self) -> None:
        self.peak_bytes = self.used_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        unknown = [tensor for tensor in _tensors(result) if _key(tensor) not in self._sizes]
        if unknown:
            # A view or an in-place result shares the storage of an argument, which may be older than this mode.
            given = {_key(tensor) for tensor in _tensors([args, list((kwargs or {}).values())])}
            for tensor in unknown:
                if _key(tensor) not in given:
                    self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        key, size = _key(tensor), tensor.untyped_storage().nbytes()
        if key in self._sizes or size == 0:
            return
        if self.used_bytes + size > self.total_bytes:
            raise torch.OutOfMemoryError(f"out of memory: {self.used_bytes} + {size} of {self.total_bytes} bytes")
        self._sizes[key] = size
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        weakref.finalize(tensor.untyped_storage(), self._drop, key)

    def _drop(self, key: int) -> None:
        self.used_bytes -= self._sizes.pop(key)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    # Operators take and return plain lists and tuples; a general walk over trees is several times slower.
    return [tensor for item in tree for tensor in _tensors(item)] if isinstance(tree, list | tuple) else []


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
