"""Which examples share a batch: lengths, budgets, groupings, plans, samplers. NumPy only.

A name is loaded when it is first used: a plan needs neither samplers, streams, memory models nor the cache of lengths.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "measure_lengths",
    "plan_batches",
    "regroup",
]

_HOMES = {
    **dict.fromkeys(("Budget", "MaxCost", "MaxItems", "MaxTokens"), "budget"),
    **dict.fromkeys(("PadTo", "Rows"), "collating"),
    "Grouping": "grouping.base",
    "Buckets": "grouping.buckets",
    "Packed": "grouping.packed",
    **dict.fromkeys(("InOrder", "Sorted", "WindowSort"), "grouping.sorting"),
    "measure_lengths": "lengths.measuring",
    **dict.fromkeys(("MaxBytes", "MemoryModel"), "models.memory"),
    "MemoryPrior": "models.prior",
    "TimeModel": "models.time",
    **dict.fromkeys(("Plan", "plan_batches"), "plan"),
    "PlanReport": "report",
    "BatchSampler": "sampler.planned",
    **dict.fromkeys(("Regrouped", "regroup"), "sampler.regrouping"),
    "ResizableBatchSampler": "sampler.resizable",
    "StreamBatcher": "sampler.stream",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load the file of a name when it is first used."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
