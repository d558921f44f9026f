"""What a step reads besides the tensors of a model: values that Python holds, found by the code that reads them.

A graph repeats the numbers of its capture. So whatever the loss function and the parts of the model read (variables of
a closure, globals, attributes of objects such as a config, other models) is found once, watched, and put back after a
run that does not count. Attributes of objects count only if their name stands in the code, as a name or as a text: a
trainer counts its steps all the time, which matters to no loss that does not read the count.
"""

from __future__ import annotations

import functools
import io
import random
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Of containers with more entries only the number is watched.
MOST_ENTRIES = 4096
_MOST_PLACES = 4096
_DEEPEST = 6
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
_OUR_OWN = "batchwright.integrations."
_MISSING = object()
# Methods that code calls without their names.
_IMPLICIT = (
    "__call__", "__getattr__", "__getitem__", "__contains__", "__len__", "__iter__", "__bool__", "__float__",
    "__int__", "__index__",
)  # fmt: skip
_CALLED_OF_MODULES = ("forward", "__call__", "__getattr__")
_Found: TypeAlias = tuple[str, Any, int]  # a name for people, a value, and how far from the model or the loss it is


@final
class _Slots:
    """The slots of an object, as its ``__dict__`` would hold them."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        kinds = [kind for kind in type(owner).__mro__ if "__slots__" in vars(kind)]
        self.names = [
            name for kind in kinds for name, slot in vars(kind).items() if isinstance(slot, types.MemberDescriptorType)
        ]

    def get(self, name: str, default: Any) -> Any:
        """Return what lies in a slot."""
        return getattr(self._owner, name, default) if name in self.names else default

    def pop(self, name: str, default: Any) -> None:
        """Empty a slot."""
        if self.get(name, _MISSING) is not _MISSING:
            object.__delattr__(self._owner, name)

    def update(self, values: Mapping[str, Any]) -> None:
        """Fill slots, those of a frozen object too."""
        for name, value in values.items():
            object.__setattr__(self._owner, name, value)


@final
class Place(NamedTuple):
    """Somewhere that values are kept: attributes, slots, a container, an array, a variable of a closure, a class."""

    label: str
    held: Any
    names: tuple[str, ...] | None  # the attributes that count, None for all
    code: frozenset[str] = frozenset()  # an attribute with one of these names would count too

    def values(self) -> tuple[Any, ...]:
        """Return what it holds now; where there is too much, only how much."""
        held = self.held
        if self.names is not None:
            found = [held.get(name, _MISSING) for name in self.names]
            return (*found, self.code.intersection(held)) if self.code else tuple(found)
        if isinstance(held, types.CellType):
            return _contents(held)
        if isinstance(held, np.ndarray):
            return (torch.Size(held.shape), held.tobytes() if held.size <= MOST_ENTRIES else b"")
        if len(held) > MOST_ENTRIES:
            return (len(held),)
        if isinstance(held, dict):
            return (*held, *held.values())
        return (frozenset(held),) if isinstance(held, set) else tuple(held)

    def change_from(self, before: tuple[Any, ...]) -> str | None:
        """Return what is not as it was, for people, or None."""
        now = self.values()
        if len(now) == len(before) and (all(map(is_, now, before)) or all(map(is_same, now, before))):
            return None
        if self.names is None:
            return self.label
        if self.code and now[-1] != before[-1]:
            return f"{self.label}.{min(now[-1] ^ before[-1])}"
        now, before = now[: len(self.names)], before[: len(self.names)]
        changed = [name for name, *pair in zip(self.names, now, before, strict=True) if not is_same(*pair)]
        return f"{self.label}.{changed[0]}"

    def copy(self) -> Any:
        """Return everything that it holds, for ``refill``."""
        if self.names is not None:
            return {name: self.held.get(name, _MISSING) for name in self.names}
        if isinstance(self.held, np.ndarray) and self.held.size > MOST_ENTRIES:
            return None
        return _contents(self.held) if isinstance(self.held, types.CellType) else self.held.copy()

    def refill(self, before: Any) -> None:
        """Put back what ``copy`` returned."""
        held = self.held
        if isinstance(held, types.MappingProxyType):
            return  # the attributes of a class; a forward pass that changes them is only refused
        if self.names is not None:
            for name, value in before.items():
                held.pop(name, None) if value is _MISSING else held.update({name: value})
        elif isinstance(held, types.CellType):
            if before:
                held.cell_contents = before[0]
        elif isinstance(held, np.ndarray):
            if before is not None and held.shape == before.shape and held.flags.writeable:
                held[...] = before
        else:
            held.clear()
            held.extend(before) if isinstance(held, list | deque) else held.update(before)


_COMPARED = PLAIN | {frozenset}


def is_same(now: Any, before: Any) -> bool:
    """Say whether a value is the same object, or the same single value."""
    kind = type(now)
    return now is before or (kind is type(before) and kind in _COMPARED and bool(now == before))


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a variable that was not set yet
        return ()


@final
class Reach:
    """Everything that the parts of a model and a loss function read, as far as their code shows.

    Attributes:
        module: the model.
        modules: its parts, and those of other models that the loss uses.
        places: where values are kept, besides the attributes of modules.
        tensors: that are neither parameters nor buffers of these modules, each with a name.
        generators: of random numbers, each with a name.
        names: that stand in the code, as names or as texts.
        obstacle: what no run can put back, such as an iterator, for people; None if nothing is.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any] | None = None) -> None:
        self.module, self._loss_fn = module, loss_fn
        self.names: set[str] = set()
        num_names = -1
        while len(self.names) > num_names:  # code that is found late may read what was passed by
            num_names = len(self.names)
            self._code = frozenset(self.names)
            self._walk()

    def _walk(self) -> None:
        self.modules: list[nn.Module] = []
        self.places: list[Place] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.generators: list[tuple[str, Any]] = []
        self.obstacle: str | None = None
        self._seen: set[int] = set()
        self._read: set[tuple[Any, ...]] = set()  # classes whose code was read
        self._todo: deque[_Found] = deque([("the model", self.module, 0), ("loss_fn", self._loss_fn, 0)])
        while self._todo and len(self.places) < _MOST_PLACES:
            self._visit(*self._todo.popleft())
        own = {id(tensor) for part in self.modules for held in (part._parameters, part._buffers)
               for tensor in held.values()}  # fmt: skip
        self.tensors = [(label, tensor) for label, tensor in self.tensors if id(tensor) not in own]

    def _visit(self, label: str, value: Any, depth: int) -> None:
        if type(value) in PLAIN or id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append((label, value))
        elif isinstance(value, random.SystemRandom):
            self.obstacle = self.obstacle or f"{label} draws random numbers of the system, which no run can repeat"
        elif isinstance(value, GENERATORS):
            self.generators.append((label, value))
        elif is_iterator(value):
            self.obstacle = self.obstacle or f"{label} is an iterator, which a replay does not advance"
        elif isinstance(value, nn.Module):
            self._visit_module(value, "" if value is self.module else f"{label}.")
        elif isinstance(value, types.FunctionType):
            self._visit_function(label, value, depth)
        elif isinstance(value, types.MethodType):
            self._visit(label, value.__self__, depth)
            self._visit(label, value.__func__, depth)
        elif isinstance(value, functools.partial):
            self._visit(label, value.func, depth)
            self._add((label, one, depth) for one in (value.args, value.keywords))
        elif isinstance(value, dict | list | set | deque | tuple | frozenset):
            self._visit_container(label, value, depth)
        elif isinstance(value, np.ndarray):
            self.places.append(Place(label, value, None))
            if value.dtype == object and value.size <= MOST_ENTRIES:
                self._add((f"an entry of {label}", entry, depth + 1) for entry in value.flat)
        elif not isinstance(value, type | types.ModuleType):
            self._visit_object(label, value, depth)

    def _add(self, found: Iterable[_Found]) -> None:
        self._todo.extend(found)

    def _visit_module(self, module: nn.Module, prefix: str) -> None:
        for name, part in module.named_modules():
            self._seen.add(id(part))
            self.modules.append(part)
            full = f"{prefix}{name}".strip(".")
            others = [(key, value) for key, value in vars(part).items() if key not in MODULE_OWN]
            self._add(
                (f"{full}.{key}".lstrip("."), value, 1)
                for key, value in others
                if type(value) not in PLAIN and (key in self.names or not is_iterator(value))
            )
            self._visit_class(type(part), _CALLED_OF_MODULES)

    def _visit_class(self, kind: type, called: Sequence[str]) -> None:
        """Note the names in the methods that are called, and watch the attributes of the class."""
        for one in kind.__mro__:
            if one in (nn.Module, object) or id(one) in self._seen:
                continue
            self._seen.add(id(one))
            # An attribute that the class itself lacks may be put there later, in front of an inherited one.
            own = (called if one is kind else ()), (name for name in vars(one) if name in self.names)
            names = tuple(dict.fromkeys(chain(*own)))
            if names:
                self.places.append(Place(one.__name__, vars(one), names))
                values = [(name, vars(one).get(name)) for name in names]
                self._add((f"{one.__name__}.{name}", value, 2) for name, value in values if not callable(value))
        if (kind, *called) in self._read:
            return
        self._read.add((kind, *called))
        todo, seen = [*called], set(called)
        while todo:
            for function in _functions_of(getattr(kind, todo.pop(), None)):
                names_read = _names_in(function.__code__)
                self.names |= names_read
                self._add([(f"{kind.__name__}.{function.__name__}", function, 2)])
                new = {name for name in names_read - seen if hasattr(kind, name) and not hasattr(nn.Module, name)}
                seen |= new
                todo += new

    def _visit_function(self, label: str, function: types.FunctionType, depth: int) -> None:
        code = function.__code__
        self.names |= _names_in(code)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self.places.append(Place(f"{name} of {label}", cell, None))
                self._add((f"{name} of {label}", value, depth + 1) for value in _contents(cell))
        given = (function.__defaults__, function.__kwdefaults__)
        self._add((f"a default of {label}", value, depth + 1) for value in given)
        if vars(function):
            self._visit_object(label, function, depth)
        if code.co_filename.startswith(_INSTALLED):
            return
        known = function.__globals__
        names = tuple(sorted(name for name in _names_in(code, with_texts=False) if name in known))
        if names:
            self.places.append(Place(f"the globals of {label}", known, names))
            self._add((name, known[name], depth + 1) for name in names)

    def _visit_container(self, label: str, value: Any, depth: int) -> None:
        if not isinstance(value, tuple | frozenset):
            self.places.append(Place(label, value, None))
        if len(value) <= MOST_ENTRIES:
            entries = value.values() if isinstance(value, dict) else value
            self._add((f"an entry of {label}", entry, depth + 1) for entry in entries if type(entry) not in PLAIN)

    def _visit_object(self, label: str, value: Any, depth: int) -> None:
        if type(value).__module__.startswith(_OUR_OWN):
            return  # adapters count and log around a loss, and say themselves what it must not read
        kind = type(value)
        # What looks its attributes or entries up in a table names none of them.
        is_table = hasattr(kind, "__getattr__") or isinstance(value, Mapping)
        for held, present in _holders_of(value):
            names = tuple(sorted(name for name in present if is_table or name in self.names))
            # One that comes later may stand in front of an attribute of the class, or of a default.
            code = frozenset() if isinstance(held, _Slots) else self._code
            if names or code:
                self.places.append(Place(label, held, names, code))
                self._add((f"{label}.{name}", held.get(name, None), depth + 1) for name in names)
        if not kind.__module__.startswith(("builtins", "torch.")):
            self._visit_class(kind, [name for name in (*_IMPLICIT, *self.names) if hasattr(kind, name)])


