"""Keras 3: exact updates in micro-batches (TensorFlow, torch), planned batches for ``fit`` (JAX too), batch sizes."""

from ..._optional import require
from ...errors import MissingDependencyError

try:
    require("keras", extra="keras")  # first: it says what to install
except ModuleNotFoundError as error:  # Keras is there, and what it runs on is not
    backend = (error.name or "").split(".")[0]
    if backend not in ("tensorflow", "torch", "jax"):
        raise
    words = f"run: pip install {backend}, or set KERAS_BACKEND to the one of tensorflow, torch and jax that you have"
    raise MissingDependencyError(f"{backend}, the backend of Keras, is not installed; {words}", name=backend) from None

from .callbacks import BatchSizeCallback
from .collating import pad_collate
from .data import PlannedDataset, to_tf_data
from .memory import TensorFlowMemory
from .training import AdaptiveUpdates, UpdateReport, adaptive

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
