"""The gradient noise of an update, as reports tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True)
class NoiseReport:
    """Gradient noise of an update, in examples.

    Attributes:
        s: trace of the covariance of the per-example gradient, unbiased.
        g2: squared norm of the true gradient, unbiased; may be below 0.
        num_parts: how many gradients it was estimated from.
        reliable: whether the average over recent updates is large against its own error.
        groups: ``(s, g2)`` of each group of parameters, if ``noise_groups`` was given; they add up to the whole.
        source: ``"all"``: from the whole gradient of micro-batches. ``"vectors"``: from single examples in a few
            vectors, taken to have the scale of the whole. ``"vectors, scaled"``: the same, times how the two scales
            differed where both were measured.
    """

    s: float
    g2: float
    num_parts: int
    reliable: bool
    unit: str = "examples"
    groups: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    source: str = "all"

    @property
    def scale(self) -> float | None:
        """Return the simple noise scale ``s / g2`` of this one update, None if ``g2`` is not above 0."""
        return self.s / self.g2 if self.g2 > 0 else None
