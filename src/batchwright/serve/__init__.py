"""Serve live requests in batches, with only asyncio and NumPy.

``Batcher`` and ``batched`` collect single requests into batches by length, deadline and a learned time model.
"""

from ..errors import Closed as Closed
from ..errors import DeadlineExceeded as DeadlineExceeded
from ..errors import QueueFull as QueueFull
from ..errors import ResultError as ResultError
from ..errors import RunInterrupted as RunInterrupted
from ..errors import RunTimeout as RunTimeout
from ..errors import TooLarge as TooLarge
from ..errors import WorkerDied as WorkerDied
from .background import Background as Background
from .background import BackgroundBatch as BackgroundBatch
from .background import give_way as give_way
from .batcher import Batcher as Batcher
from .decorator import BatchedFunction as BatchedFunction
from .decorator import batched as batched
from .device import Device as Device
from .latency import LatencyModel as LatencyModel
from .lengths import guess_length as guess_length
from .mapping import Mapped as Mapped
from .settings import Settings as Settings
from .stats import Stats as Stats

__all__ = [
    "Background",
    "BackgroundBatch",
    "BatchedFunction",
    "Batcher",
    "Closed",
    "DeadlineExceeded",
    "Device",
    "LatencyModel",
    "Mapped",
    "QueueFull",
    "ResultError",
    "RunInterrupted",
    "RunTimeout",
    "Settings",
    "Stats",
    "TooLarge",
    "WorkerDied",
    "batched",
    "give_way",
    "guess_length",
]
