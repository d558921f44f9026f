"""The figures of updates and plans, by Lightning's own logging."""

from __future__ import annotations

from typing import Any

from ..step import StepReport


def log_report(trainer: Any, module: Any, report: StepReport, *, num_ooms: int, prefix: str) -> None:
    """Log an update when it is the turn of a log; between them nothing is read from the device.

    Args:
        trainer: knows the turn.
        module: logs.
        report: of the update, the same on all ranks.
        num_ooms: of all ranks since the start.
        prefix: of the names.
    """
    every = trainer.log_every_n_steps  # 0 turns logs off
    if every == 0 or trainer.global_step % every:
        return
    scale = None if report.noise is None else report.noise.scale
    figures = {
        "loss": report.loss,
        "batch_size": float(report.batch_size),
        "num_micro_batches": float(report.num_micro_batches),
        "noise_scale": scale,
        "memory_fraction": report.memory_fraction,
        "ooms": float(num_ooms),
    }
    known = {prefix + name: value for name, value in figures.items() if value is not None}
    module.log_dict(known, on_step=True, on_epoch=False, batch_size=report.batch_size)


def log_padding(module: Any, sampler: Any, *, prefix: str) -> None:
    """Log the share of padding in what is left of the epoch, where a plan knows it."""
    plan = getattr(sampler, "plan", None)
    if plan is None or len(plan) == 0:
        return
    shapes = plan.shapes.astype("int64")
    padded = int((shapes[:, 0] * shapes[:, 1:].sum(axis=1)).sum())
    real = int(plan.lengths[plan.indices].sum(dtype="int64"))
    module.log(f"{prefix}padding", 1 - real / padded, on_step=False, on_epoch=True, batch_size=1)
