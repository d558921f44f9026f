"""The entropy of a model's output in the updates of a trainer, from the logits that its loss has made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from ...step.huggingface import LABELS, output_entropy
from .._devices import Devices


@final
class EntropyMeter:
    """Adds up the entropy over the labels of an update, whatever its micro-batches.

    Attributes:
        is_wanted: anybody reads it.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        self.newest: float | None = None
        self._sums: list[Tensor] = []  # (entropy, labels) of every piece
        self._num_kept = 0
        self._is_open = False

    def begin(self) -> None:
        """Begin an update."""
        self._sums, self._num_kept = [], 0

    def keep(self) -> None:
        """Keep what was measured so far, whatever happens to the next micro-batch."""
        self._num_kept = len(self._sums)

    def undo(self) -> None:
        """Forget the pieces of a micro-batch that ran out of memory."""
        del self._sums[self._num_kept :]

    @contextmanager
    def part(self, *, counts: bool) -> Iterator[None]:
        """Measure what runs inside, if it counts; a repeat of another rank's example does not."""
        self._is_open = self.is_wanted and counts
        try:
            yield
        finally:
            self._is_open = False

    def labels(self, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the labels of a piece before its loss takes them out; None if it is not measured."""
        return {name: inputs[name] for name in LABELS if name in inputs} if self._is_open else None

    def note(self, outputs: Any, labels: Mapping[str, Any], *, shifts: bool) -> None:
        """Add the entropy of a piece."""
        entropy, num = output_entropy(outputs, labels, shifts=shifts)
        wide = torch.float32 if entropy.device.type == "mps" else torch.float64
        self._sums.append(torch.stack([entropy.to(wide), num.to(wide)]))

    def end(self, devices: Devices) -> float | None:
        """Return the mean over all labels of the update on all ranks, NaN if no label counts; None if not wanted."""
        if not self.is_wanted:
            return None
        mine = torch.stack(self._sums).sum(dim=0).cpu() if self._sums else torch.zeros(2)
        entropy, num = devices.add_up(mine.to(torch.float64)).tolist()
        self.newest = entropy / num if num else math.nan
        return self.newest
