"""The optimizer's step, which cannot be tried again: apply it without a surprise, allocate its state beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UpdateMemoryError
from ..size.learning_rate import scaled_lr
from .oom import add_back, drop_gradients, is_out_of_memory, set_aside


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


def allocate_state(optimizer: Optimizer) -> None:
    """Make an optimizer allocate its state without changing a parameter; nothing happens if it has state already.

    It runs ``step_of_zeros`` and then sets counts and averages back to zero.
    """
    parameters = _parameters(optimizer)
    if any(optimizer.state.get(parameter) for parameter in parameters):
        return
    held = set_aside(parameters)
    try:
        step_of_zeros(optimizer)
    finally:
        drop_gradients(parameters)
        add_back(held)
    _zero_state(optimizer)


def step_of_zeros(optimizer: Optimizer) -> None:
    """Run a step with gradients of zero, a learning rate of zero and no weight decay; the gradients remain."""
    parameters = _parameters(optimizer)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    with scaled_lr(optimizer, 0.0), _without_decay(optimizer):
        if _needs_closure(optimizer):
            optimizer.step(lambda: 0.0)
        else:
            apply_update(optimizer, parameters)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


@contextmanager
def _without_decay(optimizer: Optimizer) -> Iterator[None]:
    groups = [group for group in optimizer.param_groups if group.get("weight_decay") is not None]
    decays = [(group, group["weight_decay"]) for group in groups]
    for group, decay in decays:
        group["weight_decay"] = 0 * decay
    try:
        yield
    finally:
        for group, decay in decays:
            group["weight_decay"] = decay


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _zero_state(optimizer: Optimizer) -> None:
    with torch.no_grad():
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    state[name] = type(value)(0)


def check_optimizer(optimizer: Optimizer) -> None:
    pass


def check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    pass


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return list(dict.fromkeys(_parameters(optimizer)))


def current_lr(optimizer: Optimizer) -> float | None:
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)
