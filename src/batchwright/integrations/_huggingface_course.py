"""The course of training: figures of the update that runs, of those since the last log, and of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from ..size.noise import NoiseAverage
from ..step.noise import NoiseMeter, NoiseReport

# Places in the sums of an update: labels or examples that count, examples, tokens, padded tokens, micro-batches, and
# how often a rank ran out of memory since training began.
_EXAMPLES, _TOKENS, _PADDED, _PARTS, _OOMS = range(1, 6)
NUM_SUMS = 6


@final
class Course:
    """Counts what was trained on; everything is over all ranks, and on the device until it is read."""

    def __init__(self) -> None:
        self.num_ooms = 0  # of this rank, in this run
        self.lr_factor = 1.0
        self._saved_ooms = 0
        self._sums = torch.zeros(NUM_SUMS, dtype=torch.float64)
        self._all = torch.zeros(NUM_SUMS, dtype=torch.float64)
        self._recent: Tensor | None = None
        self._num_recent = 0
        self._loss: Tensor | None = None
        self._start = 0.0

    def begin(self, sums: Tensor) -> None:
        """Begin an update, whose sums are known."""
        self._sums, self._loss, self._start = sums, None, time.perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """Add a part of the loss of the update."""
        self._loss = loss if self._loss is None else self._loss + loss

    def end(self) -> None:
        """Count the update as done."""
        self._all = self._all.to(self._sums.device) + self._sums
        self._recent = self._sums if self._recent is None else self._recent + self._sums
        self._num_recent += 1

    @property
    def loss(self) -> Tensor:
        """Return the loss of the update on this rank."""
        return torch.zeros(()) if self._loss is None else self._loss

    @property
    def batch_size(self) -> int:
        """Return the examples of the update."""
        return round(float(self._sums[_EXAMPLES]))

    @property
    def seconds(self) -> float:
        """Return the seconds since the update began."""
        return time.perf_counter() - self._start

    def counts(self) -> dict[str, int]:
        """Return the examples and tokens so far."""
        values = self._all.tolist()
        return {"examples": round(values[_EXAMPLES]), "tokens": round(values[_TOKENS])}

    def figures(self) -> dict[str, float]:
        """Return what to log of the updates since the last call; nothing if there were none."""
        if self._recent is None:
            return {}
        sums, num = self._recent.tolist(), self._num_recent
        # What other ranks met in the newest update is known at the next.
        ooms = max(round(float(self._sums[_OOMS])), self.num_ooms)
        self._recent, self._num_recent = None, 0
        return {
            "batch_size": sums[_EXAMPLES] / num,
            "num_micro_batches": sums[_PARTS] / num,
            "padding": 1 - sums[_TOKENS] / sums[_PADDED],
            "ooms": self._saved_ooms + ooms,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        ooms = max(round(float(self._sums[_OOMS])), self.num_ooms)
        return {**self.counts(), "ooms": self._saved_ooms + ooms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._all = torch.zeros(NUM_SUMS, dtype=torch.float64)
        self._all[_EXAMPLES], self._all[_TOKENS] = float(state["examples"]), float(state["tokens"])
        self._saved_ooms = int(state["ooms"])


@final
class Noise:
    """Measures the gradient noise of updates whose micro-batches are random parts.

    Args:
        model: without wrappers for several devices.
    """

    def __init__(self, model: nn.Module) -> None:
        self._meter = NoiseMeter([(name, value) for name, value in model.named_parameters() if value.requires_grad])
        self._num_parts = 0
        self._kept: tuple[Tensor | None, int] = (None, 0)
        self._read: Callable[[], NoiseReport] | None = None

    @property
    def average(self) -> NoiseAverage:
        """Return the average over all updates so far."""
        return self._meter.average

    @average.setter
    def average(self, value: NoiseAverage) -> None:
        self._meter.average = value

    @property
    def report(self) -> NoiseReport | None:
        """Return the noise of the newest update, None where it had fewer than two parts."""
        return None if self._read is None else self._read()

    def begin(self) -> None:
        """Begin an update."""
        self._meter.norms.reset()
        self._num_parts, self._read = 0, None
        self.keep()

    def keep(self) -> None:
        """Remember what was measured, in case the next micro-batch has to be run again."""
        self._kept = (self._meter.norms.total, self._num_parts)

    def undo(self) -> None:
        """Forget what was measured since ``keep``."""
        self._meter.norms.total, self._num_parts = self._kept

    @contextmanager
    def part(self, num_examples: int) -> Iterator[None]:
        """Measure the backward pass of a part inside the context."""
        self._meter.norms.begin()
        yield
        self._meter.norms.end(num_examples)
        self._num_parts += 1

    def end(self, add_up: Callable[[Tensor], Tensor], *, num_examples: int, num_replicas: int, scale: float) -> None:
        """Take the sums of the update, whose gradient is complete, before it is unscaled and clipped.

        Args:
            add_up: sums a tensor over all ranks.
            num_examples: of the update, over all ranks.
            num_replicas: what losses were multiplied by, as gradients are averaged over ranks.
            scale: of the ``GradScaler``, 1 without one.
        """
        total = self._meter.norms.total
        mine = torch.zeros(1, dtype=torch.float64) if total is None else total
        squares, num = add_up(torch.cat([mine, torch.tensor([self._num_parts], device=mine.device, dtype=mine.dtype)]))
        if num >= 2:
            self._read = self._meter.add(
                squares.reshape(1),
                q_factor=(num_examples / num_replicas / scale) ** 2,
                gb_factor=scale**-2,
                num_examples=num_examples,
                num_parts=round(float(num)),
            )

    def close(self) -> None:
        """Stop watching the model."""
        self._meter.norms.close()
