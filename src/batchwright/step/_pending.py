"""An update that is being put together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple, final

from torch import Tensor, nn

from ._sums import Totals


@final
class Summary(NamedTuple):
    """Sums of an update over all ranks."""

    weight: float
    loss_sum: float
    num_examples: int
    num_micro_batches: int
    metric_sums: dict[str, float]


@final
@dataclass
class Pending:
    """What ``accumulate`` has gathered and ``update`` will use."""

    divisor: float  # backward runs on loss_sum / divisor
    weight_known: bool  # the divisor is the weight itself, so nothing is left to multiply
    foreign: list[tuple[nn.Parameter, Tensor]]  # gradients that were there before
    totals: Totals = field(default_factory=Totals)
    ooms: int = 0
    started: float = field(default_factory=time.perf_counter)
    summary: Summary | None = None
    noise: tuple[float, float, int] | None = None
    is_reduced: bool = False
