"""Run a plan in a folder, over all processors, and continue where it stopped. Needs torch."""

from ..._optional import require

require("torch", extra="lab")

# After the check, so that its message is read.
from ...errors import StoreError as StoreError  # noqa: E402
from ..presets import Cell as Cell  # noqa: E402
from ..presets import LabPlan as LabPlan  # noqa: E402
from .forecast import Forecast as Forecast  # noqa: E402
from .lab import Lab as Lab  # noqa: E402

__all__ = ["Cell", "Forecast", "Lab", "LabPlan", "StoreError"]
