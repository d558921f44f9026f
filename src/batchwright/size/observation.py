"""Observation: what a policy sees of the course of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from ..errors import MissingSignalError

# Where each figure comes from, for the error that a policy without it raises.
SOURCES = {
    "epoch": "pass the number of completed epochs: controller.observe(epoch=1, …)",
    "step": "pass the number of completed updates: controller.observe(step=100, …)",
    "examples": "pass batch_size or the examples completed: controller.observe(**report.observation()) does",
    "tokens": "pass the tokens completed: controller.observe(tokens=…)",
    "batch_size": "pass the size of the batch that ran: controller.observe(**report.observation()) does",
    "loss": "pass the loss: controller.observe(**report.observation()) does",
    "lr": "pass the learning rate: controller.observe(**report.observation()) does",
    "entropy": "let loss_fn return (loss_sum, weight, {'entropy': entropy_sum(logits)}), from batchwright.step",
    "noise_s": "build the Stepper with measure_noise=True",
    "noise_g2": "build the Stepper with measure_noise=True",
    "noise_reliable": "build the Stepper with measure_noise=True",
    "noise_parts": "build the Stepper with measure_noise=True",
    "seconds": "pass the seconds of the update: controller.observe(**report.observation()) does",
    "memory_fraction": "build the Stepper with memory=MemoryMonitor(), from batchwright.step",
}


@final
@dataclass(frozen=True, kw_only=True)
class Observation:
    """The course of training so far; what was not measured is None.

    Counts are of what is *completed*: ``epoch=3`` asks for the size of the epoch with index 3.

    Attributes:
        epoch: epochs completed.
        step: updates completed.
        examples: examples seen.
        tokens: tokens seen.
        batch_size: examples of the update that just ran.
        loss: its mean loss.
        lr: its learning rate.
        entropy: mean entropy of the model's output.
        noise_s: trace of the covariance of the per-example gradient.
        noise_g2: squared norm of the true gradient.
        noise_reliable: whether their average is far enough from its own error.
        noise_parts: micro-batches they were estimated from.
        seconds: duration of the update.
        memory_fraction: share of memory in use at the peak.
        size: the batch size in force; the controller fills it in.

    >>> Observation(epoch=3, loss=0.5).need("loss")
    0.5
    """

    epoch: int | None = None
    step: int | None = None
    examples: int | None = None
    tokens: int | None = None
    batch_size: int | None = None
    loss: float | None = None
    lr: float | None = None
    entropy: float | None = None
    noise_s: float | None = None
    noise_g2: float | None = None
    noise_reliable: bool | None = None
    noise_parts: int | None = None
    seconds: float | None = None
    memory_fraction: float | None = None
    size: int | None = None

    def need(self, name: str, *, by: str = "this policy") -> Any:
        """Return a figure, or say that it is missing and where it comes from.

        Args:
            name: of the field.
            by: who needs it, for the message.
        """
        value = getattr(self, name)
        if value is None:
            raise MissingSignalError(f"{by} needs {name}, which was not observed; {SOURCES[name]}")
        return value

    @property
    def current(self) -> int:
        """Return the size in force: the controller's, or that of the batch that ran."""
        value: int = self.size if self.size is not None else self.need("batch_size")
        return value
