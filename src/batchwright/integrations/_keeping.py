"""Keeping: plain values get their contents back in place, as the same objects, after a loss was tried out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._contents import is_filled

_MOST_VALUES = 10_000
# A data set may hold its generator in one of the transforms of another one that it wraps. Longer lists hold examples.
_MOST_DEEP, _MOST_OBJECTS, _MOST_ENTRIES = 12, 1000, 100
_WITHOUT_GENERATORS = (str, bytes, int, float, complex, np.ndarray, Tensor, nn.Module, ModuleType, type, None.__class__)


def is_plain(value: Any) -> bool:
    """Say whether a value consists of plain values and small tensors, such as the sums that a trainer logs later.

    >>> is_plain({"loss": [1.0, 2.0]}), is_plain([object()])
    (True, False)
    """
    return _is_plain(value, [_MOST_VALUES])


def _is_plain(value: Any, left: list[int]) -> bool:
    left[0] -= 1
    if left[0] < 0:
        return False
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return all(_is_plain(item, left) for item in value)
    if isinstance(value, Tensor):
        return value.is_leaf and value.numel() <= _MOST_VALUES
    return value is None or isinstance(value, str | int | float | bool)


def kept(value: Any) -> Callable[[], Any]:
    """Return what gives a plain value its contents back, and returns it: the same object, as others may hold it too.

    An optimizer trains the very parameter that a trainer keeps, not a copy of it.

    >>> losses = {"train": [1.0]}
    >>> put_back = kept(losses)
    >>> losses["train"].append(2.0)
    >>> put_back() is losses, losses
    (True, {'train': [1.0]})
    """
    if isinstance(value, Tensor):
        return _kept_tensor(value)
    if isinstance(value, MutableMapping):
        entries = {name: kept(item) for name, item in value.items()}
        return lambda: _refilled(value, {name: put_back() for name, put_back in entries.items()}, value.update)
    if isinstance(value, list | deque):
        parts = [kept(item) for item in value]
        return lambda: _refilled(value, [put_back() for put_back in parts], value.extend)
    if isinstance(value, set):
        items = set(value)
        return lambda: _refilled(value, items, value.update)
    members = [kept(item) for item in value] if isinstance(value, tuple) else []
    return lambda: (*(put_back() for put_back in members), value)[-1]


def _refilled(value: Any, contents: Any, fill: Callable[[Any], None]) -> Any:
    value.clear()
    fill(contents)
    return value


def _kept_tensor(tensor: Tensor) -> Callable[[], Any]:
    before, gradient = tensor.detach().clone(), tensor.grad if tensor.is_leaf else None
    at_first = None if gradient is None else gradient.detach().clone()

    def put_back() -> Tensor:
        with torch.no_grad():
            tensor.detach().copy_(before)
            if gradient is not None and at_first is not None:
                gradient.copy_(at_first)
        if tensor.is_leaf:
            tensor.grad = gradient
        return tensor

    return put_back


def kept_draws(value: Any) -> Callable[[], None]:
    """Return what puts the random generators back that an object holds, such as a data set that augments examples.

    >>> class Data:
    ...     def __init__(self):
    ...         self.random = random.Random(0)
    >>> data = Data()
    >>> put_back = kept_draws(data)
    >>> drawn = data.random.random()
    >>> put_back()
    >>> data.random.random() == drawn
    True
    """
    setters = [setter for one in _held_by(value) if (setter := _setter_of(one)) is not None]

    def put_back() -> None:
        for setter in setters:
            setter()

    return put_back


def _held_by(value: Any) -> list[Any]:
    """Return an object and those that its attributes hold, several deep; models and classes are left alone."""
    found, newest = {id(value): value}, [value]
    for _ in range(_MOST_DEEP):
        inner = {id(item): item for one in newest for item in _inside(one)}
        newest = [item for key, item in inner.items() if key not in found][: _MOST_OBJECTS - len(found)]
        found |= {id(item): item for item in newest}
    return list(found.values())


def _inside(value: Any) -> list[Any]:
    """Return what an object, a short container or a function holds."""
    held: Iterable[Any] = ()
    if isinstance(value, dict | list | tuple | set | deque):
        if len(value) <= _MOST_ENTRIES:
            held = value.values() if isinstance(value, dict) else value
    elif isinstance(value, partial):
        held = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType | BuiltinMethodType):
        held = (value.__self__,)
    elif isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
    elif not isinstance(value, _WITHOUT_GENERATORS):
        held = getattr(value, "__dict__", {}).values()
    return [item for item in held if not isinstance(item, _WITHOUT_GENERATORS)]


def _setter_of(value: Any) -> Callable[[], Any] | None:
    """Return what sets a generator to the state that it has now, None of anything else."""
    if isinstance(value, random.Random):
        numbers = value.getstate()
        return lambda: value.setstate(numbers)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        state = bits.state
        return lambda: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        words = value.get_state()
        return lambda: value.set_state(words)
    if isinstance(value, torch.Generator):
        place = value.get_state()
        return lambda: value.set_state(place)
    return None
