"""Lightning: planned or resizable batches that survive DDP and checkpoints, and exact updates in a small module."""

from . import _package  # noqa: F401  # first: it says what to install
from .data import PlannedDataModule, planned_loader
from .modules import ExactUpdates
from .updates import AdaptiveBatching

__all__ = ["AdaptiveBatching", "ExactUpdates", "PlannedDataModule", "planned_loader"]
