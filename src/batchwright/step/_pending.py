"""An update that is being put together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from torch import Tensor, nn

from ._sums import Copied, Totals
from .report import NoiseReport


@final
class Summary(NamedTuple):
    """Sums of an update over all ranks; the weight and the counts are on the host, the rest may be on the device."""

    weight: float
    loss_sum: Tensor | float
    num_examples: int
    num_micro_batches: int
    ooms: int
    metric_sums: Mapping[str, Tensor | float]
    squares: Tensor | None


@final
@dataclass
class Pending:
    """What ``accumulate`` has gathered and ``update`` will use."""

    divisor: float | None  # backward runs on loss_sum / divisor; None: the first micro-batch decides
    fallback: float  # the divisor where weights do not count examples, a power of two
    weight_known: bool  # the divisor is the weight itself, so nothing is left to multiply
    foreign: list[tuple[nn.Parameter, Tensor]]  # gradients that were there before
    totals: Totals = field(default_factory=Totals)
    ooms: int = 0
    started: float = field(default_factory=time.perf_counter)
    summary: Summary | None = None
    noise: Callable[[], NoiseReport] | None = None
    is_reduced: bool = False

    def divide_by(self, weight: Tensor | Copied | float, num_examples: int, num_all: int) -> float:
        """Return the divisor; the first micro-batch of an update settles it.

        Where weights count examples, the whole batch weighs ``num_all``, and a micro-batch that is the whole batch has
        its weight: dividing by that leaves nothing to multiply afterwards. Elsewhere, and where the weight lies on a
        device that would have to be waited for, a power of two is divided by, which loses no digit.
        """
        if self.divisor is None:
            self.divisor = self.fallback
            if isinstance(weight, float) and weight == num_examples:
                self.divisor = float(num_all)
            elif num_examples == num_all and _is_on_host(weight) and 0 < float(weight) < math.inf:
                self.divisor = float(weight)
        return self.divisor


def _is_on_host(weight: Tensor | Copied | float) -> bool:
    return isinstance(weight, float) or (isinstance(weight, Tensor) and weight.is_cpu)
