"""What one update did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from .noise import NoiseReport


@final
@dataclass(frozen=True)
class StepReport:
    """The figures of one update, over all ranks.

    Losses, metrics, noise and the gradient's norm lie on the device until they are read. ``seconds`` and memory are
    those of the slowest and of the fullest rank; the time is the host's, which on a GPU runs ahead of the device
    between two reads.
    """

    batch_size: int
    num_micro_batches: int
    weight: float
    ooms: int
    seconds: float
    peak_bytes: int | None
    memory_fraction: float | None
    lr: float
    _loss_sum: Tensor | float
    _metric_sums: Mapping[str, Tensor | float]
    _noise: Callable[[], NoiseReport] | None = None
    _grad_norm: Tensor | None = None

    @property
    def loss(self) -> float:
        """Return the mean loss ``loss_sum / weight``."""
        return float(self._loss_sum) / self.weight

    @property
    def metrics(self) -> dict[str, float]:
        """Return the mean of every sum that loss_fn returned by name."""
        return {name: float(value) / self.weight for name, value in self._metric_sums.items()}

    @property
    def noise(self) -> NoiseReport | None:
        """Return the gradient noise, None where it was not measured."""
        return None if self._noise is None else self._noise()

    @property
    def grad_norm(self) -> float | None:
        """Return the norm of the gradient before clipping, None without ``clip_norm``."""
        return None if self._grad_norm is None else float(self._grad_norm)

    @property
    def entropy(self) -> float | None:
        """Return the mean entropy, where loss_fn returned its sum."""
        value = self._metric_sums.get("entropy")
        return None if value is None else float(value) / self.weight

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
            "noise_parts": None if noise is None else noise.num_parts,
            "seconds": self.seconds,
            "memory_fraction": self.memory_fraction,
        }
