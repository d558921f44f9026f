"""What one update did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor


@final
@dataclass(frozen=True)
class NoiseReport:
    """Gradient noise of an update, in examples.

    Attributes:
        s: trace of the covariance of the per-example gradient, unbiased.
        g2: squared norm of the true gradient, unbiased; may be below 0.
        num_parts: gradients it was estimated from.
        reliable: whether the average over recent updates is far enough from its own error.
    """

    s: float
    g2: float
    num_parts: int
    reliable: bool
    unit: str = "examples"

    @property
    def scale(self) -> float | None:
        """Return the simple noise scale ``s / g2`` of this update alone, None where ``g2`` is not above 0."""
        return self.s / self.g2 if self.g2 > 0 else None


@final
@dataclass(frozen=True)
class StepReport:
    """The figures of one update, over all ranks."""

    batch_size: int
    num_micro_batches: int
    weight: float
    ooms: int
    seconds: float
    peak_bytes: int | None
    lr: float
    loss: float
    metrics: dict[str, float]
    noise: NoiseReport | None
    _grad_norm: Tensor | None = None

    @property
    def grad_norm(self) -> float | None:
        """Return the norm of the gradient before clipping, None without ``clip_norm``; copied from the device."""
        return None if self._grad_norm is None else float(self._grad_norm)

    @property
    def entropy(self) -> float | None:
        """Return the mean entropy, where loss_fn returned its sum."""
        return self.metrics.get("entropy")

    def observation(self) -> dict[str, Any]:
        """Return what a batch-size policy observes: ``controller.observe(**report.observation())``."""
        noise = self.noise
        return {
            "batch_size": self.batch_size,
            "loss": self.loss,
            "lr": self.lr,
            "entropy": self.entropy,
            "noise_s": None if noise is None else noise.s,
            "noise_g2": None if noise is None else noise.g2,
            "noise_reliable": None if noise is None else noise.reliable,
            "seconds": self.seconds,
        }
