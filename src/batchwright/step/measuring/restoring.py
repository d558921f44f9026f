"""Restoring: everything that training changes is held in host memory, and put back to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...errors import ArgumentError
from ..oom import Snapshot, devices_of


@contextmanager
def restored(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer] = ()) -> Iterator[None]:
    """Put back parameters, buffers, gradients, optimizer state, modes and random state, even after an error.

    Tensors keep their identity and get their bits back. What did not exist before (gradients, optimizer state,
    buffers) is gone afterwards. Copies are kept in host memory, so that the device has as much room as in training.

    >>> model = nn.Linear(1, 1)
    >>> before = model.weight.item()
    >>> with restored([model]):
    ...     _ = nn.init.zeros_(model.weight)
    >>> model.weight.item() == before
    True
    """
    modules, optimizers = list(modules), list(optimizers)
    random_state = Snapshot(None, [device for module in modules for device in devices_of(module)])
    held = _Held()
    for module in modules:
        held.add_module(module)
    for optimizer in optimizers:
        held.add_optimizer(optimizer)
    try:
        yield
    finally:
        held.put_back()
        random_state.restore()


@final
class _Held:
    """Values as they were; each tensor is copied once, however often it is referred to."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._actions: list[Callable[[], Any]] = []

    def add_module(self, module: nn.Module) -> None:
        for part in module.modules():
            self._actions.append(self._hold(part._parameters))
            self._actions.append(self._hold(part._buffers))
            self._actions.append(_setter(part, "training", part.training))
        for parameter in module.parameters():
            self._add_parameter(parameter)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._actions.append(self._hold(optimizer.state))
        self._actions.append(self._hold(optimizer.param_groups))
        for group in optimizer.param_groups:  # it may train parameters that are in none of the modules
            for parameter in group["params"]:
                self._add_parameter(parameter)

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, value in self._tensors.values():
                if value is not None:
                    _local(tensor).copy_(value)
        for action in self._actions:
            action()

    def _add_parameter(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._hold(parameter.grad)
        self._actions.append(_setter(parameter, "requires_grad", parameter.requires_grad))
        self._actions.append(_setter(parameter, "grad", parameter.grad))

    def _hold(self, value: Any) -> Callable[[], Any]:
        """Return a function that gives the value back as it was, and as the same object if it can be changed."""
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = (value, _host_copy(value))
            return lambda: value
        if isinstance(value, dict):
            entries = {key: self._hold(item) for key, item in value.items()}
            return lambda: _refill(value, {key: item() for key, item in entries.items()})
        if isinstance(value, list | tuple):
            items = [self._hold(item) for item in value]
            return lambda: _reorder(value, [item() for item in items])
        kept = copy.deepcopy(value)
        return lambda: kept


def _refill(value: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    value.clear()
    value.update(entries)
    return value


def _reorder(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(value, list):
        value[:] = items
    return value  # a tuple holds the same tensors as before, which have their values back


def _setter(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _host_copy(tensor: Tensor) -> Tensor | None:
    """Return a copy in host memory; None for a tensor that cannot be written to, and so cannot change."""
    if is_lazy(tensor):
        raise ArgumentError("a lazy module has no parameters yet; run one batch through the model first")
    local = _local(tensor)
    shares_memory = any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))
    return None if local.is_meta or shares_memory else local.to("cpu", copy=True)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or any other tensor itself; detached."""
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached
