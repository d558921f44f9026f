"""Restoring: everything that training changes is held, in host memory or on its device, and put back to the bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...errors import ArgumentError
from ...size.learning_rate import innermost
from .._gradients import attempt
from ..memory.monitor import MemoryMonitor
from ..oom import Snapshot, devices_of
from ._contents import PLAIN, Contents, attributes_of, contents_of, is_left_alone


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
    held = Held(attributes=False)
    for module in modules:
        held.add_module(module)
    for optimizer in optimizers:
        held.add(optimizer)
    held.keep()
    try:
        yield
    finally:
        held.put_back()


@final
class Held:
    """Objects as they were, with all that they refer to; each is held once, however often it is referred to.

    ``add`` looks, ``keep`` copies tensors and arrays, and ``put_back``, as often as one likes, gives
    everything its values back in place: no object is replaced, except those that can only be copied. The random states
    of Python, NumPy, torch and the devices of the modules are held too.

    Args:
        parameters: hold the values of parameters and their gradients too.
        attributes: hold all attributes of modules and optimizers; False holds only parameters, buffers, parts, modes,
            states and groups.
    """

    def __init__(self, *, parameters: bool = True, attributes: bool = True) -> None:
        self._with_parameters, self._with_attributes = parameters, attributes
        self._seen: dict[int, Any] = {}
        self._values: list[_Tensor | _Array] = []
        self._contents: list[Contents] = []
        self._gradients: list[Callable[[], None]] = []
        self._closed: dict[int, tuple[Any, bytes]] = {}  # objects that show nothing, and what they were
        self._devices: dict[torch.device, None] = {}
        self._random = Snapshot(None, [])

    @property
    def num_bytes(self) -> int:
        """Return the memory that the copies take."""
        return sum(value.num_bytes for value in self._values) + sum(len(data) for _, data in self._closed.values())

    @property
    def optimizers(self) -> list[Any]:
        """Return the optimizers that were found, wherever they are."""
        return [value for value in self._seen.values() if isinstance(value, Optimizer)]

    def add_module(self, module: nn.Module) -> None:
        """Hold a module, and the random states of its devices."""
        self._devices.update(dict.fromkeys(devices_of(module)))
        self._random = Snapshot(None, self._devices)
        self.add(module)
        for tensor in [*module.parameters(), *module.buffers()]:  # scripted modules have them elsewhere
            self.add(tensor)

    def add(self, value: Any) -> None:
        """Hold an object and all that it refers to.

        Raises:
            ArgumentError: something in it can neither be put back nor copied.
        """
        waiting: list[tuple[Any, _Place, bool]] = [(value, (None, type(value).__name__), True)]
        while waiting:
            one, place, is_fixed = waiting.pop()
            if type(one) in PLAIN:
                continue
            if id(one) in self._closed and is_fixed:
                raise _cannot_hold(one, place)
            if id(one) in self._seen or (one is not value and not isinstance(one, Tensor) and is_left_alone(one)):
                continue
            self._seen[id(one)] = one
            for contents in self._look_at(one, place, is_fixed=is_fixed):
                if contents.put_back is not None:
                    self._contents.append(contents)
                is_tuple = contents.put_back is None
                waiting += [(item, (place, name), is_tuple) for name, item in contents.items if type(item) not in PLAIN]

    def _look_at(self, value: Any, place: _Place, *, is_fixed: bool) -> list[Contents]:
        if isinstance(value, Tensor):
            return self._look_at_tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._values.append(_Array(value))
            return list(attributes_of(value))
        found = contents_of(value, attributes=self._with_attributes)
        if found is None:
            data = _pickled(value)
            if data is None or is_fixed:
                raise _cannot_hold(value, place)
            self._closed[id(value)] = (value, data)
        return found or []

    def _look_at_tensor(self, tensor: Tensor) -> list[Contents]:
        if is_lazy(tensor):
            raise ArgumentError("a lazy module has no parameters yet; run one batch through the model first")
        if isinstance(tensor, nn.Parameter) and not self._with_parameters:
            return []
        self._values.append(_Tensor(tensor))
        found = list(attributes_of(tensor))
        if tensor.is_leaf:
            needed, gradient = tensor.requires_grad, tensor.grad
            self._gradients.append(lambda: _set_gradient(tensor, needed, gradient))
            found.append(Contents([("grad", gradient)], None))
        return found

    def keep(self, *, on_device: bool = False) -> None:
        """Copy tensors and arrays to host memory; call it once, after all objects were added.

        Args:
            on_device: copy tensors on their own devices instead: over a thousand times as fast, where there is room.
        """
        for value in self._values:
            value.keep(on_device=on_device)

    def put_back(self) -> None:
        """Give everything its values back."""
        with torch.no_grad():
            for value in self._values:
                value.put_back()
        fresh = {key: pickle.loads(data) for key, (one, data) in self._closed.items() if _pickled(one) != data}
        for contents in self._contents:
            assert contents.put_back is not None
            contents.put_back(lambda one: fresh.get(id(one), one))
        for set_gradient in self._gradients:
            set_gradient()
        self.restore_random()

    def restore_random(self) -> None:
        """Give only the random states back."""
        self._random.restore()


@final
class _Tensor:
    """A tensor, the memory that it lies in, and its values; one that nothing can write to has no copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._memory = tensor, _local(tensor)
        self._value: Tensor | None = None
        self._is_fixed = self._memory.is_meta or _overlaps(self._memory)

    @property
    def num_bytes(self) -> int:
        if self._is_fixed:
            return 0
        memory = self._memory
        if memory.layout is torch.sparse_coo:
            return int(memory._indices().nbytes + memory._values().nbytes)
        return memory.numel() * memory.element_size()

    def keep(self, *, on_device: bool) -> None:
        device = self._memory.device if on_device else "cpu"
        self._value = None if self._is_fixed else self._memory.to(device, copy=True)

    def put_back(self) -> None:
        tensor, memory = self._tensor, self._memory
        if self._value is None:
            return
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if memory.layout is not torch.strided:
                tensor.copy_(self._value)
                return
            memory.copy_(self._value)
            if not hasattr(tensor, "to_local") and not _is_same_memory(tensor, memory):
                tensor.data = memory  # it was given another one


