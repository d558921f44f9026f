"""Contents of objects: what one refers to, how it gets that back in place, and copies where it must not change."""

from __future__ import annotations

import copy
import functools
import logging
import random
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from io import IOBase
from threading import Lock, RLock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...errors import ArgumentError

# Returns what stands for an object now: itself, or a copy of one that cannot get its values back in place.
Current: TypeAlias = "Callable[[Any], Any]"

# Values of exactly these types never change.
PLAIN: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, range, slice, types.FunctionType, types.ModuleType}
    | {torch.dtype, torch.device, torch.Size, torch.layout}
)
# Neither do these, or what they hold is no part of training: they are left alone.
_LEFT_ALONE: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, type, Enum, np.generic, np.dtype, np.ufunc, IOBase, logging.Logger),
    *(types.FunctionType, types.ModuleType, types.MethodWrapperType, type(Lock()), type(RLock())),
    *(weakref.ReferenceType, random.SystemRandom, functools._lru_cache_wrapper),
)
# Objects of these packages run training, but keep none of its state; modules, optimizers and tensors of them do.
_FRAMES = (
    *("torch._C", "torch._dynamo", "torch._functorch", "torch._inductor", "torch.cuda", "torch.distributed"),
    *("torch.fx", "torch.jit", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "batchwright"),
)
# Hooks are functions of others; what they keep is theirs.
_MODULE_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)
_OWN_OF_MODULES = ("_parameters", "_buffers", "_modules")
_MOST_VALUES = 10_000
_OWN_OF_OPTIMIZERS = ("state", "param_groups")


class Contents(NamedTuple):
    """Objects that one refers to, with their names in it, and what gives it these back.

    ``put_back`` is None for one that cannot be given others, such as a tuple.
    """

    items: list[tuple[Any, Any]]
    put_back: Callable[[Current], object] | None


def is_left_alone(value: Any) -> bool:
    """Say whether an object cannot change, or keeps nothing of training."""
    if isinstance(value, _LEFT_ALONE):
        return True
    if isinstance(value, nn.Module | Optimizer | torch.Generator | torch.amp.GradScaler | dict | list | tuple):
        return False
    home = str(type(value).__module__)
    # In the front of torch itself are streams, and the types and methods of scripted modules.
    return home == "torch" or any(home == name or home.startswith(f"{name}.") for name in _FRAMES)


def contents_of(value: Any, *, attributes: bool = True) -> list[Contents] | None:
    """Return what an object holds, None for one that does not show it.

    Args:
        value: any object that is no tensor and no array of numbers.
        attributes: hold all attributes of modules and optimizers; False holds only parameters, buffers, parts, modes,
            states and groups.
    """
    if not attributes and isinstance(value, nn.Module | Optimizer):
        return [_own_of(value)]
    kind = next((kind for kind in _READERS if isinstance(value, kind)), None)
    # A scripted module has its attributes and its mode where Python cannot write them.
    if kind is None and (isinstance(value, torch.jit.ScriptModule) or not _is_open(value)):
        return None
    found = [] if kind is None else [_READERS[kind](value)]
    return [*found, *attributes_of(value)]


def _is_open(value: Any) -> bool:
    """Say whether an object has all it knows in attributes, as objects of classes written in Python have."""
    kind = type(value)
    while kind.__base__ not in (object, None):
        kind = kind.__base__
    return kind is object or "__dict__" in vars(kind) or "__slots__" in vars(kind)


def attributes_of(value: Any) -> Iterator[Contents]:
    """Yield the attributes of an object, in its dict and in its slots."""
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        before = dict(held)
        items = [(name, item) for name, item in before.items() if not _is_hooks(value, name)]
        yield Contents(items, functools.partial(_refill, dict, held, before))
    slots = {
        name: slot
        for kind in type(value).__mro__
        if "__slots__" in vars(kind)
        for name, slot in vars(kind).items()
        if isinstance(slot, types.MemberDescriptorType)
    }
    if slots:
        filled = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        yield Contents(list(filled.items()), functools.partial(_refill_slots, value, slots, filled))


def _is_hooks(owner: Any, name: str) -> bool:
    if isinstance(owner, Optimizer):
        return name.startswith("_optimizer_") and name.endswith("_hooks")
    return isinstance(owner, nn.Module) and name in _MODULE_HOOKS


def _own_of(value: nn.Module | Optimizer) -> Contents:
    if isinstance(value, Optimizer):
        return Contents([(name, getattr(value, name)) for name in _OWN_OF_OPTIMIZERS], None)
    mode, held = value.training, vars(value)
    names, left = set(held), [_MOST_VALUES]
    # Counts, lists of losses and the like; what is not plain is no part of what training changes in most modules.
    plain = {name: item for name, item in held.items() if _is_plain(item, left) and not _is_hooks(value, name)}
    items = [(name, getattr(value, name)) for name in _OWN_OF_MODULES]

    def put_back(_: Current) -> None:
        for name in set(held) - names:
            del held[name]
        held.update(plain)
        value.training = mode

    return Contents([*items, *plain.items()], put_back)


