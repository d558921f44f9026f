"""How much of a batch runs at once: a limit, what running out of memory taught, and growing back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, final

# After this many steps without trouble the ceiling is raised by a tenth, at most to just under the last failure.
CLEAN_STEPS = 16
GROWTH = 1.1
BELOW_FAILURE = 0.95
# A failure is forgotten after this many clean steps at the ceiling: what filled the device may be gone.
FORGET_AFTER = 512


@final
@dataclass(frozen=True)
class MicroLimit:
    """The largest cost of a micro-batch believed to fit; a value, replaced and never changed.

    The cost is whatever the splitter counts in: items, tokens, or a share of a budget. Additive-increase,
    multiplicative-decrease: a failure halves the ceiling, clean steps raise it slowly.

    Attributes:
        ceiling: micro-batches stay at or under this cost.
        failed_at: the least cost that ran out of memory and was not forgotten.
        num_clean: steps at the ceiling since the last change.
    """

    ceiling: float = math.inf
    failed_at: float = math.inf
    num_clean: int = 0

    def after_failure(self, cost: float) -> MicroLimit:
        """Return the limit after a micro-batch of this cost ran out of memory."""
        return MicroLimit(ceiling=min(self.ceiling, cost) / 2, failed_at=min(cost, self.failed_at))

    def after_success(self, largest: float) -> MicroLimit:
        """Return the limit after a step whose largest micro-batch had this cost.

        >>> limit = MicroLimit().after_failure(64)
        >>> for _ in range(CLEAN_STEPS):
        ...     limit = limit.after_success(32)
        >>> limit.ceiling
        35.2
        """
        if not math.isfinite(self.ceiling) or largest < self.ceiling / GROWTH:
            return self  # nothing was learned: the step did not come near the ceiling
        num_clean = self.num_clean + 1
        if num_clean % CLEAN_STEPS:
            return replace(self, num_clean=num_clean)
        if num_clean >= FORGET_AFTER:
            return MicroLimit(ceiling=self.ceiling * GROWTH)
        ceiling = min(self.ceiling * GROWTH, self.failed_at * BELOW_FAILURE)
        raised = max(self.ceiling, ceiling)
        return replace(self, ceiling=round(raised, 6), num_clean=num_clean if raised == self.ceiling else 0)

    def to_state(self) -> dict[str, Any]:
        """Return the limit as JSON values; infinity is None."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    @staticmethod
    def from_state(state: dict[str, Any]) -> MicroLimit:
        """Return the limit of a saved state."""
        ceiling, failed_at = (math.inf if state[name] is None else state[name] for name in ("ceiling", "failed_at"))
        return MicroLimit(ceiling, failed_at, state["num_clean"])
