"""The noise of updates whose micro-batches a trainer has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from .meter import NoiseMeter
from .report import NoiseReport


@final
class GradientNoise:
    """Measures the gradient noise of updates whose micro-batches are random parts.

    Args:
        parameters: that are trained.

    Attributes:
        meter: holds the average over all updates so far.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = list(map(id, parameters))
        self.meter = NoiseMeter([("", parameter) for parameter in parameters])
        self._num_parts = 0
        self._kept: tuple[Tensor | None, int] = (None, 0)
        self._read: Callable[[], NoiseReport] | None = None

    @property
    def report(self) -> NoiseReport | None:
        """Return the noise of the newest update, None if it had fewer than two parts."""
        return None if self._read is None else self._read()

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """Begin an update of some parameters; others may have been unfrozen since the last one."""
        if list(map(id, parameters)) != self._parameters:
            self._parameters = list(map(id, parameters))
            self.meter.watch([("", parameter) for parameter in parameters])
        self.meter.norms.reset()
        self._num_parts, self._read = 0, None
        self.keep()

    def keep(self) -> None:
        """Remember what was measured, in case the next micro-batch has to be run again."""
        self._kept = (self.meter.norms.total, self._num_parts)

    def undo(self) -> None:
        """Forget what was measured since ``keep``."""
        self.meter.norms.total, self._num_parts = self._kept

    @contextmanager
    def part(self, num_examples: int) -> Iterator[None]:
        """Measure the backward pass of a part inside the context."""
        self.meter.norms.begin(num_examples)
        yield
        self.meter.norms.end(num_examples)
        self._num_parts += 1

    def end(self, add_up: Callable[[Tensor], Tensor], *, num_examples: int, num_replicas: int, scale: float) -> None:
        """Take the sums of the update after its last backward pass, before gradients are unscaled and clipped.

        Args:
            add_up: sums a tensor over all ranks.
            num_examples: of the update, over all ranks.
            num_replicas: the factor that losses were multiplied by, because gradients are averaged over ranks.
            scale: of the ``GradScaler``, 1 without one.
        """
        total = self.meter.norms.total
        mine = torch.zeros(1, dtype=torch.float64) if total is None else total
        squares, num = add_up(torch.cat([mine, torch.tensor([self._num_parts], device=mine.device, dtype=mine.dtype)]))
        if num >= 2:
            # Gradients carry the factor num_replicas * scale / num_examples, and the sums are quadratic in them.
            self._read = self.meter.add(
                squares.reshape(1),
                q_factor=(num_examples / num_replicas / scale) ** 2,
                gb_factor=scale**-2,
                num_examples=num_examples,
                num_parts=round(float(num)),
            )
