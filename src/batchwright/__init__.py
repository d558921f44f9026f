"""The right batch at every step.

``plan`` decides which examples share a batch, within a budget of items, tokens or memory. Importing batchwright needs
NumPy alone; parts that need more live in modules of their own.
"""

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
from .plan import Packed as Packed
from .plan import PadTo as PadTo
from .plan import Plan as Plan
from .plan import PlanReport as PlanReport
from .plan import Rows as Rows
from .plan import Sorted as Sorted
from .plan import StreamBatcher as StreamBatcher
from .plan import TimeModel as TimeModel
from .plan import WindowSort as WindowSort
from .plan import measure_lengths as measure_lengths
from .plan import plan_batches as plan_batches

__all__ = [
    "BatchSampler",
    "Buckets",
    "Budget",
    "Grouping",
    "InOrder",
    "MaxBytes",
    "MaxCost",
    "MaxItems",
    "MaxTokens",
    "MemoryModel",
    "Packed",
    "PadTo",
    "Plan",
    "PlanReport",
    "Rows",
    "Sorted",
    "StreamBatcher",
    "TimeModel",
    "WindowSort",
    "errors",
    "measure_lengths",
    "plan_batches",
]
