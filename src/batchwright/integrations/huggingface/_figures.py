"""Figures of training: of the running update, of the updates since the last log, and of all updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from ..._checks import read_whole
from ...size.noise import NoiseAverage
from ...step._noise_meter import NoiseMeter
from ...step.report import NoiseReport
from ._batches import Counted

# Places in the sums of an update: its weight in labels or examples, examples, tokens, padded tokens, micro-batches, and
# how often a rank has run out of memory since training began.
_WEIGHT, _EXAMPLES, _TOKENS, _PADDED, _PARTS, _OOMS = range(6)


def _no_sums() -> Tensor:
    return torch.zeros(6, dtype=torch.float64)


@final
class TrainingFigures:
    """Counts over all ranks; they stay on the device until someone reads them."""

    def __init__(self) -> None:
        self.num_ooms = 0  # of this rank, since training began
        self.lr_factor = 1.0
        self._saved_ooms = 0  # of the runs before, from a checkpoint
        self._sums = _no_sums()
        self._all = _no_sums()
        self._recent: Tensor | None = None
        self._num_recent = 0
        self._loss: Tensor | None = None
        self._start = 0.0

    def sums_of(self, weight: Tensor, counted: Counted) -> Tensor:
        """Return the sums of an update on this rank, to be added up over ranks."""
        return torch.tensor([float(weight), *counted, self.num_ooms], dtype=torch.float64)

    def begin(self, sums: Tensor) -> None:
        """Begin an update with its sums over all ranks."""
        self._sums, self._loss, self._start = sums, None, time.perf_counter()

    def add_loss(self, loss: Tensor) -> None:
        """Add a part of the update's loss."""
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
    def weight(self) -> Tensor:
        """Return the labels or examples that count in the update."""
        return self._sums[_WEIGHT]

    @property
    def batch_size(self) -> int:
        """Return the number of examples of the update."""
        return round(float(self._sums[_EXAMPLES]))

    @property
    def seconds(self) -> float:
        """Return the seconds since the update began."""
        return time.perf_counter() - self._start

    def counts(self) -> dict[str, int]:
        """Return the examples and tokens so far."""
        values = self._all.tolist()
        return {"examples": round(values[_EXAMPLES]), "tokens": round(values[_TOKENS])}

    def take_recent(self) -> dict[str, float]:
        """Return what to log of the updates since the last call; an empty dict if there were none."""
        if self._recent is None:
            return {}
        sums, num = self._recent.tolist(), self._num_recent
        self._recent, self._num_recent = None, 0
        return {
            "batch_size": sums[_EXAMPLES] / num,
            "num_micro_batches": sums[_PARTS] / num,
            "padding": 1 - sums[_TOKENS] / sums[_PADDED],
            "ooms": self._all_ooms(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {**self.counts(), "ooms": self._all_ooms()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a state."""
        self._all = _no_sums()
        self._all[_EXAMPLES], self._all[_TOKENS] = read_whole(state, "examples"), read_whole(state, "tokens")
        self._saved_ooms = read_whole(state, "ooms")

    def _all_ooms(self) -> int:
        # The sums hold what other ranks had met before this update; their newest failures arrive with the next one.
        return self._saved_ooms + max(round(float(self._sums[_OOMS])), self.num_ooms)


@final
class GradientNoise:
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
        """Return the noise of the newest update, None if it had fewer than two parts."""
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
        """Take the sums of the update after its last backward pass, before gradients are unscaled and clipped.

        Args:
            add_up: sums a tensor over all ranks.
            num_examples: of the update, over all ranks.
            num_replicas: the factor that losses were multiplied by, because gradients are averaged over ranks.
            scale: of the ``GradScaler``, 1 without one.
        """
        total = self._meter.norms.total
        mine = torch.zeros(1, dtype=torch.float64) if total is None else total
        squares, num = add_up(torch.cat([mine, torch.tensor([self._num_parts], device=mine.device, dtype=mine.dtype)]))
        if num >= 2:
            # Gradients carry the factor num_replicas * scale / num_examples, and the sums are quadratic in them.
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
