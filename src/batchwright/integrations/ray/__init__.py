"""Ray: a Serve deployment that answers in batches, and Data batches within a budget."""

from ..._optional import require

require("ray", extra="ray")

# After the check, so that its message is read.
from .data import PlannedDataset, plan_dataset  # noqa: E402
from .deployment import batched_deployment  # noqa: E402

__all__ = ["PlannedDataset", "batched_deployment", "plan_dataset"]
