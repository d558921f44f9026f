"""Running out of memory: recognise it, undo what a failed attempt left, remember what fits, update without a surprise.

- ``Snapshot``, ``free_memory``: what a second attempt needs.
- ``set_aside``, ``add_back`` and others: gradients that an attempt must not lose.
- ``MicroLimit``: how large a micro-batch may be.
- ``apply_update``, ``allocate_state``: the optimizer's step, which cannot be tried again.
"""

from __future__ import annotations

import gc
import inspect
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._ceiling import Ceiling
from .._oom import is_out_of_memory as is_out_of_memory
from ..errors import UpdateMemoryError
from ..size.learning_rate import scaled_lr

# Gradients set aside, each with its parameter.
Held: TypeAlias = "list[tuple[nn.Parameter, Tensor]]"

# After this many clean steps the limit rises by a tenth, at most to just below the last failure.
CLEAN_STEPS = 16
GROWTH = 1.1
BELOW_FAILURE = 0.95
# A failure is forgotten after this many clean steps near the limit: what filled the device may be gone.
FORGET_AFTER = 512


def free_memory(devices: Iterable[torch.device]) -> None:
    """Collect objects that nothing refers to, and return the allocator's unused blocks to the device.

    Call it outside the ``except`` block: inside, the traceback still holds the activations.
    """
    gc.collect()
    for device in devices:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif device.type == "mps":
            torch.mps.empty_cache()


def devices_of(module: nn.Module) -> list[torch.device]:
    """Return the devices that a module lies on, without the CPU."""
    found = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


@final
class Snapshot:
    """The random state and a module's buffers at one moment, so that a second attempt repeats the first."""

    def __init__(self, buffers: Iterable[Tensor], devices: Iterable[torch.device]) -> None:
        self._buffers: list[tuple[Tensor, Tensor]] = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices = [(device, _get_device_state(device)) for device in devices]

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            _set_device_state(device, state)


def _get_device_state(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def _set_device_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


@final
class Buffers:
    """The buffers of a module at any time, without the walk through all its parts that ``module.buffers()`` makes."""

    def __init__(self, module: nn.Module) -> None:
        # These dictionaries stay the same objects when buffers are added or replaced.
        self._of_parts = [part._buffers for part in module.modules()]

    def __iter__(self) -> Iterator[Tensor]:
        for buffers in self._of_parts:
            for buffer in buffers.values():
                if buffer is not None:
                    yield buffer


def set_aside(parameters: Sequence[nn.Parameter]) -> Held:
    """Take the gradients off their parameters and return them."""
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if held:
        drop_gradients(parameters)
    return held


def drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set every gradient to None."""
    for parameter in parameters:
        parameter.grad = None


def add_back(held: Held) -> None:
    """Add gradients to those that are there now, as ``backward`` would."""
    for parameter, gradient in held:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def present(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@final
@dataclass(frozen=True)
class MicroLimit:
    """The largest cost of a micro-batch that is believed to fit; a value, replaced and never changed.

    The cost is in the unit of the splitter: items, tokens, or a share of a budget. A failure halves the ceiling, every
    ``CLEAN_STEPS`` clean steps raise it by a tenth.

    Attributes:
        learned: the ceiling, the least cost that ran out of memory and is not forgotten, and the steps near the ceiling
            since its last change.
    """

    learned: Ceiling = field(default_factory=Ceiling)

    @property
    def ceiling(self) -> float:
        """Return the most that a micro-batch may cost."""
        return self.learned.limit

    def after_failure(self, cost: float) -> MicroLimit:
        """Return the limit after a micro-batch of this cost ran out of memory."""
        half = min(self.ceiling, cost) / 2
        return MicroLimit(self.learned.fall(half, failed_at=min(cost, self.learned.failed_at)))

    def after_success(self, largest: float) -> MicroLimit:
        """Return the limit after a step whose largest micro-batch had this cost.

        >>> limit = MicroLimit().after_failure(64)
        >>> for _ in range(CLEAN_STEPS):
        ...     limit = limit.after_success(32)
        >>> limit.ceiling
        35.2
        """
        if largest < self.ceiling / GROWTH:
            return self  # the step did not come near the ceiling, so nothing was learned
        counted = self.learned.count(forget_after=FORGET_AFTER)
        if counted.num_clean % CLEAN_STEPS == 0:
            counted = counted.rise(self.ceiling * GROWTH, share=BELOW_FAILURE, recount=True)
        return MicroLimit(counted)

    def to_state(self) -> dict[str, Any]:
        """Return the limit as JSON values; infinity is None."""
        values = {"ceiling": self.ceiling, "failed_at": self.learned.failed_at, "num_clean": self.learned.num_clean}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> MicroLimit:
        """Return the limit of a saved state."""
        ceiling, failed_at = (math.inf if state[name] is None else state[name] for name in ("ceiling", "failed_at"))
        return MicroLimit(Ceiling(ceiling, failed_at, state["num_clean"]))


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
