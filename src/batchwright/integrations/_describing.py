"""What a found budget depends on, as JSON values: the model, the code that runs, the data, the device, the packages."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from .._modules import recomputes_activations
from .._types import IntArray

_PACKAGES = ("batchwright", "torch", "transformers", "accelerate", "lightning", "peft", "trl", "sentence-transformers")
# Their code is known by its version.
_LIBRARIES = {*(name.replace("-", "_") for name in _PACKAGES), "numpy", "torch", "pytorch_lightning", "builtins"}
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
# Of a module: its mode, which changes, and where its weights came from.
_NO_SETTINGS = ("training", "name_or_path")
_MOST_DEEP = 3


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return what the cost of a model depends on, as JSON values."""
    config: Any = getattr(model, "config", None)
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else repr(config)
    parameters = [
        [name, list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
        for name, parameter in model.named_parameters()
    ]
    kinds = {type(part) for part in model.modules()}
    return {
        "class": _name_of(type(model)),
        "config": digest(text),
        "attention": str(getattr(config, "_attn_implementation", None)),
        "parameters": digest(json.dumps(parameters)),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gradient_checkpointing": recomputes_activations(model),
        "modules": digest(json.dumps([[name, _describe_part(part)] for name, part in model.named_modules()])),
        "code": digest(json.dumps(sorted({_code_digest(kind.forward, kind) for kind in kinds}))),
    }


def _describe_part(part: nn.Module) -> list[Any]:
    """Return the class of a module and its plain settings, such as the heads of an attention, which no weight shows."""
    chosen = {name: value for name, value in vars(part).items() if name[0] != "_" and name not in _NO_SETTINGS}
    return [_name_of(type(part)), _scalars(chosen)]


def describe_callable(value: Any, *, owner: type | None = None, depth: int = 0) -> Any:
    """Return the name, the code and the plain settings of a function or of an object that is called, as JSON values.

    A collator that pads to another length, or a loss that was written anew under its old name, is another one. Code is
    that of the function, of what it calls by name in its module or class, and of what its closure or its attributes
    hold to be called, such as a collator that it wraps. What is neither called nor plain is left out.

    Args:
        value: to be called.
        owner: the class whose methods it calls, if it is no bound method.
        depth: how deep in closures it was found.
    """
    if value is None or isinstance(value, type):
        return None if value is None else _name_of(value)
    if isinstance(value, functools.partial):
        given: dict[Any, Any] = {**dict(enumerate(value.args)), **value.keywords}
        return [describe_callable(value.func, depth=depth + 1), *_describe_held(given, depth)]
    inner: Any = inspect.unwrap(value)
    if inspect.isroutine(inner):
        code = getattr(inner, "__code__", None)
        cells = getattr(inner, "__closure__", None) or ()
        names = () if code is None else code.co_freevars
        held = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False) if is_filled(cell)}
        name = f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', inner)}"
        defaults = dict(enumerate(getattr(inner, "__defaults__", None) or ()))
        if inspect.ismethod(inner):
            held, owner = {**held, **_read_by(inner.__self__, [inner])}, type(inner.__self__)
        return [name, _code_digest(inner, owner), _scalars(defaults), *_describe_held(held, depth)]
    kind = type(value)
    return [_name_of(kind), _code_digest(kind.__call__, kind), *_describe_held(getattr(value, "__dict__", {}), depth)]


def _describe_held(held: Mapping[Any, Any], depth: int) -> list[Any]:
    """Return the plain values of a closure or an object, and what it may call, such as a collator that it wraps."""
    called = {str(name): one for name, one in held.items() if callable(one) and not isinstance(one, nn.Module)}
    deeper = {name: describe_callable(one, depth=depth + 1) for name, one in called.items() if depth < _MOST_DEEP}
    return [_scalars(held), deeper]


def describe_read(holder: Any, functions: Iterable[Any]) -> dict[str, str]:
    """Return the plain attributes of an object that functions of its class read by name, as JSON values.

    >>> class Trainer:
    ...     def __init__(self):
    ...         self.num_calls, self.num_negatives = 0, 8
    ...     def compute_loss(self):
    ...         return self.num_negatives
    >>> describe_read(Trainer(), [Trainer.compute_loss])
    {'num_negatives': '8'}
    """
    return _scalars(_read_by(holder, functions))


