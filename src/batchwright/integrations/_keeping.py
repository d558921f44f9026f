"""Keeping: plain values get their contents back in place, as the same objects, after a loss was tried out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

_MOST_VALUES = 10_000


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
