"""Apply an update once: ``optimizer.step`` cannot be tried again, so it must not run out of memory half-way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UpdateMemoryError
from ._gradient_slots import add_back, drop_gradients, set_aside
from .couple import scaled_lr
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


def allocate_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Make the optimizer allocate its state, without changing a parameter: a step of zero gradients at rate zero.

    Counts and averages are set back to zero afterwards; an optimizer that has state already is left alone.
    """
    if any(optimizer.state.get(parameter) for parameter in parameters):
        return
    held = set_aside(parameters)
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        if group.get("weight_decay") is not None:
            group["weight_decay"] = 0 * group["weight_decay"]
    try:
        with scaled_lr(optimizer, 0.0):
            apply_update(optimizer, parameters)
    finally:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
        drop_gradients(parameters)
        add_back(held)
    _zero_state(optimizer)


def _zero_state(optimizer: Optimizer) -> None:
    with torch.no_grad():
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    state[name] = type(value)(0)
