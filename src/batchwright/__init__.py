"""The right batch at every step.

``plan`` decides which examples share a batch, within a budget of items, tokens or memory; ``size`` how many the next
update uses. Importing batchwright needs only NumPy; parts that need more live in their own modules.
"""

from typing import TYPE_CHECKING, Any

from . import errors as errors
from ._version import __version__ as __version__
from .plan import BatchSampler as BatchSampler
from .plan import Buckets as Buckets
from .plan import Budget as Budget
from .plan import Grouping as Grouping
from .plan import InOrder as InOrder
from .plan import MaxBytes as MaxBytes
from .plan import MaxCost as MaxCost
from .plan import MaxItems as MaxItems
from .plan import MaxTokens as MaxTokens
from .plan import MemoryModel as MemoryModel
from .plan import MemoryPrior as MemoryPrior
from .plan import Packed as Packed
from .plan import PadTo as PadTo
from .plan import Plan as Plan
from .plan import PlanReport as PlanReport
from .plan import Regrouped as Regrouped
from .plan import ResizableBatchSampler as ResizableBatchSampler
from .plan import Rows as Rows
from .plan import Sorted as Sorted
from .plan import StreamBatcher as StreamBatcher
from .plan import TimeModel as TimeModel
from .plan import WindowSort as WindowSort
from .plan import measure_lengths as measure_lengths
from .plan import plan_batches as plan_batches
from .plan import regroup as regroup

if TYPE_CHECKING:
    from . import size as size
    from .size import BatchSizeController as BatchSizeController

__all__ = [
    "BatchSampler",
    "BatchSizeController",
    "Buckets",
    "Budget",
    "Grouping",
    "InOrder",
    "MaxBytes",
    "MaxCost",
    "MaxItems",
    "MaxTokens",
    "MemoryModel",
    "MemoryPrior",
    "Packed",
    "PadTo",
    "Plan",
    "PlanReport",
    "Regrouped",
    "ResizableBatchSampler",
    "Rows",
    "Sorted",
    "StreamBatcher",
    "TimeModel",
    "WindowSort",
    "errors",
    "measure_lengths",
    "plan_batches",
    "regroup",
    "size",
]


def __getattr__(name: str) -> Any:
    """Load the room of batch sizes when it is first asked for: its many small classes take a while to make."""
    if name not in ("size", "BatchSizeController"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
    from importlib import import_module

    size = import_module(".size", __name__)
    return size if name == "size" else size.BatchSizeController


def _hint(name: str) -> str:
    """Say how a room above this one is reached, and what it needs."""
    if name != "step":
        return ""
    from ._optional import is_installed

    needs = "" if is_installed("torch") else "; it needs torch, run: pip install 'batchwright[torch]'"
    return f" before it is imported, write: import batchwright.step{needs}"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
