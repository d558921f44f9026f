"""The right batch at every step.

``plan`` decides which examples share a batch, within a budget of items, tokens or memory; ``size`` how many the next
update uses. Importing batchwright needs only NumPy; parts that need more live in their own modules.
"""

from typing import TYPE_CHECKING, Any

from . import errors as errors
from ._version import __version__ as __version__

if TYPE_CHECKING:  # at run time __getattr__ loads a room when one of its names is first used
    from . import plan as plan
    from . import size as size
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


if not TYPE_CHECKING:  # or a type checker would take every misspelt name for one that is loaded here

    def __getattr__(name: str) -> Any:
        """Load the room of a name when it is first used: the many small classes of the rooms take a while to make."""
        from importlib import import_module

        if name in ("plan", "size"):
            return import_module(f".{name}", __name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
        room = import_module(".size" if name == "BatchSizeController" else ".plan", __name__)
        value = globals()[name] = getattr(room, name)  # the next use finds it at once
        return value


def _hint(name: str) -> str:
    """Say how a room above this one, or what is looked for most in it, is reached, and what it needs."""
    rooms = ("integrations", "lab", "serve", "step", "testing")
    inside = dict.fromkeys(("PadCollator", "Stepper", "calibrate", "generate", "supervised_loss"), "step")
    inside |= dict.fromkeys(("Batcher", "batched"), "serve") | {"goodput": "size", "Lab": "lab"}
    inside |= dict.fromkeys(("check_batch_sampler", "check_policy"), "testing")
    inside |= {"adaptive": "integrations.huggingface", "prepare": "integrations.accelerate"}
    room = name if name in rooms else inside.get(name)
    if room is None:
        return ""
    from ._optional import is_installed

    missing = room == "step" and not is_installed("torch")
    needs = "; it needs torch, run: pip install 'batchwright[torch]'" if missing else ""
    if name in inside:
        return f"; write: from batchwright.{room} import {name}{needs}"
    return f" before it is imported, write: import batchwright.{name}{needs}"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "plan"})
