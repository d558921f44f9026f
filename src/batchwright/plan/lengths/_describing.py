"""What makes one function or object differ from another: its code, its state and all that they hold, as one hash.

An object is described by what ``pickle`` would keep of it and by its attributes. What neither shows, such as an open
file or an object of C that does not pickle, cannot be told from another of its type, and is refused.
"""

from __future__ import annotations

import _thread
import copyreg
import dis
import functools
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

from ._cache import ContentHash

SCALARS = (type(None), bool, int, float, complex, str, bytes, type(...))
# They hold nothing that could change a count.
LOCKS = (_thread.LockType, _thread.RLock)
# What Python writes into every class, and what says nothing of what the class does.
UNTOLD = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__"),
    *("_abc_impl", "__dataclass_fields__", "__dataclass_params__", "__slotnames__"),
}

# With these pickle makes an object that does not say itself how it is made.
MAKERS = (copyreg.__newobj__, copyreg.__newobj_ex__)  # type: ignore[attr-defined]


class OpaqueError(Exception):
    """Something holds what cannot be described."""


@final
class Description:
    """A hash over values and everything they hold, the same in every process.

    Code of installed packages is known by its name and their version, all other code by what it does.

    >>> Description().add((1, [2, 3])).digest() == Description().add((1, (2, 3))).digest()
    False
    """

    def __init__(self, known: Callable[[Any], bytes | None] = lambda value: None) -> None:
        self._known = known  # describes what says by itself who it is
        self._hash = ContentHash()
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # an id belongs to an object as long as that lives

    def digest(self) -> bytes:
        """Return the hash of everything added so far."""
        return self._hash.key().encode()

    def add(self, value: Any) -> Description:
        """Add a value and all it holds, or raise ``OpaqueError``."""
        if type(value) in SCALARS:
            return self._say(type(value).__name__, repr(value))
        if id(value) in self._seen:
            return self._say("seen", str(self._seen[id(value)]))
        self._seen[id(value)] = len(self._held)
        self._held.append(value)
        if isinstance(value, type):
            return self._add_class(value)
        if (identity := self._known(value)) is not None:
            self._say("known", "")._hash.add(identity)
            return self
        if isinstance(value, FunctionType):
            return self._add_function(value)
        if type(value) in (tuple, list, dict):
            return self._add_plain(value)
        if isinstance(value, set | frozenset):
            return self._say("set", _full_name(type(value)))._add_unordered(value)
        if isinstance(value, CodeType):
            return self._say("code", repr((value.co_code, value.co_names, value.co_varnames))).add(value.co_consts)
        if isinstance(value, MethodType):
            return self._say("method", "").add(value.__func__).add(value.__self__)
        if type(value) is functools.partial:  # its state differs after a look at its attributes
            return self._say("partial", "").add_all((value.func, value.args, value.keywords, vars(value)))
        if isinstance(value, ModuleType):
            return self._say("module", _known_as(value.__name__))
        if isinstance(value, property | staticmethod | classmethod):
            return self._say(type(value).__name__, "").add(
                value.fget if isinstance(value, property) else value.__func__
            )
        return self._say("lock", "") if isinstance(value, LOCKS) else self._add_object(value)

    def add_all(self, values: Iterable[Any]) -> Description:
        """Add values in their order."""
        for value in values:
            self.add(value)
        return self

    def add_seen_through(self, attributes: dict[str, Any]) -> Description:
        """Add attributes by name; one that cannot be described is known by its type only."""
        for name, value in attributes.items():
            part = self._part()
            try:
                part.add(value)
                self._say(name, part._hash.key())
            except OpaqueError:
                self._say(name, _full_name(type(value)))
        return self

    def _say(self, kind: str, text: str) -> Description:
        # A lone surrogate is not valid text.
        self._hash.add(kind.encode("utf-8", "backslashreplace")).add(text.encode("utf-8", "backslashreplace"))
        return self

    def _part(self) -> Description:
        """Return a description of its own that knows what was seen, so that a circle ends."""
        part = Description(self._known)
        part._seen, part._held = dict(self._seen), list(self._held)
        return part

    def _add_plain(self, value: Any) -> Description:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        if all(kind in SCALARS for kind in set(map(type, items))):  # at once: a vocabulary has 200,000 of them
            return self._say("plain", repr(value))
        return self._say(type(value).__name__, str(len(value))).add_all(items)

    def _add_unordered(self, values: Iterable[Any]) -> Description:
        """Add values whose order changes from process to process."""
        texts = (repr(value) if type(value) in SCALARS else self._part().add(value)._hash.key() for value in values)
        return self._say("sorted", repr(sorted(texts)))

    def _add_class(self, cls: type) -> Description:
        self._say("class", _known_as(cls.__module__) + "." + cls.__qualname__)
        if _is_installed(cls.__module__):
            return self
        names = sorted(vars(cls).keys() - UNTOLD)
        for name in names:
            value = vars(cls)[name]
            # A slot has a value only in an object.
            self._say("attribute", name).add(None if type(value).__name__ == "member_descriptor" else value)
        return self.add(cls.__bases__)

    def _add_function(self, function: FunctionType) -> Description:
        self._say("function", f"{_known_as(function.__module__)}.{function.__qualname__}").add(function.__code__)
        cells = [_cell_contents(cell) for cell in function.__closure__ or ()]
        self.add_all((function.__defaults__, function.__kwdefaults__, cells, vars(function)))
        if not _is_installed(function.__module__):
            self._add_globals(function)
        return self

    def _add_globals(self, function: FunctionType) -> None:
        """Add the globals a function names: in a notebook the tokenizer is usually one of them."""
        loaded, named = _names(function.__code__)
        for name in sorted(loaded & function.__globals__.keys()):
            value = function.__globals__[name]
            self._say("global", name).add(value)
            if isinstance(value, ModuleType) and not _is_installed(value.__name__):
                for part in sorted(named & vars(value).keys()):
                    self._say("global", f"{name}.{part}").add(vars(value)[part])

    def _add_object(self, value: Any) -> Description:
        """Add what pickle would keep of an object, and its attributes."""
        reduced = _reduced(value)
        self._say("object", "").add(type(value))
        if isinstance(reduced, str):  # known by its name, such as a function behind functools.lru_cache
            return self._say("name", f"{getattr(value, '__module__', '')}.{reduced}").add(
                getattr(value, "__dict__", {})
            )
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        self.add_all((make, arguments, state, None if items is None else [*items], None if pairs is None else [*pairs]))
        # A state of its own may leave out a setting, as sentencepiece's does; what does not pickle it stands for. An
        # object that says how to make it anew is believed: a logger is its name, and not all other loggers too.
        attributes = getattr(value, "__dict__", None)
        if make in MAKERS and isinstance(attributes, dict) and not _holds(state, attributes):
            self.add_seen_through(attributes)
        return self


