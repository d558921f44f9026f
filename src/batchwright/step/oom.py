"""Running out of memory: recognise it, undo what a failed attempt left, remember what fits."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from .._oom import is_out_of_memory as is_out_of_memory


def free_memory(devices: Iterable[torch.device]) -> None:
    """Collect what nothing refers to and return the allocator's unused blocks to the device.

    Call it outside the ``except`` block: there the traceback still holds the activations.
    """
    gc.collect()
    for device in devices:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif device.type == "mps":
            torch.mps.empty_cache()


@final
class Snapshot:
    """Random state and a module's buffers as they were, to make a second attempt the first one again."""

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


@final
class Buffers:
    """The buffers of a module at any time, without the walk through all its parts that ``module.buffers()`` takes."""

    def __init__(self, module: nn.Module) -> None:
        # The dictionaries stay the same objects when buffers are added or replaced.
        self._of_parts = [part._buffers for part in module.modules()]

    def __iter__(self) -> Iterator[Tensor]:
        for buffers in self._of_parts:
            for buffer in buffers.values():
                if buffer is not None:
                    yield buffer


def devices_of(module: nn.Module) -> list[torch.device]:
    """Return the devices a module lies on, the CPU left out."""
    found = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


def _get_device_state(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    if device.type == "mps":
        return torch.mps.get_rng_state()
    return None


def _set_device_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


Held: TypeAlias = "list[tuple[nn.Parameter, Tensor]]"


def set_aside(parameters: Sequence[nn.Parameter]) -> Held:
    """Return the gradients that are there, and leave none."""
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


# After this many steps without trouble the ceiling is raised by a tenth, at most to just under the last failure.
CLEAN_STEPS = 16
GROWTH = 1.1
BELOW_FAILURE = 0.95
# A failure is forgotten after this many clean steps at the ceiling: what filled the device may be gone.
FORGET_AFTER = 512


@final
@dataclass(frozen=True)
class MicroLimit:
    """The largest cost of a micro-batch believed to fit; a value, replaced and never changed.

    The cost is whatever the splitter counts in: items, tokens, or a share of a budget. Additive-increase,
    multiplicative-decrease: a failure halves the ceiling, clean steps raise it slowly.

    Attributes:
        ceiling: micro-batches stay at or under this cost.
        failed_at: the least cost that ran out of memory and was not forgotten.
        num_clean: steps at the ceiling since the last change.
    """

    ceiling: float = math.inf
    failed_at: float = math.inf
    num_clean: int = 0

    def after_failure(self, cost: float) -> MicroLimit:
        """Return the limit after a micro-batch of this cost ran out of memory."""
        return MicroLimit(ceiling=min(self.ceiling, cost) / 2, failed_at=min(cost, self.failed_at))

    def after_success(self, largest: float) -> MicroLimit:
        """Return the limit after a step whose largest micro-batch had this cost.

        >>> limit = MicroLimit().after_failure(64)
        >>> for _ in range(CLEAN_STEPS):
        ...     limit = limit.after_success(32)
        >>> limit.ceiling
        35.2
        """
        if not math.isfinite(self.ceiling) or largest < self.ceiling / GROWTH:
            return self  # nothing was learned: the step did not come near the ceiling
        num_clean = self.num_clean + 1
        if num_clean % CLEAN_STEPS:
            return replace(self, num_clean=num_clean)
        if num_clean >= FORGET_AFTER:
            return MicroLimit(ceiling=self.ceiling * GROWTH)
        ceiling = min(self.ceiling * GROWTH, self.failed_at * BELOW_FAILURE)
        raised = max(self.ceiling, ceiling)
        return replace(self, ceiling=round(raised, 6), num_clean=num_clean if raised == self.ceiling else 0)

    def to_state(self) -> dict[str, Any]:
        """Return the limit as JSON values; infinity is None."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}

    @staticmethod
    def from_state(state: dict[str, Any]) -> MicroLimit:
        """Return the limit of a saved state."""
        ceiling, failed_at = (math.inf if state[name] is None else state[name] for name in ("ceiling", "failed_at"))
        return MicroLimit(ceiling, failed_at, state["num_clean"])
