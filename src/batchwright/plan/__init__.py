"""Which examples share a batch: lengths, budgets, groupings, plans, samplers. NumPy only."""

from .budget import Budget as Budget
from .budget import MaxCost as MaxCost
from .budget import MaxItems as MaxItems
from .budget import MaxTokens as MaxTokens
from .collating import PadTo as PadTo
from .collating import Rows as Rows
from .grouping.base import Grouping as Grouping
from .grouping.buckets import Buckets as Buckets
from .grouping.packed import Packed as Packed
from .grouping.sorting import InOrder as InOrder
from .grouping.sorting import Sorted as Sorted
from .grouping.sorting import WindowSort as WindowSort
from .lengths.measuring import measure_lengths as measure_lengths
from .models.memory import MaxBytes as MaxBytes
from .models.memory import MemoryModel as MemoryModel
from .models.prior import MemoryPrior as MemoryPrior
from .models.time import TimeModel as TimeModel
from .plan import Plan as Plan
from .plan import plan_batches as plan_batches
from .report import PlanReport as PlanReport
from .sampler.planned import BatchSampler as BatchSampler
from .sampler.regrouping import Regrouped as Regrouped
from .sampler.regrouping import regroup as regroup
from .sampler.resizable import ResizableBatchSampler as ResizableBatchSampler
from .sampler.stream import StreamBatcher as StreamBatcher