def _holders_of(value: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield what holds the attributes of an object, and their names: its dictionary, and its slots."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        held = None
    if isinstance(held, dict):
        yield held, [name for name in held if isinstance(name, str)]
    if any("__slots__" in vars(kind) for kind in type(value).__mro__):
        slots = _Slots(value)
        yield slots, slots.names


def is_iterator(value: Any) -> bool:
    """Say whether a value gives other values each time that it is asked; files are written to, not read."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase | type)


@functools.cache
def names_in_installed(kind: type) -> frozenset[str]:
    """Return the names in methods of the installed classes of a module's kind.

    Installed functions, whose own code is not looked for, may read what these classes set.
    """
    methods = [value for one in kind.__mro__ if one is not nn.Module for value in vars(one).values()]
    codes = [value.__code__ for value in methods if isinstance(value, types.FunctionType)]
    return frozenset(chain.from_iterable(_names_in(one) for one in codes if one.co_filename.startswith(_INSTALLED)))


# Kept in the dictionary of every module, and looked at in their own way.
MODULE_OWN = frozenset({
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks",
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
})  # fmt: skip


def _names_in(code: types.CodeType, *, with_texts: bool = True) -> set[str]:
    """Return the names of attributes and globals in a function and those inside it, and texts that may be names."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_in(constant, with_texts=with_texts)
        elif with_texts:
            texts = constant if isinstance(constant, tuple | frozenset) else (constant,)
            found |= {text for text in texts if isinstance(text, str) and text.isidentifier()}
    return found


def _functions_of(value: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """Yield a function, or the getter of a property, and what decorators have wrapped."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType) and depth < _DEEPEST:
        yield value
        for cell in value.__closure__ or ():
            for inner in _contents(cell):
                yield from _functions_of(inner, depth + 1)
