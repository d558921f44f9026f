"""StepTime: the seconds of an update, as a model of steps predicts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import numpy.typing as npt

from ..._types import FloatArray, IntArray
from ...errors import ArgumentError
from ..policy import Part, options, word


class TimePrediction(Protocol):
    """Predicts the seconds of a step, as ``TimeModel`` does."""

    def predict(self, shapes: npt.ArrayLike, /) -> FloatArray:
        """Return the seconds of each shape ``(num_items, length, …)``."""


@final
@dataclass(frozen=True)
class StepTime(Part):
    """The seconds of an update of ``B`` examples: shared by ranks, in pieces of at most ``max_items``."""

    model: TimePrediction
    lengths: tuple[int, ...]
    world_size: int = 1
    max_items: int | None = None

    def seconds(self, sizes: IntArray) -> FloatArray:
        """Return the seconds of an update of each size."""
        share = -(-sizes // self.world_size)
        if self.max_items is None:
            return self._predict(share)
        num_full, rest = np.divmod(share, self.max_items)
        full = self._predict(np.full_like(share, self.max_items))
        return num_full * full + np.where(rest > 0, self._predict(np.maximum(rest, 1)), 0.0)

    def _predict(self, num_items: IntArray) -> FloatArray:
        lengths = np.broadcast_to(np.array(self.lengths, dtype=np.int64), (len(num_items), len(self.lengths)))
        seconds = np.asarray(self.model.predict(np.column_stack([num_items, lengths])), dtype=np.float64)
        if seconds.shape != num_items.shape or not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ArgumentError(f"time_model must predict seconds above 0, one number per shape, got {seconds}")
        return seconds

    def arguments(self) -> list[str]:
        """Return the arguments of the call."""
        length = self.lengths[0] if len(self.lengths) == 1 else self.lengths
        split = options(world_size=(self.world_size, 1), max_items=(self.max_items, None))
        return [word(self.model), *([f"length={length}"] if self.lengths else []), *split]