def _read_by(holder: Any, functions: Iterable[Any]) -> dict[str, Any]:
    kind = holder if isinstance(holder, type) else type(holder)
    names = {name for one in functions for code in _codes_of(one, kind) for name in _names_in(code)}
    held = getattr(holder, "__dict__", {})
    return {name: value for name, value in held.items() if name in names and name not in _NO_SETTINGS}


def describe_optimizer(optimizer: Any) -> list[Any]:
    """Return the kind of an optimizer and the settings that its state may depend on, as JSON values.

    >>> describe_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))[1]["momentum"]
    '0.9'
    """
    chosen = {name: value for name, value in optimizer.defaults.items() if name not in ("lr", "weight_decay", "eps")}
    return [_name_of(type(optimizer)), _scalars(chosen)]


def _scalars(values: Mapping[Any, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items() if isinstance(value, str | int | float | None)}


def is_filled(cell: Any) -> bool:
    """Say whether a cell of a closure has its value by now."""
    try:
        _ = cell.cell_contents
    except ValueError:  # a name that is bound later
        return False
    return True


def _code_digest(function: Any, owner: type | None = None) -> str:
    """Return a digest of what a function computes, the same in every process; of one without code, its name."""
    found = _codes_of(function, owner)
    name = str(getattr(inspect.unwrap(getattr(function, "__func__", function)), "__qualname__", None))
    return digest(json.dumps(sorted(found.values())) if found else name)


def _codes_of(function: Any, owner: type | None) -> dict[CodeType, str]:
    """Return the code of a function and of what it calls by name, with the text of each."""
    left, found = [inspect.unwrap(getattr(function, "__func__", function))], dict[CodeType, str]()
    while left:
        one = left.pop()
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType) and code not in found:
            found[code] = _text_of(code)
            left += _called_by(one, code, owner)
    return found


def _called_by(function: Any, code: CodeType, owner: type | None) -> Iterator[FunctionType]:
    """Yield what a function may call by name: functions of its module and methods of the class, if not of a library."""
    for name in _names_in(code):
        method = None if owner is None else inspect.getattr_static(owner, name, None)
        for found in (getattr(method, "__func__", method), getattr(function, "__globals__", {}).get(name)):
            inner = inspect.unwrap(found) if inspect.isfunction(found) else None
            if inspect.isfunction(inner) and not is_of_library(inner):
                yield inner


def is_of_library(value: Any) -> bool:
    """Say whether a function or class is of a package whose version is part of the key."""
    return str(value.__module__).partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> set[str]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names, *(name for one in inner for name in _names_in(one))}


def _text_of(code: CodeType) -> str:
    consts = [_text_of(one) if isinstance(one, CodeType) else _text_of_const(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {consts}"


def _text_of_const(value: Any) -> str:
    # The order of a set differs between processes.
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def describe_lengths(lengths: IntArray) -> dict[str, Any]:
    """Return the quantiles of lengths, and the order of their number.

    >>> describe_lengths(np.array([[3], [5], [9]]))
    {'quantiles': [[3, 3, 3, 5, 9, 9, 9]], 'number': '2 bits'}
    """
    found = np.quantile(lengths, _QUANTILES, axis=0, method="inverted_cdf").astype(int)
    return {"quantiles": found.T.tolist(), "number": f"{len(lengths).bit_length()} bits"}


def describe_device(device: torch.device) -> list[Any]:
    """Return the name of a device, and its memory or its threads."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return [found.name, found.total_memory]
    return [device.type, f"{platform.machine()} {platform.processor()}", torch.get_num_threads(), os.cpu_count()]


def describe_packages() -> dict[str, str | None]:
    """Return the versions of what runs a step."""
    return {name: _version_of(name) for name in _PACKAGES}


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def digest(text: str) -> str:
    """Return a digest of a text, the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
