"""The learning rate of a cell: the best of a grid for the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

from ..errors import BatchwrightError
from ._run_record import Record


@final
@dataclass(frozen=True)
class Score:
    """How the baseline did at one rate, means over the tuning seeds; None where a run failed or diverged."""

    lr: float
    metric: float | None
    validation_loss: float | None

    @property
    def rank(self) -> tuple[float, float]:
        """Return what decides: the metric, and between equal ones the loss."""
        worst = -math.inf
        return worst if self.metric is None else self.metric, -(
            math.inf if self.validation_loss is None else self.validation_loss
        )


def score_rates(records: Iterable[Record]) -> list[Score]:
    """Return the scores of the learning rates that runs of the baseline were made with."""
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for record in records:
        by_rate.setdefault(record["settings"]["lr"], []).append(record["final"] or {})
    return [Score(rate, _mean(finals, "metric"), _mean(finals, "validation_loss")) for rate, finals in by_rate.items()]


def best_rate(scores: Iterable[Score]) -> float:
    """Return the rate with the best metric; between equal ones that with the lower loss.

    >>> best_rate([Score(0.1, 0.9, 0.5), Score(0.01, 0.9, 0.4), Score(1.0, None, None)])
    0.01
    """
    best = max(scores, key=lambda score: score.rank)
    if best.metric is None:
        raise BatchwrightError(
            "the baseline failed or diverged at every learning rate of the grid; look into tuning.jsonl, "
            "or give the cell another grid or lr="
        )
    return best.lr


def _mean(finals: list[dict[str, Any]], name: str) -> float | None:
    values = [final.get(name) for final in finals]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
