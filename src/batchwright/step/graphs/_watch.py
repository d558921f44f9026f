"""What a graph has taken for granted about a model: noticed when it changes, and what no graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..._ranks import is_expanded
from .._gradients import is_of_several
from ..oom import Snapshot
from ._draws import generator_state, set_generator_state
from ._reach import MODULE_OWN, PLAIN, Reach, is_same, names_in_installed

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
# Hooks on all modules; torch changes these dicts in place. Its own function for this came with torch 2.8.
_GLOBAL_HOOKS = tuple(
    getattr(torch_module, f"_global_{name}_hooks") for name in ("backward_pre", "backward", "forward_pre", "forward")
)
_COLLECTING = "transformers.utils.output_capturing"
_SHAPE, _REQUIRES_GRAD = attrgetter("shape"), attrgetter("requires_grad")
_BACKWARD_HOOKS = attrgetter("_backward_hooks")
_Getter: TypeAlias = Callable[[dict[str, Any]], Any]


@final
class _Part(NamedTuple):
    """One module: its single values, and its other values by identity."""

    module: nn.Module
    values: dict[str, Any]
    keys: list[str]
    get_plain: _Getter
    plain: Any
    get_other: _Getter
    other: Any


@final
class Watch:
    """A model and a loss function as a capture saw them.

    Single values in modules (train or eval, the share of a dropout, whether adapters are merged), hooks, parts,
    parameters and buffers are compared with what they were, and so is what ``Reach`` finds; where a tensor lies counts
    too.

    Args:
        reach: what the model and the loss function read.
        trained: the parameters that are trained.
        device: where the work runs, None for that of the first parameter.
    """

    def __init__(self, reach: Reach, trained: Sequence[nn.Parameter], *, device: torch.device | None = None) -> None:
        modules = reach.modules
        self._names = frozenset({"training", "forward", *reach.names})
        self._parts = [_read_part(part, self._names) for part in modules]
        self._children = [(part._modules, tuple(part._modules.values())) for part in modules if part._modules]
        tensors: list[dict[str, Any]] = [part._parameters for part in modules if part._parameters]
        tensors += [part._buffers for part in modules if part._buffers]
        self._tensors = [(held, tuple(held.values())) for held in tensors]
        # Whatever comes into these, as a buffer that is registered late, is a change.
        kinds = [held for part in modules for held in (part._modules, part._parameters, part._buffers)]
        self._empty: list[Any] = [held for held in kinds if not held]
        self._hooks = [getattr(part, name) for part in modules for name in _HOOKS if hasattr(part, name)]
        self._reached = [(place, place.values()) for place in reach.places]
        own = {id(value): value for _, values in self._tensors for value in values if value is not None}
        own.update((id(value), value) for value in trained)
        self._own, self._trained = list(own.values()), trained
        self._around = [tensor for _, tensor in reach.tensors]
        # The value of a tensor on the host becomes an argument of kernels on a device, and part of the graph.
        is_on_host = (trained[0].device if device is None else device).type == "cpu"
        self._on_host = [one for one in self._around if one.device.type == "cpu" and not is_on_host]
        self._places = self._places_now()
        self._mode = _mode()

    def _places_now(self) -> list[Any]:
        # Shapes and strides too: a parameter may be turned in its memory. With map, it takes half the time.
        places: list[Any] = [*map(Tensor.data_ptr, self._own), *map(Tensor.stride, self._own)]
        places += [*map(_SHAPE, self._own), *map(_REQUIRES_GRAD, self._own), *map(_REQUIRES_GRAD, self._around)]
        places += map(_place_of, self._around)
        places += [value._version for value in self._on_host if not value.is_inference()]
        return places

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors that are watched."""
        return [*self._own, *self._around]

    @property
    def has_changed(self) -> bool:
        """Return whether anything is not as it was."""
        return self.change is not None

    @property
    def change(self) -> str | None:
        """Return what is not as it was, for people, or None."""
        if (any(self._hooks) and any(map(_are_foreign, self._hooks))) or any(_GLOBAL_HOOKS):
            return "hooks"
        if _shared_hooks(self._trained):
            return "hooks"
        for part in self._parts:
            values = part.values
            try:
                is_same_plain = part.get_plain(values) == part.plain
                if not is_same_plain or not all(map(is_, part.get_other(values), part.other)):
                    return f"an attribute of {type(part.module).__name__}"
            except KeyError:  # another one has its place
                return f"an attribute of {type(part.module).__name__}"
            if [*values] != part.keys and self._has_other_names(part):
                return f"an attribute of {type(part.module).__name__}"
        if any(self._empty):
            return "a part, a parameter or a buffer of the model"
        for held, before in (*self._children, *self._tensors):
            if len(held) != len(before) or not all(map(is_, held.values(), before)):
                return "a part, a parameter or a buffer of the model"
        for place, known in self._reached:
            found = place.change_from(known)
            if found is not None:
                return found
        if self._places_now() != self._places:
            return "the memory of a parameter or of another tensor"
        return None if _mode() == self._mode else "a setting of torch"

    def _has_other_names(self, part: _Part) -> bool:
        strange = part.values.keys() ^ part.keys
        return any(_counts(name, type(part.module), self._names) for name in strange)


def _counts(name: str, kind: type, names: frozenset[str]) -> bool:
    """Say whether a single value of a module matters: its name stands in code that is reached, or installed."""
    return name in names or name in names_in_installed(kind)