@final
class _Array:
    """An array of NumPy and its values; one that nobody may write to has no copy."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._value: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        return self._array.nbytes if self._array.flags.writeable else 0

    def keep(self, *, on_device: bool) -> None:
        del on_device  # arrays are in host memory
        self._value = np.array(self._array, copy=True) if self._array.flags.writeable else None

    def put_back(self) -> None:
        if self._value is None:
            return
        if self._array.shape != self._value.shape:
            self._array.resize(self._value.shape, refcheck=False)
        self._array[...] = self._value


# Where an object was found: where the one that refers to it was, and its name there.
_Place = tuple[Any, Any]


def _cannot_hold(value: Any, place: _Place) -> ArgumentError:
    names: list[str] = []
    at: Any = place
    while at is not None:
        at, name = at
        names.insert(0, str(name))
    return ArgumentError(
        f"{'.'.join(names)} is a {type(value).__name__}, which training may change and which cannot be put back; keep "
        "it outside of the model and the optimizer, or in a type that can be copied"
    )


def _pickled(value: Any) -> bytes | None:
    """Return an object that shows no contents as bytes, to compare and to copy it; None if that is not possible."""
    try:
        return pickle.dumps(value)
    except Exception:  # each type has its own way to refuse
        return None


def _set_gradient(tensor: Tensor, needed: bool, gradient: Tensor | None) -> None:
    if not tensor.is_leaf:
        tensor.detach_()
    if tensor.requires_grad != needed:
        tensor.requires_grad = needed
    if tensor.grad is not gradient:
        tensor.grad = gradient


def _overlaps(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _is_same_memory(tensor: Tensor, memory: Tensor) -> bool:
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) == (memory.data_ptr(), memory.shape, memory.stride())


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or any other tensor itself; detached.

    What writes to it does not count as a change for a graph that the tensor is a part of.
    """
    detached = tensor.detach() if tensor.grad_fn is None else tensor.data
    return detached.to_local() if hasattr(detached, "to_local") else detached


def has_room_for(num_bytes: int, memory: MemoryMonitor | None, *, factor: int) -> bool:
    """Return whether a device holds copies beside updates of ``factor`` times the peak so far; False without one."""
    return memory is not None and memory.total_bytes - factor * memory.peak_bytes >= num_bytes


def free_host_bytes() -> int | None:
    """Return the host memory that is left, None if nobody can tell."""
    monitor, error = attempt(lambda: MemoryMonitor("cpu"))
    free, error = (None, error) if monitor is None else attempt(lambda: monitor.total_bytes - monitor.used_bytes)
    return None if error is not None else free


def sorted_out(restore: Any) -> tuple[list[nn.Module], list[Any]]:
    """Return the modules and the innermost optimizers of what a user names."""
    given = [restore] if isinstance(restore, nn.Module | Optimizer) else list(restore)
    modules = [one for one in given if isinstance(one, nn.Module)]
    optimizers = [innermost(one) for one in given if isinstance(one, Optimizer)]
    if len(modules) + len(optimizers) < len(given):
        raise ArgumentError(f"restore must hold modules and optimizers only, got {restore!r}")
    return modules, optimizers
