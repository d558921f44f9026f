"""``MemoryCleanupCallback``, the only name here that needs transformers: less fragmentation between epochs."""

from __future__ import annotations

from typing import Any, final

import torch
from transformers import TrainerCallback

from ...step.oom import free_memory
from .._devices import accelerators


@final
class MemoryCleanupCallback(TrainerCallback):
    """Return unused memory to the device after every evaluation and every epoch."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clean up after the evaluation loop."""
        _clean_up()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clean up at the end of an epoch."""
        _clean_up()


def _clean_up() -> None:
    free_memory(accelerators())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
