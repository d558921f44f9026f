"""SizeExperiment: what branches of training at several batch sizes gave, and what they took."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import numpy as np


@final
@dataclass(frozen=True)
class SizeBranch:
    """Training at one multiple of the batch size, from the same state and on the same examples as all other branches.

    Attributes:
        factor: how many batches formed one update.
        batch_size: the examples of an update over all ranks, on average.
        num_updates: that were run, over all repeats.
        losses: on held-out batches after the branch, one per pair; infinite where training diverged.
        seconds: that the examples of one repeat take, from the median update. The first update of a repeat does not
            count where there are more, and evaluations do not.
        peak_bytes: the most memory at once, None if it was not measured.
        is_joined: whether batches were joined before they ran; if not, they ran one after the other.
        is_graphed: whether all micro-batches were replayed from graphs.
        curve: seconds of training and the losses by then, one pair of them per evaluation; the last one is ``seconds``
            and ``losses``.
    """

    factor: int
    batch_size: float
    num_updates: int
    losses: tuple[float, ...]
    seconds: float
    peak_bytes: int | None
    is_joined: bool
    is_graphed: bool
    curve: tuple[tuple[float, tuple[float, ...]], ...]

    @property
    def loss(self) -> float:
        """Return the mean of the losses."""
        return sum(self.losses) / len(self.losses)

    def by(self, seconds: float) -> float:
        """Return the mean loss after some seconds, on straight lines between evaluations; beyond them, the nearest."""
        means = [sum(losses) / len(losses) for _, losses in self.curve]
        if not all(map(math.isfinite, means)):
            return math.inf
        return float(np.interp(seconds, [moment for moment, _ in self.curve], means))

    @property
    def has_diverged(self) -> bool:
        """Return whether a loss is infinite or no number."""
        return math.isinf(self.loss)


@final
@dataclass(frozen=True)
class SizeExperiment:
    """What ``measure_size`` found; ``controller.observe(**experiment.observation())`` hands it to ``size.measured``.

    Losses of different branches are paired: number ``i`` of each was measured on the same held-out batch, or after the
    same repeat.

    Attributes:
        branches: one per factor.
        before: the losses on held-out batches before any branch, one per pair.
        examples: that each branch trained on, in one repeat, over all ranks.
        pairs: what a pair is: a held-out ``"batch"``, or with several repeats a ``"repeat"``.
        lr_rule: how branches scaled the learning rate.
        beta2_rule: how they changed beta2.
        notes: what to know when the figures are read.
        total_seconds: that everything took: copies, branches, evaluations and putting back.
        copy_bytes: memory of the copies, on the host or on the device.
    """

    branches: tuple[SizeBranch, ...]
    before: tuple[float, ...]
    examples: int
    pairs: Literal["batch", "repeat"]
    lr_rule: str
    beta2_rule: str
    notes: tuple[str, ...]
    total_seconds: float
    copy_bytes: int

    @property
    def peak_bytes(self) -> int | None:
        """Return the most memory that a branch took, None if it was not measured."""
        return max((branch.peak_bytes for branch in self.branches if branch.peak_bytes is not None), default=None)

    def observation(self) -> dict[str, Any]:
        """Return what ``size.measured`` observes, as plain values: ``controller.observe(**experiment.observation())``.

        It names no batch size, so that the controller counts no update.
        """
        return {
            "experiment": {
                "factors": [branch.factor for branch in self.branches],
                "losses": {str(branch.factor): list(branch.losses) for branch in self.branches},
                "seconds": {str(branch.factor): branch.seconds for branch in self.branches},
                "examples": self.examples,
                "before": list(self.before),
                "curve": {
                    str(branch.factor): [[seconds, list(losses)] for seconds, losses in branch.curve]
                    for branch in self.branches
                },
            }
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**asdict(self), "peak_bytes": self.peak_bytes}

    def __str__(self) -> str:
        start = sum(self.before) / len(self.before)
        least = self.branches[0]
        rows = [("factor", "batch size", "updates", "seconds", "loss", f"at {least.factor} by then", "peak")]
        for branch in self.branches:
            peak = "" if branch.peak_bytes is None else f"{branch.peak_bytes / 2**20:,.0f} MiB"
            loss, by_then = (
                "diverged" if math.isinf(one) else f"{one:.4f}" for one in (branch.loss, least.by(branch.seconds))
            )
            size = f"{branch.batch_size:g}"
            rows.append(
                (f"{branch.factor}", size, f"{branch.num_updates}", f"{branch.seconds:.3g}", loss, by_then, peak)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        about = (
            f"{len(self.branches[0].losses)} pairs by {self.pairs}, loss {start:.4f} before, {self.examples} examples "
            f"per branch; lr_rule {self.lr_rule}, beta2_rule {self.beta2_rule}; {self.total_seconds:.3g} s in all, "
            f"copies of {self.copy_bytes / 2**20:,.1f} MiB"
        )
        return "\n".join([*lines, about, *self.notes])
