"""What a run measures with: a mean that starts over, a stopwatch, and a simulated memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...step.losses import LossFunction, Sums


@final
@dataclass
class RunningMean:
    """A weighted mean that starts over when it is taken.

    >>> mean = RunningMean()
    >>> mean.add(1.0, 3)
    >>> mean.add(5.0, 1)
    >>> mean.take(), mean.take()
    (2.0, None)
    """

    total: float = 0.0
    weight: int = 0

    def add(self, value: float, weight: int) -> None:
        """Add a value."""
        self.total += value * weight
        self.weight += weight

    def take(self) -> float | None:
        """Return the mean, None without values, and start over."""
        mean = self.total / self.weight if self.weight else None
        self.total, self.weight = 0.0, 0
        return mean


@final
class Stopwatch:
    """Seconds inside its context, without pauses; by default processor time, which other processes do not lengthen.

    Args:
        clock: returns seconds that never go back.

    >>> clock = iter([0.0, 1.0, 5.0, 7.0]).__next__
    >>> watch = Stopwatch(clock)
    >>> with watch:
    ...     with watch.paused():
    ...         pass
    >>> watch.seconds  # 0 to 1 and 5 to 7
    3.0
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._total = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._total + (0.0 if self._started is None else self._clock() - self._started)

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, *error: object) -> None:
        self._total, self._started = self.seconds, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause inside the context, if it runs."""
        was_running = self._started is not None
        if was_running:
            self.__exit__()
        try:
            yield
        finally:
            if was_running:
                self.__enter__()


@final
class ActivationMemory:
    """Counts the bytes of activations that a micro-batch keeps for its backward pass, in a memory of simulated size.

    A CPU has no device memory that runs out, and the resident memory of a process does not follow the batch of a small
    model. What does grow with the batch is what autograd keeps: it is counted here, exactly and the same in every run.
    Only the size of the memory is made up: room for ``room`` examples like those of the first micro-batch.

    Use it as the ``source`` of a ``MemoryMonitor``.

    Args:
        room: how many examples fit.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._total_bytes: int | None = None
        self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Return 0: between updates nothing is kept."""
        return 0

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of the largest micro-batch since ``reset_peak``."""
        return self._peak_bytes

    @property
    def total_bytes(self) -> int:
        """Return the size of the memory; 1 before the first micro-batch, so that it can be divided by."""
        return self._total_bytes or 1

    def reset_peak(self) -> None:
        """Forget the micro-batches so far."""
        self._peak_bytes = 0

    def watch(self, loss_fn: LossFunction) -> LossFunction:
        """Return the loss function with its activations counted; its batches are ``(inputs, targets)``."""

        def watched(model: nn.Module, batch: Any) -> Sums:
            # Parameters are in memory anyway, and views that share memory count once.
            parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            kept: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in parameters:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            with saved_tensors_hooks(pack, _same):
                sums = loss_fn(model, batch)
            self._add(sum(kept.values()), num_items=len(batch[1]))
            return sums

        return watched

    def _add(self, num_bytes: int, *, num_items: int) -> None:
        if self._total_bytes is None:
            self._total_bytes = max(1, round(self._room * num_bytes / num_items))
        self._peak_bytes = max(self._peak_bytes, num_bytes)


def _same(tensor: Tensor) -> Tensor:
    return tensor
