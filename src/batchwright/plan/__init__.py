"""Which examples share a batch: lengths, budgets, groupings, plans, samplers. NumPy only."""

from ._pad import PadTo as PadTo
from ._plan import Plan as Plan
from ._plan import plan_batches as plan_batches
from ._prior import MemoryPrior as MemoryPrior
from ._regroup import Regrouped as Regrouped
from ._regroup import regroup as regroup
from ._report import PlanReport as PlanReport
from .budget import Budget as Budget
from .budget import MaxCost as MaxCost
from .budget import MaxItems as MaxItems
from .budget import MaxTokens as MaxTokens
from .grouping import Buckets as Buckets
from .grouping import Grouping as Grouping
from .grouping import InOrder as InOrder
from .grouping import Packed as Packed
from .grouping import Sorted as Sorted
from .grouping import WindowSort as WindowSort
from .lengths import measure_lengths as measure_lengths
from .memory_model import MaxBytes as MaxBytes
from .memory_model import MemoryModel as MemoryModel
from .resizable import ResizableBatchSampler as ResizableBatchSampler
from .rows import Rows as Rows
from .sampler import BatchSampler as BatchSampler
from .stream import StreamBatcher as StreamBatcher
from .time_model import TimeModel as TimeModel
