"""What an object consists of, as JSON values that are the same in every process: code, settings, tensors."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import inspect
import io
import json
import logging
import os
import pickle
import random
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

PACKAGES = ("batchwright", "torch", "transformers", "accelerate", "lightning", "peft", "trl", "sentence-transformers")
# Their code is known by its version.
_LIBRARIES = {*(name.replace("-", "_") for name in PACKAGES), "numpy", "torch", "pytorch_lightning"}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...))
_SHOWN_WHOLE = (PurePath, range, slice, re.Pattern, torch.dtype, torch.device, torch.layout, np.generic, np.dtype)
# What they are besides their type changes no cost.
_LEAVES = (
    *(logging.Logger, logging.Handler, random.Random, np.random.Generator, np.random.RandomState, torch.Generator),
    *(weakref.ref, io.IOBase, type(threading.Lock()), type(threading.RLock()), threading.local),
)
# Of a module: its mode, and where its weights came from.
NO_SETTINGS = {"training", "name_or_path", "_name_or_path", "_commit_hash", "warnings_issued", "_is_hf_initialized"}
NO_SETTINGS |= {"_original_object_hash"}  # of generation settings; another one in every process
_OF_TORCH = {*vars(nn.Module())}
_OF_LIGHTNING = {"_trainer", "_fabric", "_fabric_optimizers", "_current_fx_name", "_metric_attributes", "_compiler_ctx"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SET_BY_ACCELERATE = {"forward", "_original_forward", "_is_accelerate_prepared"}
_MOST_OBJECTS, _MOST_ELEMENTS = 50_000, 2**24


class UndescribableError(Exception):
    """An object does not show what it consists of, so nobody can tell whether another one is the same."""


def contents_of(value: Any) -> str:
    """Return a digest of what an object consists of: equal ones cost the same, in any process.

    Functions are their code, their defaults, and what they refer to in closures and modules; objects are the code of
    their class and all of their attributes. Packages are known by their version, tensors of the user by their values,
    parameters and tensors of a package by their shapes.

    Raises:
        UndescribableError: something in it shows nothing, or there is too much of it.

    >>> contents_of({"layers": [1, 2]}) == contents_of({"layers": [1, 2]}) != contents_of({"layers": [1, 3]})
    True
    """
    try:
        return digest(json.dumps(_Walk().of(value)))
    except RecursionError as error:
        raise UndescribableError("an object is nested too deep") from error


@final
class _Walk:
    """Visits every object once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, so that it stays

    def of(self, value: Any, *, is_own: bool = True) -> Any:
        """Return an object as JSON values.

        Args:
            value: an object.
            is_own: the user made it; one in a module of a library may hold what shows nothing.
        """
        if type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, _SHOWN_WHOLE):
            return [_name_of(type(value)), repr(value)]
        if isinstance(value, enum.Enum):
            return [_name_of(type(value)), value.name]
        if isinstance(value, tuple):
            return [_name_of(type(value)), *(self.of(item, is_own=is_own) for item in value)]
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)][0]]
        self._seen[id(value)] = len(self._seen), value
        if len(self._seen) > _MOST_OBJECTS:
            raise UndescribableError(f"it refers to more than {_MOST_OBJECTS} objects")
        return self._new(value, is_own)

    def _new(self, value: Any, is_own: bool) -> Any:
        if isinstance(value, ModuleType):
            return _known(value.__name__) or value.__name__
        if isinstance(value, type):
            return self._kind(value)
        if isinstance(value, Tensor | np.ndarray):
            return self._array(value, is_own)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, _LEAVES):
            return _name_of(type(value))
        function = self._called(value)
        return self._object(value, is_own) if function is None else function

    def _called(self, value: Any) -> Any:
        """Return a function of any kind; None of anything else."""
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self._bound(value)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self.of, (value.func, value.args, value.keywords))]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self.of(value.__func__)]
        if isinstance(value, property):
            return ["property", *map(self.of, (value.fget, value.fset))]
        if isinstance(value, BuiltinFunctionType):
            held = getattr(value, "__self__", None)
            return [value.__qualname__, None if isinstance(held, ModuleType | type) else self.of(held)]
        if inspect.isroutine(value) or isinstance(value, np.ufunc | weakref.ReferenceType):
            return ["routine", getattr(value, "__qualname__", None) or repr(value)]
        inner = getattr(value, "__wrapped__", None) if callable(value) else None
        return None if inner is None else [_name_of(type(value)), self.of(inner)]  # such as a cache around a function

    def _bound(self, method: MethodType) -> Any:
        """Return what a method reads of its object; a module is described as a whole."""
        held = method.__self__
        if isinstance(held, nn.Module | type):
            return self.of(held)
        return [self.of(type(held)), self.of(read_by(held, [method]))]

    def _function(self, function: FunctionType) -> Any:
        place = f"{function.__module__}.{function.__qualname__}"
        known, inner = _known(function.__module__), inspect.unwrap(function)
        held = [self.of(cell.cell_contents) for cell in function.__closure__ or () if is_filled(cell)]
        if known is not None and inner is not function and _known(inner.__module__) is None:
            return [place, known, held, self.of(inner)]
        if known is not None:
            return [place, known, held if "<locals>" in function.__qualname__ else []]
        code, around = function.__code__, function.__globals__
        named = {name: self.of(around[name]) for name in sorted(_globals_of(code)) if name in around}
        # Attributes of modules of the user; those of packages are known.
        named |= {
            f"{name}.{part}": self.of(vars(one)[part])
            for name in named
            if isinstance(one := around[name], ModuleType) and _known(one.__name__) is None
            for part in sorted(names_in(code))
            if part in vars(one)
        }
        usual = [*map(self.of, (function.__defaults__, function.__kwdefaults__, vars(function)))]
        return [place, digest(_text_of(code)), usual, held, named]

    def _kind(self, kind: type) -> Any:
        known = _known(kind.__module__)
        if known is not None:
            return [_name_of(kind), known]
        parts = {name: self.of(part) for name, part in vars(kind).items() if not _is_of_python(name, part)}
        return [_name_of(kind), dict(sorted(parts.items())), [self.of(base) for base in kind.__bases__]]

    def _array(self, value: Any, is_own: bool) -> Any:
        found: list[Any] = [_name_of(type(value)), list(value.shape), str(value.dtype)]
        if isinstance(value, Tensor):
            found += [str(value.device.type), str(value.layout), value.requires_grad]
            is_fixed = not (value.requires_grad or isinstance(value, nn.Parameter) or value.is_meta)
            if not is_own or not is_fixed:
                return found
        size = value.numel() if isinstance(value, Tensor) else value.size
        if size > _MOST_ELEMENTS:
            raise UndescribableError(f"it holds a tensor of {size} elements")
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                return [*found, self.of(value.tolist())]
            return [*found, _digest_of(np.ascontiguousarray(value).tobytes())]
        plain = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        return [*found, _digest_of(plain.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())]

    def _module(self, module: nn.Module) -> Any:
        """Return all parts of a module: their classes, settings, tensors and hooks."""
        return [[name, self._part(part)] for name, part in module.named_modules()]

    def _part(self, part: nn.Module) -> Any:
        kind, is_own = type(part), _known(type(part).__module__) is None
        self._seen.setdefault(id(part), (len(self._seen), part))
        left = _OF_TORCH | _OF_LIGHTNING | _SET_BY_ACCELERATE
        held = {name: one for name, one in vars(part).items() if name not in left}
        forward = vars(part).get("_original_forward", vars(part).get("forward"))
        if "dynamo_ctx" in held:  # of torch.compile, whose own state differs in every process
            held, forward = _compiled(held["dynamo_ctx"]), None
        if forward is not None and getattr(forward, "__func__", None) is not kind.forward:
            held["forward"] = forward
        tensors = [[name, self._array(one, is_own)] for name, one in _tensors_of(part)]
        hooks = [[self.of(hook) for hook in getattr(part, name, {}).values()] for name in _HOOKS]
        return [self.of(kind), self._attributes(held, is_own), tensors, hooks]

    def _object(self, value: Any, is_own: bool) -> Any:
        kind, attributes = type(value), attributes_of(value)
        if isinstance(value, Mapping):
            pairs = [(self.of(key), self.of(one, is_own=is_own)) for key, one in value.items() if not _is_skipped(key)]
            return [_name_of(kind), sorted(map(list, pairs), key=json.dumps), self._attributes(attributes, is_own)]
        if isinstance(value, list | deque | set | frozenset):
            if all(type(item) in _PLAIN for item in value):  # there may be millions of them
                shown = sorted(map(repr, value)) if isinstance(value, set | frozenset) else map(repr, value)
                return [_name_of(kind), digest("\n".join(shown))]
            items = [self.of(item, is_own=is_own) for item in value]
            return [_name_of(kind), sorted(items, key=json.dumps) if isinstance(value, set | frozenset) else items]
        if hasattr(value, "__dict__") or attributes:
            return [self.of(kind), self._attributes(attributes, is_own)]
        if not is_own:
            return self.of(kind)
        try:
            hashing = _Hashing()
            pickle.Pickler(hashing).dump(value)
            return [self.of(kind), hashing.found.hexdigest()[:32]]
        except Exception as error:  # each type has its own way to refuse
            raise UndescribableError(f"a {_name_of(kind)} does not show what it holds") from error

    def _attributes(self, held: Mapping[str, Any], is_own: bool) -> dict[str, Any]:
        return {name: self.of(held[name], is_own=is_own) for name in sorted(held) if not _is_skipped(name)}


