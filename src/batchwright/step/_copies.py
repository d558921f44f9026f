"""Numbers on their way from a CUDA device to the host, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy.typing as npt
import torch
from torch import Tensor


@final
class Copied:
    """Numbers on their way from a CUDA device; reading them waits only for their copy, not for work queued later.

    ``tensor.item()`` waits for everything that was queued before the call, so a loop that reads the loss of the update
    before would wait for the newest update too. The weight of a micro-batch is known before the backward pass, and the
    host need not wait for that pass to read it.

    Args:
        values: one number, or a row of them, on a CUDA device.
    """

    def __init__(self, values: Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(values.device))

    def tolist(self) -> list[float]:
        """Return a row of numbers."""
        self._done.synchronize()
        return self._host.tolist()

    def __float__(self) -> float:
        self._done.synchronize()
        return float(self._host)


@final
class Place:
    """One number of a row that is on its way."""

    def __init__(self, row: Copied, index: int) -> None:
        self._row, self._index = row, index

    def __float__(self) -> float:
        return self._row.tolist()[self._index]


Number: TypeAlias = "Tensor | float | Place"


def copied_row(values: Tensor) -> Tensor | Copied:
    """Return a row of numbers whose copy has begun, or the row itself where it is no plain tensor on a CUDA device."""
    return Copied(values) if _is_far(values) else values


def copied_numbers(values: Sequence[Tensor | float]) -> list[Number]:
    """Return the same numbers; the copies of those on a CUDA device have begun, as one row per device.

    >>> copied_numbers([2.5, torch.tensor(3.0)])
    [2.5, tensor(3.)]
    """
    found: list[Number] = list(values)
    rows: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and _is_far(value) and value.numel() == 1:
            rows.setdefault(value.device, []).append(index)
    for indices in rows.values():
        # float64 holds every loss and norm exactly, whatever type it comes in.
        row = Copied(torch.stack([torch.as_tensor(values[index]).detach().reshape(()).double() for index in indices]))
        for place, index in enumerate(indices):
            found[index] = Place(row, place)
    return found


def _is_far(values: Tensor) -> bool:
    return type(values) is Tensor and values.is_cuda  # a DTensor is read by a collective


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return numbers of the host on a device; the host waits for nothing that was queued there before."""
    host = torch.from_numpy(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
