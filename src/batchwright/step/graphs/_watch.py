"""What a graph has taken for granted about a model: noticed when it changes, and what no graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
# Kept in the dictionary of every module, and looked at in their own way.
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_COLLECTING = "transformers.utils.output_capturing"
_MOST_ENTRIES = 64
_Getter: TypeAlias = Callable[[dict[str, Any]], Any]


@final
class _Part(NamedTuple):
    """One module: its single values, its other values by identity, and small containers with their contents."""

    values: dict[str, Any]
    size: int
    get_plain: _Getter
    plain: Any
    get_other: _Getter
    other: Any
    containers: list[tuple[Any, Any]]


@final
class Watch:
    """A model as a capture saw it.

    Single values in modules (train or eval, the share of a dropout, whether adapters are merged), hooks, parts,
    parameters and buffers are compared with what they were; where a tensor lies counts too.
    """

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter]) -> None:
        modules = list(module.modules())
        self._parts = [_read_part(vars(part)) for part in modules]
        self._children = [(part._modules, tuple(part._modules.values())) for part in modules if part._modules]
        tensors: list[dict[str, Any]] = [part._parameters for part in modules if part._parameters]
        tensors += [part._buffers for part in modules if part._buffers]
        self._tensors = [(held, tuple(held.values())) for held in tensors]
        self._hooks = [getattr(part, name) for part in modules for name in _HOOKS if hasattr(part, name)]
        self._trained = trained
        self._places = self._places_now()
        self._mode = _mode()

    def _places_now(self) -> list[Any]:
        own = [value for _, values in self._tensors for value in values if value is not None]
        places: list[Any] = [value.data_ptr() for value in own]
        places += [value.requires_grad for value in own]
        return places + [value.data_ptr() for value in self._trained]

    @property
    def has_changed(self) -> bool:
        """Return whether anything is not as it was."""
        if any(self._hooks) and any(map(_are_foreign, self._hooks)):
            return True
        for part in self._parts:
            if len(part.values) != part.size or part.get_plain(part.values) != part.plain:
                return True
            if not all(map(is_, part.get_other(part.values), part.other)):
                return True
            if part.containers and any(container != before for container, before in part.containers):
                return True
        for held, before in (*self._children, *self._tensors):
            if len(held) != len(before) or not all(map(is_, held.values(), before)):
                return True
        return self._places_now() != self._places or _mode() != self._mode


def _mode() -> tuple[Any, ...]:
    """Return what torch computes with besides the model and the inputs."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def _read_part(values: dict[str, Any]) -> _Part:
    plain = [name for name, value in values.items() if type(value) in _PLAIN]
    other = [name for name, value in values.items() if type(value) not in _PLAIN and name not in _OWN]
    containers = [(values[name], values[name].copy()) for name in other if _is_small(values[name])]
    get_plain, get_other = _getter(plain), _getter(other)
    return _Part(values, len(values), get_plain, get_plain(values), get_other, get_other(values), containers)


def _getter(names: list[str]) -> _Getter:
    if not names:
        return lambda values: ()
    # Given one name, itemgetter returns the value itself and not a tuple.
    return itemgetter(*names, names[0])


def _is_small(value: Any) -> bool:
    """Say whether a container holds a few single values, so that it can be compared at every step."""
    if type(value) not in (list, dict, set) or not 0 <= len(value) <= _MOST_ENTRIES:
        return False
    entries = value.values() if isinstance(value, dict) else value
    return all(type(entry) in _PLAIN for entry in entries)


@final
class Untouched:
    """The attributes of all modules before a capture, to be put back where the capture has changed them."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(name, part.__dict__, dict(part.__dict__)) for name, part in module.named_modules()]
        dictionaries = [
            (name, held) for name, part in module.named_modules() for held in (part._buffers, part._parameters)
        ]
        self._tensors = [(name, held, dict(held)) for name, held in dictionaries if held]
        small = [(name, value) for name, _, before in self._held for value in before.values() if _is_small(value)]
        self._containers = [(name, value, value.copy()) for name, value in small]

    def changed(self) -> str | None:
        """Return the name of an attribute that is not as it was, None if all are."""
        for name, now, before in (*self._held, *self._tensors):
            for key in now.keys() | before.keys():
                if key not in now or key not in before or not _is_same(now[key], before[key]):
                    return f"{name}.{key}".lstrip(".")
        return next((name or "the model" for name, value, before in self._containers if value != before), None)

    def put_back(self) -> str | None:
        """Return which attribute has changed, after all were put back, or None."""
        found = self.changed()
        if found is not None:
            for _, now, before in (*self._held, *self._tensors):
                now.clear()
                now.update(before)
            for _, container, before in self._containers:
                _refill(container, before)
        return found


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) in _PLAIN and type(before) is type(now) and bool(now == before))


def _refill(container: Any, before: Any) -> None:
    container.clear()
    container.extend(before) if isinstance(container, list) else container.update(before)


def _are_foreign(hooks: dict[int, Any]) -> bool:
    """Say whether hooks do more than collect hidden states while a forward pass runs."""
    return any(getattr(hook, "__module__", None) != _COLLECTING for hook in hooks.values())


def hooks_of(module: nn.Module) -> str | None:
    """Return which part has hooks, which would not run at a replay, or None."""
    for name, part in module.named_modules():
        if any(_are_foreign(getattr(part, hooks, {})) for hooks in _HOOKS):
            return f"{name or type(part).__name__} has hooks, which do not run at a replay"
    return "hooks on all modules do not run at a replay" if _has_any_global_hook() else None


def unfit(parameters: Sequence[Tensor]) -> str | None:
    """Return why gradients of these parameters cannot be gathered in static buffers, or None."""
    for parameter in parameters:
        if parameter.dtype not in (torch.float32, torch.float64):
            return f"parameters of {parameter.dtype} are summed in float32, piece by piece"
        if parameter.device != parameters[0].device:
            return f"the model lies on several devices, {parameters[0].device} and {parameter.device}"
    return None
