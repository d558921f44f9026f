"""Serve live requests in batches, with only asyncio and NumPy.

``Batcher`` and ``batched`` collect single requests into batches by length, deadline and a learned time model.
"""

from ..errors import Closed as Closed
from ..errors import DeadlineExceeded as DeadlineExceeded
from ..errors import QueueFull as QueueFull
from ..errors import ResultError as ResultError
from ..errors import TooLarge as TooLarge
from .batcher import Batcher as Batcher
from .decorator import BatchedFunction as BatchedFunction
from .decorator import batched as batched
from .latency import LatencyModel as LatencyModel
from .mapping import Mapped as Mapped
from .settings import Settings as Settings
from .stats import Stats as Stats

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
