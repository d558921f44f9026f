"""One probe: run a shape, take its time and its peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import nn

from .calibration import Measurement, Shape
from .memory import MemoryMonitor
from .oom import free_memory, is_out_of_memory


@final
class Prober:
    """Runs one shape several times and notes what it takes.

    Args:
        run: one forward and backward pass of a shape.
        device: waited for around each run.
        monitor: reads the peak; None measures time alone.
        repeats: timed runs after the first.
        drop_gradients_of: parameters whose gradients are dropped before each run.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        run: Callable[[Shape], Any],
        device: torch.device,
        monitor: MemoryMonitor | None,
        repeats: int,
        drop_gradients_of: list[nn.Parameter],
        clock: Callable[[], float],
    ) -> None:
        self._run, self._device, self._monitor = run, device, monitor
        self._repeats, self._drop_gradients_of, self._clock = repeats, drop_gradients_of, clock

    def measure(self, shape: Shape) -> Measurement | None:
        """Return what a shape takes, None if memory ran out."""
        try:
            return self._measure(shape)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside the except block: the traceback is gone, and with it the activations it held.
        free_memory([self._device])
        return None

    def _measure(self, shape: Shape) -> Measurement:
        if self._monitor is not None:
            self._monitor.reset_peak()
        first = self._seconds(shape)
        steady = [self._seconds(shape) for _ in range(self._repeats)]
        peak = None if self._monitor is None else self._monitor.peak_bytes
        return Measurement(shape, float(np.median(steady)), first, peak)

    def _seconds(self, shape: Shape) -> float:
        for parameter in self._drop_gradients_of:
            parameter.grad = None
        _synchronize(self._device)
        start = self._clock()
        self._run(shape)
        _synchronize(self._device)
        return max(self._clock() - start, 1e-9)  # a clock may be too coarse to see it


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
