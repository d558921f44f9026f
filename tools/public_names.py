"""Write every public name of batchwright, with its signature, as JSON.

::

    PYTHONPATH=src python tools/public_names.py tests/data/public_names.json

Annotations are left out, so a signature does not depend on where a type is defined or on how it is spelled. A class is
described by what an instance offers, wherever in its ancestry that is defined.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, Protocol

FRONTS = (
    "batchwright",
    "batchwright.errors",
    "batchwright.plan",
    "batchwright.size",
    "batchwright.size.combine",
    "batchwright.size.learning_rate",
    "batchwright.size.noise",
    "batchwright.size.schedules",
    "batchwright.size.signals",
    "batchwright.step",
    "batchwright.serve",
    "batchwright.serve.http",
    "batchwright.testing",
    "batchwright.integrations.accelerate",
    "batchwright.integrations.dynabatch",
    "batchwright.integrations.dynabatch.sampler",
    "batchwright.integrations.huggingface",
    "batchwright.integrations.lightning",
    "batchwright.integrations.ray",
    "batchwright.integrations.sentence_transformers",
    "batchwright.lab",
    "batchwright.lab.callbacks",
    "batchwright.lab.datasets",
    "batchwright.lab.models",
    "batchwright.lab.observations",
    "batchwright.lab.presets",
    "batchwright.lab.report",
    "batchwright.lab.runner",
    "batchwright.lab.statistics",
    "batchwright.lab.strategies",
    "batchwright.lab.update_time",
    "batchwright.cli",
)
# The protocols of Python that a user calls without naming the method.
PROTOCOLS = frozenset(
    f"__{name}__"
    for name in (
        *("call", "iter", "next", "len", "length_hint", "getitem", "contains", "and", "or", "add", "bool"),
        *("enter", "exit", "aenter", "aexit", "aiter", "anext"),
    )
)


def public_names() -> dict[str, str]:
    """Return ``{"front.name": text}`` for all fronts, with ``"front.Class.member"`` for the members of classes.

    A function or class that stands in several fronts is described in the first; the others say ``"is front.name"``.
    """
    named = {front: dict(_names_of(front)) for front in FRONTS}
    homes: dict[int, str] = {}
    for front, names in named.items():
        for name, value in sorted(names.items()):
            if inspect.isroutine(value) or isinstance(value, type | types.ModuleType):
                homes.setdefault(id(value), f"{front}.{name}")
    classes = {value for names in named.values() for value in names.values() if isinstance(value, type)}
    entries: dict[str, str] = {}
    for front, names in named.items():
        for name, value in names.items():
            full = f"{front}.{name}"
            home = homes.get(id(value), full)
            entries.update(describe(full, value, classes) if home == full else {full: f"is {home}"})
    return entries


def _names_of(front: str) -> Iterator[tuple[str, Any]]:
    """Yield the names in ``__all__``; without one, what a module defines or imports as itself, and no plain values."""
    module = importlib.import_module(front)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name in _defined_in(module) if not name.startswith("_")]
    for name in names:
        yield name, getattr(module, name)


def _defined_in(module: types.ModuleType) -> Iterator[str]:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)


def describe(full: str, value: Any, classes: Set[type] = frozenset()) -> dict[str, str]:
    """Return the entries of one name; ``classes`` are the public ones, which count as bases.

    >>> describe("front.f", lambda a, /, b=2, *, c: None)
    {'front.f': 'function(a, /, b=2, *, c)'}
    """
    if isinstance(value, types.ModuleType):
        return {full: "module"}
    if isinstance(value, type):
        return _describe_class(full, value, classes)
    if inspect.isroutine(value):
        return {full: _asynchronous(value) + "function" + signature_of(value)}
    return {full: f"value {_plain(repr(value))}"}


def _describe_class(full: str, cls: type, classes: Set[type]) -> dict[str, str]:
    ours = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "batchwright"]
    bases = {base.__name__ for base in cls.__mro__[1:] if base is not object and (base not in ours or base in classes)}
    text = "class"
    if "Protocol" not in bases and any(name in vars(base) for base in ours for name in ("__init__", "__new__")):
        text += signature_of(cls)
    members = {f"{full}.{name}": _describe_member(cls, name) for name in sorted(_members(ours))}
    return {full: f"{text}, bases: {', '.join(sorted(bases)) or 'none'}", **members}


def _members(ours: list[type]) -> set[str]:
    """Return public methods, properties, fields, and attributes that a method sets on ``self``."""
    names = {name for base in ours for name in (*vars(base), *_fields(base), *_set_on_self(base))}
    return {name for name in names if not name.startswith("_") or name in PROTOCOLS}


def _fields(cls: type) -> Iterator[str]:
    """Yield fields without a default. In other classes an annotation may stand for what a subclass brings."""
    if dataclasses.is_dataclass(cls) or Protocol in cls.__mro__:
        yield from inspect.get_annotations(cls)


def _set_on_self(cls: type) -> Iterator[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # made at run time
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def _describe_member(cls: type, name: str) -> str:
    """Return a member as text. A property, a field and an attribute look the same from outside."""
    raw = inspect.getattr_static(cls, name, None)
    for kind in (classmethod, staticmethod):
        if isinstance(raw, kind):
            return kind.__name__ + signature_of(getattr(cls, name))
    if inspect.isfunction(raw):
        return _asynchronous(raw) + "method" + signature_of(raw)
    return "attribute"


def _asynchronous(value: Any) -> str:
    return "async " if inspect.iscoroutinefunction(value) else ""


def signature_of(value: Any) -> str:
    """Return names, kinds and defaults of the parameters."""
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):  # built in, without a signature
        return "(...)"
    empty = inspect.Parameter.empty
    parameters = [
        each.replace(annotation=empty, default=empty if each.default is empty else _Shown(each.default))
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=empty))


class _Shown:
    """A default whose ``repr`` names no address and no module."""

    def __init__(self, value: Any) -> None:
        self.text = _plain(value.__qualname__ if inspect.isroutine(value) or isinstance(value, type) else repr(value))

    def __repr__(self) -> str:
        return self.text


def _plain(text: str) -> str:
    return re.sub(r"\bbatchwright(\.\w+)*\.", "", re.sub(r" at 0x[0-9a-f]+", "", text))


def main(path: str) -> None:
    """Write the file."""
    text = json.dumps(public_names(), indent=1, sort_keys=True, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
