"""Restoring: everything that training changes is held in host memory, and put back to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...errors import ArgumentError
from ...size.learning_rate import innermost
from ..oom import Snapshot, devices_of

# Names that a module has of itself; what else it has as numbers and tensors is put back.
_OF_MODULES = frozenset(vars(nn.Module()))


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
    held = Held()
    for module in modules:
        held.add_module(module)
    for optimizer in optimizers:
        held.add_optimizer(optimizer)
    try:
        yield
    finally:
        held.put_back()


@final
class Held:
    """Values as they were; each tensor is copied once to host memory, however often it is referred to.

    The random states of Python, NumPy, torch and the devices of the modules are held too. ``put_back`` may be called
    as often as one likes.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._actions: list[Callable[[], Any]] = []
        self._devices: dict[torch.device, None] = {}
        self._random = Snapshot(None, [])

    @property
    def num_bytes(self) -> int:
        """Return the host memory of the copies."""
        return sum(value.nbytes for _, value in self._tensors.values() if value is not None)

    def add_module(self, module: nn.Module, *, with_parameters: bool = True, with_attributes: bool = False) -> None:
        """Hold buffers and modes; with parameters, gradients too; with attributes, what ``add_attributes`` holds."""
        self._devices.update(dict.fromkeys(devices_of(module)))
        self._random = Snapshot(None, self._devices)
        for part in module.modules():
            if with_parameters:
                self._actions.append(self._hold(part._parameters))
            self._actions.append(self._hold(part._buffers))
            self._actions.append(_setter(part, "training", part.training))
            if with_attributes:
                self.add_attributes(part, besides=_OF_MODULES)
        for parameter in module.parameters() if with_parameters else ():
            self._add_parameter(parameter)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Hold the state, the groups and all parameters of an optimizer."""
        self._actions.append(self._hold(optimizer.state))
        self._actions.append(self._hold(optimizer.param_groups))
        for group in optimizer.param_groups:  # it may train parameters that are in none of the modules
            for parameter in group["params"]:
                self._add_parameter(parameter)

    def add_attributes(self, owner: Any, *, besides: Iterable[str] = ()) -> None:
        """Hold the attributes of an object that are numbers, texts, tensors, generators, or lists and dicts of these.

        Such attributes that come later are gone after ``put_back``. Others are left alone.

        Args:
            owner: has the attributes.
            besides: names that are left alone.
        """
        values, left_out = vars(owner), frozenset(besides)
        names = [name for name, value in values.items() if name not in left_out and _is_simple(value)]
        known = frozenset(values)
        kept = {name: self._hold(values[name]) for name in names}

        def put_back() -> None:
            for name in [name for name in values if name not in known and _is_simple(values[name])]:
                del values[name]
            values.update({name: value() for name, value in kept.items()})

        self._actions.append(put_back)

    def put_back(self) -> None:
        """Give everything its values back."""
        with torch.no_grad():
            for tensor, value in self._tensors.values():
                if value is not None:
                    _local(tensor).copy_(value)
        for action in self._actions:
            action()
        self.restore_random()

    def restore_random(self) -> None:
        """Give only the random states back."""
        self._random.restore()

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
        if isinstance(value, torch.Generator):
            state = value.get_state()
            return lambda: value.set_state(state)
        kept = copy.deepcopy(value)
        return lambda: kept


def _is_simple(value: Any) -> bool:
    """Say whether a value can be held: a number, a text, a tensor, a generator, or a list or dict of these."""
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_simple, value))
    if isinstance(value, Tensor):
        return not value.requires_grad or value.is_leaf
    return value is None or isinstance(value, bool | int | float | complex | str | torch.Generator)


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


def with_inner(optimizers: Sequence[Any]) -> list[Any]:
    """Return optimizers and those that they hold as attributes, each once."""
    found: dict[int, Any] = {}
    waiting = list(optimizers)
    while waiting:
        one = waiting.pop(0)
        if id(one) not in found:
            found[id(one)] = one
            waiting += [value for value in vars(one).values() if isinstance(value, Optimizer)]
    return list(found.values())


def sorted_out(restore: Any) -> tuple[list[nn.Module], list[Any]]:
    """Return the modules and the innermost optimizers of what a user names."""
    given = [restore] if isinstance(restore, nn.Module | Optimizer) else list(restore)
    modules = [one for one in given if isinstance(one, nn.Module)]
    optimizers = [innermost(one) for one in given if isinstance(one, Optimizer)]
    if len(modules) + len(optimizers) < len(given):
        raise ArgumentError(f"restore must hold modules and optimizers only, got {restore!r}")
    return modules, optimizers
