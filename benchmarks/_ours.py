"""batchwright's own groupings, through its public names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, final

from _arm import PLAN_SEED, Planner
from _metrics import WORLD_SIZE, Batches, IntArray


@final
class Ours(Planner):
    """``bw.plan_batches`` under ``bw.MaxTokens(budget)``.

    Args:
        lengths: one length an example.
        budget: the largest number of padded tokens per batch.
        grouping: the name of a grouping of batchwright, e.g. ``"Buckets"``. Rows of ``"Packed"`` are as long as
            the budget, so that a batch is one row.
        balance_over: the option of ``plan_batches``: how many ranks are balanced.
        use_numba: False hides numba from this process, as if it were not installed.
        options: what the grouping is built with.
    """

    def __init__(
        self,
        lengths: IntArray,
        budget: int,
        *,
        grouping: str,
        balance_over: int = WORLD_SIZE,
        use_numba: bool = True,
        **options: int,
    ) -> None:
        super().__init__(lengths, budget)
        if not use_numba:
            sys.modules["numba"] = None  # type: ignore[assignment]
        import batchwright as bw

        if grouping == "Packed":
            options["capacity"] = budget
        self._plan_batches: Callable[..., Any] = partial(bw.plan_batches, seed=PLAN_SEED, balance_over=balance_over)
        self._budget = bw.MaxTokens(budget)
        self._grouping = getattr(bw, grouping)(**options)

    def plan(self, epoch: int) -> Any:
        return self._plan_batches(self.lengths, self._budget, grouping=self._grouping, epoch=epoch)

    def batches(self, plan: Any) -> Batches:
        if plan.row_offsets is None:
            return Batches(plan.indices, plan.offsets, padded_lengths=plan.shapes[:, 1:])
        return Batches(plan.indices, plan.offsets, capacity=self.budget, num_rows=plan.shapes[:, 0])