def _place_of(tensor: Tensor) -> Any:
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
    except RuntimeError:  # sparse ones, and others that are made of several
        return id(tensor)


def matmul_precision() -> tuple[str, ...]:
    """Return what torch makes of float32 in products of matrices: on a CUDA device, and on the host."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):  # torch below 2.9
        return (torch.get_float32_matmul_precision(),)
    # Asked by its old name, torch raises an error once ``fp32_precision`` was set.
    return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


def _mode() -> tuple[Any, ...]:
    """Return what torch computes with besides the model and the inputs."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def _read_part(part: nn.Module, names: frozenset[str]) -> _Part:
    values, kind = vars(part), type(part)
    plain = [name for name, value in values.items() if type(value) in PLAIN and _counts(name, kind, names)]
    other = [name for name, value in values.items() if type(value) not in PLAIN and name not in MODULE_OWN]
    get_plain, get_other = _getter(plain), _getter(other)
    return _Part(part, values, [*values], get_plain, get_plain(values), get_other, get_other(values))


def _getter(names: list[str]) -> _Getter:
    if not names:
        return lambda values: ()
    # Given one name, itemgetter returns the value itself and not a tuple.
    return itemgetter(*names, names[0])


@final
class Untouched:
    """What Python and plain tensors hold before a run that must leave no trace, to be put back after it.

    The buffers of the model itself are those of a ``Snapshot``.
    """

    def __init__(self, reach: Reach) -> None:
        names = {id(part): name for name, part in reach.module.named_modules()}
        labels = [names.get(id(part), type(part).__name__) for part in reach.modules]
        self._held: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        for label, part in zip(labels, reach.modules, strict=True):
            for held in (vars(part), part._buffers, part._parameters, part._modules):
                self._held.append((label, held, dict(held)))
        self._reached = [(place, place.values(), place.copy()) for place in reach.places]
        others = [part for part in reach.modules if id(part) not in names]
        tensors = [*(tensor for _, tensor in reach.tensors), *(value for one in others for value in one.buffers())]
        self._values = [(one, one.detach().clone()) for one in tensors if not is_expanded(one)]
        self._random = [(one, generator_state(one)) for _, one in reach.generators]

    def put_back(self) -> str | None:
        """Put everything back, and return which value Python held otherwise, or None."""
        found: str | None = None
        for label, now, before in self._held:
            for key in now.keys() | before.keys():
                if key not in now or key not in before or not is_same(now[key], before[key]):
                    found = found or f"{label}.{key}".lstrip(".")
            now.clear()
            now.update(before)
        for place, values, copied in self._reached:
            change = place.change_from(values)
            if change is not None:
                found = found or change
                place.refill(copied)
        self.put_values_back()
        return found

    def put_values_back(self) -> None:
        """Put back the values of tensors and the states of generators, but nothing that Python holds."""
        with torch.no_grad():
            for tensor, value in self._values:
                if tensor.shape == value.shape:
                    tensor.copy_(value)
        for generator, state in self._random:
            set_generator_state(generator, state)


def _are_foreign(hooks: dict[int, Any]) -> bool:
    """Say whether hooks do more than collect hidden states while a forward pass runs."""
    return any(getattr(hook, "__module__", None) != _COLLECTING for hook in hooks.values())


def _shared_hooks(parameters: Sequence[Tensor]) -> bool:
    """Say whether a parameter has a hook that waits for others: those of one parameter run after a replay."""
    return any(
        is_of_several(hook) for hooks in filter(None, map(_BACKWARD_HOOKS, parameters)) for hook in hooks.values()
    )


def hooks_of(module: nn.Module, trained: Sequence[nn.Parameter] = ()) -> str | None:
    """Return which part or parameter has hooks, which would not run at a replay, or None."""
    if _shared_hooks(trained):
        return "hooks of register_multi_grad_hook do not run at a replay"
    for name, part in module.named_modules():
        if any(_are_foreign(getattr(part, hooks, {})) for hooks in _HOOKS):
            return f"{name or type(part).__name__} has hooks, which do not run at a replay"
    return "hooks on all modules do not run at a replay" if any(_GLOBAL_HOOKS) else None


def unfit(parameters: Sequence[Tensor]) -> str | None:
    """Return why gradients of these parameters cannot be gathered in static buffers, or None."""
    for parameter in parameters:
        if parameter.is_complex():
            return f"gradients of complex parameters ({parameter.dtype}) are not gathered in static buffers"
        if parameter.dtype not in (torch.float32, torch.float64):
            return f"parameters of {parameter.dtype} are summed in float32, piece by piece"
        if parameter.device != parameters[0].device:
            return f"the model lies on several devices, {parameters[0].device} and {parameter.device}"
    return None


@final
class Kept(NamedTuple):
    """Everything that a run which does not count may change: random states, buffers, and what Python holds."""

    snapshot: Snapshot
    untouched: Untouched

    def restore(self) -> str | None:
        """Put everything back, and return which value Python held otherwise, or None."""
        changed = self.untouched.put_back()
        self.snapshot.restore()
        return changed

    def put_back(self) -> None:
        """Put everything back, whatever was changed."""
        self.restore()

    def restore_values(self) -> None:
        """Put back tensors and random states only."""
        self.untouched.put_values_back()
        self.snapshot.restore()