def _holds(state: Any, attributes: dict[str, Any]) -> bool:
    """Say whether the state that pickle keeps has every attribute as it is."""
    plain = state[0] if isinstance(state, tuple) and len(state) == 2 else state
    kept = plain if isinstance(plain, dict) else {}
    return all(name in kept and kept[name] is value for name, value in attributes.items())


def _reduced(value: Any) -> Any:
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        return value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:  # a failing pickle raises nearly anything
        raise OpaqueError(f"{_full_name(type(value))}: {error}") from error


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the globals that code loads, and all names in it, attributes too."""
    loaded = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    named = set(code.co_names)
    for inner in (_names(const) for const in code.co_consts if isinstance(const, CodeType)):
        loaded, named = loaded | inner[0], named | inner[1]
    return loaded, named


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _known_as(module: str | None) -> str:
    """Return the name of a module, and the version of an installed one."""
    version = getattr(sys.modules.get((module or "").partition(".")[0]), "__version__", None)
    return f"{module} {version}" if isinstance(version, str) and _is_installed(module) else f"{module}"


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Say whether a module comes with Python or with a package, so that its code changes with a version only."""
    found = sys.modules.get(module or "__main__")
    if found is None or found.__name__ == "__main__":
        return False
    file = getattr(found, "__file__", None)
    if file is None:
        return module in sys.builtin_module_names or getattr(found.__spec__, "origin", None) in ("built-in", "frozen")
    path = PurePath(file)
    return path.is_relative_to(sysconfig.get_path("stdlib")) or not {"site-packages", "dist-packages"}.isdisjoint(
        path.parts
    )
