"""Log the figures of every update to TensorBoard, or to anything with ``log(figures, step)``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, final

from .._checks import as_whole
from .._optional import is_installed
from ..errors import ArgumentError, MissingDependencyError
from ..size import BatchSizeController

if TYPE_CHECKING:
    from ..step.report import StepReport

__all__ = ["Logger", "StepLogger", "TensorBoardLogger", "figures_of"]


class Logger(Protocol):
    """Anything that takes figures; a ``wandb`` run does, with ``step`` by name."""

    def log(self, figures: Mapping[str, float], step: int) -> Any:
        """Take the figures of an update."""


def figures_of(
    report: StepReport, controller: BatchSizeController | None = None, **more: float | None
) -> dict[str, float]:
    """Return the figures of an update that are worth plotting, by name; those not measured are left out.

    ``batch/size``, ``batch/next_size`` and ``batch/num_changes`` of the controller, ``batch/micro_batches``,
    ``memory/ooms``, ``memory/peak_bytes``, ``memory/fraction``, ``noise/s``, ``noise/g2``, ``noise/scale``,
    ``train/loss``, ``train/lr``, ``train/entropy``, ``train/grad_norm``, ``train/seconds``.

    Args:
        report: the report of the update; reading it waits for the device.
        controller: the controller of the batch size.
        **more: further figures, e.g. ``padding=plan.report().padding``; their names get the prefix ``batch/``.
    """
    found: dict[str, float | None] = {
        "batch/size": report.batch_size,
        "batch/micro_batches": report.num_micro_batches,
        "memory/ooms": report.ooms,
        "memory/peak_bytes": report.peak_bytes,
        "memory/fraction": report.memory_fraction,
        **{f"noise/{name}": getattr(report.noise, name, None) for name in ("s", "g2", "scale")},
        "train/loss": report.loss,
        "train/lr": report.lr,
        "train/entropy": report.entropy,
        "train/grad_norm": report.grad_norm,
        "train/seconds": report.seconds,
        **{f"batch/{name}": value for name, value in more.items()},
    }
    if controller is not None:
        found |= {"batch/next_size": controller.size, "batch/num_changes": controller.num_changes}
    return {name: float(value) for name, value in found.items() if value is not None}


@final
class StepLogger:
    """Logs updates: call it with the report of each.

    Args:
        logger: has ``log(figures, step)``.
        controller: the controller of the batch size; log after ``controller.observe``, so that the next size is known.
        every: log only every n-th update; an update that ran out of memory is always logged.

    >>> import torch
    >>> from batchwright.step import Stepper
    >>> class Printer:
    ...     def log(self, figures, step):
    ...         print(step, figures["batch/size"], figures["batch/padding"])
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> stepper = Stepper(model, optimizer, lambda model, x: (model(x).sum(), len(x)))
    >>> log = StepLogger(Printer(), every=2)
    >>> for _ in range(3):
    ...     log(stepper.step(torch.ones(4, 2)), padding=0.25)
    1 4.0 0.25
    3 4.0 0.25
    """

    def __init__(self, logger: Logger, *, controller: BatchSizeController | None = None, every: int = 1) -> None:
        if not callable(getattr(logger, "log", None)):
            raise ArgumentError(f"logger must have log(figures, step), got {logger!r}")
        self._logger = logger
        self._controller = controller
        self._every = as_whole("every", every, least=1)
        self._num_updates = 0

    def __call__(self, report: StepReport, **more: float | None) -> None:
        """Count an update, and log it if it is due.

        Args:
            report: the report of the update.
            **more: further figures, such as ``padding``.
        """
        self._num_updates += 1
        if (self._num_updates - 1) % self._every == 0 or report.ooms:
            self._logger.log(figures_of(report, self._controller, **more), step=self._num_updates)


@final
class TensorBoardLogger:
    """Writes figures as scalars for TensorBoard; needs the package tensorboard. A context that closes its file.

    Args:
        folder: where ``tensorboard --logdir`` will look.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not is_installed("tensorboard"):
            raise MissingDependencyError(
                "tensorboard is not installed; run: pip install tensorboard", name="tensorboard"
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(folder))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of an update."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()

    def __enter__(self) -> TensorBoardLogger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
