"""Accelerate: planned or resizable batches and exact updates, with ``prepare`` in place of ``accelerator.prepare``."""

from ..._optional import require

require("torch", extra="accelerate")
require("accelerate", extra="accelerate")

# After the check, so that its message is read.
from .preparation import prepare  # noqa: E402
from .training import AcceleratedStepper, Prepared, PreparedLoader  # noqa: E402

__all__ = ["AcceleratedStepper", "Prepared", "PreparedLoader", "prepare"]