@final
class _Hashing:
    """A file that keeps a digest of what is written to it, and refuses to take as much as whole data sets are."""

    def __init__(self) -> None:
        self.found, self._num_bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Take some bytes."""
        self._num_bytes += memoryview(data).nbytes
        if self._num_bytes > _MOST_ELEMENTS:
            raise UndescribableError(f"it holds more than {_MOST_ELEMENTS} bytes")
        self.found.update(data)
        return memoryview(data).nbytes


def _is_of_python(name: str, part: Any) -> bool:
    """Say whether Python keeps a name in a class, perhaps only once it was copied or asked for its annotations."""
    is_special = name.startswith("__") and name.endswith("__")
    return name == "_abc_impl" or (is_special and not isinstance(part, FunctionType | property | staticmethod))


def _is_skipped(name: Any) -> bool:
    return isinstance(name, str) and name in NO_SETTINGS


def _compiled(context: Any) -> dict[str, Any]:
    """Return how a module was compiled: its backend and the settings of that."""
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    config = getattr(context, "compiler_config", None) or {}
    plain = {name: value for name, value in config.items() if type(value) in _PLAIN}
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__qualname__", type(backend).__qualname__)
    return {"backend": name, "dynamic": getattr(context, "_dynamic", None), "config": plain}


def _tensors_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters(recurse=False)
    yield from part.named_buffers(recurse=False)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    slots = [name for kind in type(value).__mro__ for name in _as_names(vars(kind).get("__slots__", ()))]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _as_names(slots: Any) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def read_by(holder: Any, functions: list[Any]) -> dict[str, Any]:
    """Return the attributes of an object that functions read by name, or what they call in its class and module."""
    names = names_of(holder if isinstance(holder, type) else type(holder), functions)
    return {name: value for name, value in attributes_of(holder).items() if name in names and name not in NO_SETTINGS}


def names_of(kind: type, functions: list[Any]) -> set[str]:
    """Return the names in functions of a class, and in what they call by name in it or in their modules."""
    return {name for one in functions for code in _codes_of(one, kind) for name in names_in(code)}


def _codes_of(function: Any, owner: type) -> list[CodeType]:
    """Return the code of a function and of what it calls by name: of its module and of all its classes."""
    left, found = [function], dict[CodeType, None]()
    while left:
        one = left.pop()
        inner: Any = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        one = inspect.unwrap(inner)
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType) and code not in found:
            found[code] = None
            left += _called_by(one, code, owner)
    return list(found)


def _called_by(function: Any, code: CodeType, owner: type) -> Iterator[FunctionType]:
    for name in names_in(code):
        ways = [vars(base).get(name) for base in owner.__mro__]
        for found in (*ways, getattr(function, "__globals__", {}).get(name)):
            method = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            inner = inspect.unwrap(method) if inspect.isfunction(method) else None
            if inspect.isfunction(inner) and not is_of_library(inner):
                yield inner


def is_filled(cell: Any) -> bool:
    """Say whether a cell of a closure has its value by now."""
    try:
        _ = cell.cell_contents
    except ValueError:  # a name that is bound later
        return False
    return True


def is_of_library(value: Any) -> bool:
    """Say whether a function or class is of a package, whose version is part of the key."""
    return _known(value.__module__) is not None


@functools.cache
def _known(module: str | None) -> str | None:
    """Return what tells the code of a module of a package; None if it is code of the user."""
    top = str(module).partition(".")[0]
    if top in _LIBRARIES or top in sys.stdlib_module_names or module is None:
        return top
    place = getattr(sys.modules.get(top), "__file__", None) or ""
    if not {"site-packages", "dist-packages"} & {*place.replace("\\", "/").split("/")}:
        return None
    return f"{top} {getattr(sys.modules[top], '__version__', None)} {os.stat(place).st_mtime_ns}"


@functools.cache
def _globals_of(code: CodeType) -> frozenset[str]:
    """Return the names that code reads in its module."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*(_globals_of(one) for one in code.co_consts if isinstance(one, CodeType))))


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return all names and texts in code: an attribute may be read by ``getattr`` and a text."""
    own = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
    return frozenset(own.union(*(names_in(one) for one in code.co_consts if isinstance(one, CodeType))))


def _text_of(code: CodeType) -> str:
    consts = [_text_of(one) if isinstance(one, CodeType) else _text_of_const(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {consts}"


def _text_of_const(value: Any) -> str:
    # The order of a set differs between processes.
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def digest(text: str) -> str:
    """Return a digest of a text, the same in every process."""
    return _digest_of(text.encode())


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
