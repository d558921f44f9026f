"""When does a batch of live requests close? asyncio and NumPy only.

``Batcher`` and ``batched`` collect single requests into batches: by length, deadline and a learned time model.
"""

from ._decorator import BatchedFunction as BatchedFunction
from ._decorator import batched as batched
from ._errors import Closed as Closed
from ._errors import DeadlineExceeded as DeadlineExceeded
from ._errors import QueueFull as QueueFull
from ._errors import ResultError as ResultError
from ._errors import TooLarge as TooLarge
from ._map import Mapped as Mapped
from ._settings import Settings as Settings
from ._stats import Stats as Stats
from .batcher import Batcher as Batcher
from .latency import LatencyModel as LatencyModel

__all__ = [
    "BatchedFunction",
    "Batcher",
    "Closed",
    "DeadlineExceeded",
    "LatencyModel",
    "Mapped",
    "QueueFull",
    "ResultError",
    "Settings",
    "Stats",
    "TooLarge",
    "batched",
]
