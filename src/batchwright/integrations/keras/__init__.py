"""Keras 3: exact updates in micro-batches (TensorFlow, torch), planned batches for ``fit`` (JAX too), batch sizes."""

from ..._optional import require

require("keras", extra="keras")  # first: it says what to install

from .callbacks import BatchSizeCallback  # noqa: E402
from .collating import pad_collate  # noqa: E402
from .data import PlannedDataset, to_tf_data  # noqa: E402
from .memory import TensorFlowMemory  # noqa: E402
from .training import AdaptiveUpdates, UpdateReport, adaptive  # noqa: E402

__all__ = [
    "AdaptiveUpdates",
    "BatchSizeCallback",
    "PlannedDataset",
    "TensorFlowMemory",
    "UpdateReport",
    "adaptive",
    "pad_collate",
    "to_tf_data",
]
