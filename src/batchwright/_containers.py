"""Containers of named fields: which objects are, what they hold, and how the same container is made of other values.

A mapping, a named tuple and a dataclass name their fields. Lists and plain tuples do not: what they hold depends on
where they stand.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import numbers
import os
import types
from collections import UserDict, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .errors import ArgumentError

# What belongs to no example, wherever it stands. Paths and sizes have parts, but are one value.
_PLAIN = (
    str, bytes, type(None), bool, int, float, complex, numbers.Number, np.generic, enum.Enum, os.PathLike, torch.Size,
    torch.dtype, torch.device, torch.Generator, datetime.date, datetime.time, datetime.timedelta, type,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip
_COMMON = frozenset({str, bytes, type(None), bool, int, float})
# Mappings that are made from a dict, and hold no more than their keys and values.
_MAPPINGS = (dict, UserDict, types.MappingProxyType)


def fields_of(value: Any) -> dict[Any, Any] | None:
    """Return the fields of a container that names them, None for everything else.

    >>> fields_of({"x": 1}), fields_of([1]), fields_of((1, 2))
    ({'x': 1}, None, None)
    """
    if isinstance(value, dict | Mapping):  # a dict is known at once
        return dict(value)
    if isinstance(value, tuple):
        names = names_of(value)
        return None if names is None else dict(zip(names, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name, None) for item in dataclasses.fields(value)}
    return None


def names_of(value: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Return the names in a named tuple or in a result of torch such as ``x.max(0)``, None for a plain tuple."""
    if hasattr(value, "_fields"):
        return tuple(value._fields)
    if hasattr(value, "n_sequence_fields"):
        return tuple(f"[{place}]" for place in range(len(value)))
    return None


def is_open(value: Any) -> bool:
    """Say whether a container holds no more than its fields; mappings that are no dicts may, such as a TensorDict."""
    return not isinstance(value, Mapping) or isinstance(value, _MAPPINGS)


def rebuilt(value: Any, fields: dict[Any, Any]) -> Any:
    """Return a container like ``value`` with these fields; a mapping that cannot be made from a dict becomes one.

    Raises:
        ArgumentError: the container holds more than its fields, or changes them when it is made.

    >>> rebuilt(defaultdict(int, a=1), {"a": 2})
    defaultdict(<class 'int'>, {'a': 2})
    """
    if type(value) is dict:
        return fields
    if isinstance(value, Mapping):
        return _mapping(value, fields)
    if isinstance(value, tuple):
        make = getattr(type(value), "_make", type(value))  # _make is safe from a __new__ of one's own
        return _with_attributes(make(list(fields.values())), value)
    return _dataclass(value, fields)


def _with_attributes(made: Any, value: Any) -> Any:
    """Give a container the attributes that the first one has besides its fields, if they belong to no example.

    The private ones of transformers' containers stay behind: they describe the whole batch.
    """
    attributes = dict(getattr(value, "__dict__", {}))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    attributes |= {name: getattr(value, name) for name in slots if not name.startswith("__")}
    if isinstance(value, UserDict):
        attributes.pop("data", None)
    is_known = type(value).__module__.partition(".")[0] == "transformers"
    for name, attribute in attributes.items():
        if is_known and name.startswith("_"):
            continue
        if getattr(made, name, None) is attribute:
            continue
        if not is_plain(attribute):
            raise ArgumentError(
                f"a {type(value).__name__} holds {name!r} besides its fields, so one of some examples cannot be made; "
                "make it a field, or give split="
            )
        setattr(made, name, attribute)
    return made


def _mapping(value: Mapping[Any, Any], fields: dict[Any, Any]) -> Any:
    if isinstance(value, defaultdict):
        return type(value)(value.default_factory, fields)
    try:
        made: Any = type(value)(fields)  # type: ignore[call-arg]  # BatchEncoding and the like take a dict
    except TypeError:
        return fields
    return _with_attributes(made, value) if _holds(made, fields) else fields


def _holds(made: Any, fields: dict[Any, Any]) -> bool:
    return len(made) == len(fields) and all(name in made and made[name] is fields[name] for name in fields)


def _dataclass(value: Any, fields: dict[str, Any]) -> Any:
    derived = _derived(value)
    if derived:
        raise ArgumentError(
            f"a {type(value).__name__} derives {derived[0]!r} from its fields, so one of some examples cannot be made"
        )
    made = dataclasses.replace(value, **fields)
    for name, given in fields.items():
        if getattr(made, name) is not given:
            raise ArgumentError(
                f"a {type(value).__name__} changes {name!r} when it is made, so one of some examples would differ"
            )
    return made if hasattr(value, "__dict__") and not _own_slots(value, fields) else _with_attributes(made, value)


def _own_slots(value: Any, fields: dict[str, Any]) -> bool:
    return any(set(getattr(kind, "__slots__", ())) - fields.keys() for kind in type(value).__mro__)


def _derived(value: Any) -> list[str]:
    """Return what a dataclass holds besides the fields that it is made from; cached properties are made anew."""
    known = value.__dataclass_fields__
    derived = [name for name, item in known.items() if not item.init or "INITVAR" in repr(item._field_type)]
    others = getattr(value, "__dict__", {}).keys() - known.keys()
    return derived + [name for name in others if not isinstance(_class_value(value, name), functools.cached_property)]


def _class_value(value: Any, name: str) -> Any:
    return getattr(type(value), name, None)


def is_plain(value: Any) -> bool:
    """Say whether a value belongs to no example: a number, a text, a path, or an object that holds only such.

    >>> is_plain(0.5), is_plain("a"), is_plain(None), is_plain([1]), is_plain(np.ones(2))
    (True, True, True, False, False)
    """
    # The abstract classes are slow to ask, and a batch has a value of these kinds per example.
    if type(value) in _COMMON:
        return True
    if isinstance(value, list | tuple | dict | torch.Tensor | np.ndarray):
        return isinstance(value, torch.Size)
    return _holds_only_plain(value, set())


def _holds_only_plain(value: Any, seen: set[int]) -> bool:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return True
    kind = type(value)
    # What can be counted, indexed or read like an array may hold a value per example.
    if any(hasattr(kind, name) for name in ("__len__", "__iter__", "__getitem__", "__array__", "__array_interface__")):
        return False
    if dataclasses.is_dataclass(value):
        return False  # its fields are looked at one by one
    seen.add(id(value))
    return all(_holds_only_plain(item, seen) for item in _state_of(value))


def _state_of(value: Any) -> list[Any]:
    slots = [name for kind in type(value).__mro__ for name in _as_names(kind.__dict__.get("__slots__", ()))]
    state = [getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)]
    return state + list(getattr(value, "__dict__", {}).values())


def _as_names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)
