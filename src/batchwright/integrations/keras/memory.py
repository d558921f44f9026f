"""TensorFlowMemory: what TensorFlow's allocator holds on a device, in the form of a memory source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from ..._checks import as_whole
from ..._optional import require
from ...errors import ArgumentError


@final
class TensorFlowMemory:
    """The bytes that TensorFlow's tensors take on a device, now and at their peak, and how many there may be.

    TensorFlow tells what is in use, but not how much there could be unless a limit was set, so ``total_bytes`` is
    asked for otherwise. On a CPU TensorFlow counts nothing and refuses.

    Args:
        device: as TensorFlow names it.
        total_bytes: the most bytes; None reads the limit of the logical device.
        get_info: returns ``{"current": bytes, "peak": bytes}`` of a device; None is TensorFlow's own.
        reset: begins a new peak; None is TensorFlow's own.

    >>> info = {"current": 100, "peak": 700}
    >>> memory = TensorFlowMemory("GPU:0", total_bytes=1000, get_info=lambda device: info, reset=lambda device: None)
    >>> memory.used_bytes, memory.peak_bytes / memory.total_bytes
    (100, 0.7)
    """

    def __init__(
        self,
        device: str = "GPU:0",
        *,
        total_bytes: int | None = None,
        get_info: Callable[[str], Mapping[str, int]] | None = None,
        reset: Callable[[str], Any] | None = None,
    ) -> None:
        self._device = device
        self._get_info = get_info or require("tensorflow", extra=None).config.experimental.get_memory_info
        self._reset = reset or require("tensorflow", extra=None).config.experimental.reset_memory_stats
        found = _limit_of(device) if total_bytes is None else total_bytes
        self.total_bytes = as_whole("total_bytes", found, least=1)

    @property
    def used_bytes(self) -> int:
        """Return the bytes in use now."""
        return int(self._get_info(self._device)["current"])

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes in use since ``reset_peak``."""
        return int(self._get_info(self._device)["peak"])

    def reset_peak(self) -> None:
        """Begin a new peak at the bytes in use now."""
        self._reset(self._device)


def _limit_of(device: str) -> int:
    """Return the memory limit that was set for a logical device."""
    config: Any = require("tensorflow", extra=None).config
    kind, _, number = device.partition(":")
    physical = config.list_physical_devices(kind)
    logical = [one for found in physical for one in config.get_logical_device_configuration(found) or ()]
    place = int(number or 0)
    limit = logical[place].memory_limit if place < len(logical) else None
    if limit is None:
        raise ArgumentError(
            f"TensorFlow does not say how much memory {device} has; pass total_bytes=, or set a memory_limit with "
            "tf.config.set_logical_device_configuration"
        )
    return int(limit) * 2**20
