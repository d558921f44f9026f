"""Apply an update once: ``optimizer.step`` cannot be tried again, so it must not run out of memory half-way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import UpdateMemoryError
from .oom import is_out_of_memory


def apply_update(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], scaler: torch.amp.GradScaler | None = None
) -> None:
    """Run the optimizer's step; if memory runs out, say whether parameters have changed.

    Raises:
        UpdateMemoryError: the step ran out of memory.
    """
    versions = [parameter._version for parameter in parameters]
    try:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        changed = sum(parameter._version != version for parameter, version in zip(parameters, versions, strict=True))
        done = f"{changed} of {len(versions)} parameters have changed" if changed else "no parameter has changed"
        raise UpdateMemoryError(
            f"out of memory in optimizer.step; {done}. Call stepper.warm_up() before training so that the optimizer's "
            "state is allocated first, or leave it more room with a smaller budget"
        ) from error