def _is_plain(value: Any, left: list[int]) -> bool:
    """Say whether a value consists of numbers, texts and containers of them, not too many for a module."""
    left[0] -= 1
    if left[0] < 0:
        return False
    if type(value) in (dict, OrderedDict, defaultdict):
        return all(_is_plain(item, left) for pair in value.items() for item in pair)
    if type(value) in (list, tuple, set, deque):
        return all(_is_plain(item, left) for item in value)
    return type(value) in (bool, int, float, complex, str, bytes, type(None))


def _refill(kind: Any, value: Any, entries: dict[Any, Any], current: Current) -> None:
    """Give a dict its entries back, by the methods of its base class: others may do more than that."""
    kind.clear(value)
    for key, item in entries.items():
        kind.__setitem__(value, key, current(item))


def _refill_slots(value: Any, slots: dict[str, Any], filled: dict[str, Any], current: Current) -> None:
    for name, slot in slots.items():
        if name in filled:
            slot.__set__(value, current(filled[name]))
        elif hasattr(value, name):
            slot.__delete__(value)


def _of_dict(value: dict[Any, Any]) -> Contents:
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    before = dict(kind.items(value))
    keys = [("a key", key) for key in before if isinstance(key, Tensor)]  # parameters have their states like this
    return Contents([*before.items(), *keys], functools.partial(_refill, kind, value, before))


def _of_list(value: list[Any]) -> Contents:
    before = list(value)
    return Contents(
        list(enumerate(before)), lambda current: list.__setitem__(value, slice(None), list(map(current, before)))
    )


def _of_deque(value: deque[Any]) -> Contents:
    before = list(value)

    def put_back(current: Current) -> None:
        deque.clear(value)
        deque.extend(value, map(current, before))

    return Contents(list(enumerate(before)), put_back)


def _of_set(value: set[Any]) -> Contents:
    before = list(value)

    def put_back(current: Current) -> None:
        set.clear(value)
        set.update(value, map(current, before))

    return Contents(list(enumerate(before)), put_back)


def _of_objects(value: np.ndarray) -> Contents:
    """Read an array of objects."""
    before = value.ravel().tolist()

    def put_back(current: Current) -> None:
        for place, item in enumerate(before):
            value.flat[place] = current(item)

    return Contents(list(enumerate(before)), put_back)


def _of_bytes(value: bytearray) -> Contents:
    before = bytes(value)
    return Contents([], lambda _: bytearray.__setitem__(value, slice(None), before))


def _of_random(value: random.Random) -> Contents:
    state = value.getstate()
    return Contents([], lambda _: value.setstate(state))


def _of_numpy_random(value: np.random.RandomState) -> Contents:
    state = value.get_state(legacy=False)
    return Contents([], lambda _: value.set_state(state))


def _of_bits(value: np.random.BitGenerator) -> Contents:
    state = value.state
    return Contents([], lambda _: setattr(value, "state", state))


def _of_generator(value: torch.Generator) -> Contents:
    state = value.get_state()
    return Contents([], lambda _: value.set_state(state))


def _of_partial(value: functools.partial[Any]) -> Contents:
    return Contents([("func", value.func), ("args", value.args), ("keywords", value.keywords)], None)


_READERS: dict[Any, Callable[[Any], Contents]] = {
    dict: _of_dict,
    list: _of_list,
    tuple: lambda value: Contents(list(enumerate(value)), None),
    set: _of_set,
    frozenset: lambda value: Contents(list(enumerate(value)), None),
    deque: _of_deque,
    bytearray: _of_bytes,
    np.ndarray: _of_objects,
    random.Random: _of_random,
    np.random.RandomState: _of_numpy_random,
    np.random.Generator: lambda value: Contents([("bit_generator", value.bit_generator)], None),
    np.random.BitGenerator: _of_bits,
    torch.Generator: _of_generator,
    functools.partial: _of_partial,
    types.MethodType: lambda value: Contents([("__self__", value.__self__)], None),
    types.BuiltinFunctionType: lambda value: Contents([("__self__", value.__self__)], None),
}


def copied(batch: Any) -> Any:
    """Return a copy of a batch, so that what a loss changes in place stays as it was for others.

    >>> batch = {"x": torch.zeros(2)}
    >>> _ = copied(batch)["x"].add_(1)
    >>> batch["x"].tolist()
    [0.0, 0.0]
    """
    if isinstance(batch, Tensor):  # not all the memory that it may be a part of
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if type(batch) is dict:
        return {name: copied(value) for name, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map(copied, batch))
    try:
        return copy.deepcopy(batch)
    except Exception as error:  # each type has its own way to refuse
        raise ArgumentError(
            f"a batch is copied for every branch, but its {type(batch).__name__} cannot be copied: {error}; give "
            "tensors, arrays and plain values"
        ) from error


def hooked_step(optimizers: Iterable[Any]) -> str | None:
    """Return whose step has hooks, None if there are none."""
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "every optimizer's"
    for one in optimizers:
        if getattr(one, "_optimizer_step_pre_hooks", {}) or getattr(one, "_optimizer_step_post_hooks", {}):
            return f"{type(one).__name__}'s"
    return None
