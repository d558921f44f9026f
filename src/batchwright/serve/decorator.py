"""batched: turn a function of a list into a function of one item."""

from __future__ import annotations

import builtins
import functools
import inspect
import pickle
import sys
import threading
import types
import weakref
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, final, overload

from ..errors import ArgumentError, Closed
from .batcher import Batcher
from .mapping import Mapped
from .stats import Stats

Run = Callable[..., Any]


@final
class BatchedFunction:
    """A function of one item; its ``Batcher`` calls the function of a list.

    Await it, or call ``sync`` from a thread. A method has one batcher per object, which goes with the object and is not
    copied or pickled with it; a class method has one per class, a static method has one. A subclass that overrides a
    batched method reaches that of its parent by ``super()``, which has a batcher of its own; the function of a list is
    ``__wrapped__``.

    Args:
        run: the function of a list.
        options: options of ``Batcher``.

    Attributes:
        batcher: collects the requests; its threads start with the first request.
    """

    def __init__(self, run: Run, options: dict[str, Any]) -> None:
        self._is_of_class = isinstance(run, classmethod)
        # As in Python, only functions become methods: a static method or an object that can be called does not.
        self._is_static = isinstance(run, staticmethod | types.MethodType) or not hasattr(run, "__get__")
        self._run: Run = run.__func__ if isinstance(run, staticmethod | classmethod) else run
        # What an object keeps, such as a `stats` of its own, must not stand in the place of what is here.
        kept = ("__dict__",) if isinstance(self._run, types.FunctionType) else ()
        functools.update_wrapper(self, self._run, updated=kept)
        self._title: str = getattr(self._run, "__qualname__", type(self._run).__qualname__)
        self._needs_owner = not self._is_static and not _takes_a_list(self._run)
        self._options = options
        self._kept = _Kept()
        self._owner: Any = None
        # What needs an object runs nothing without it; the options are checked all the same.
        waits = {"background"} if self._needs_owner else set()
        own = {name: value for name, value in options.items() if name not in waits}
        self.batcher: Batcher[Any, Any] = Batcher(self._run, **own)

    def __get__(self, instance: Any, owner: type | None = None) -> BatchedFunction:
        if self._is_of_class:
            instance = type(instance) if owner is None else owner
        if instance is None or self._is_static or self._owner is not None:
            return self
        bound = object.__new__(BatchedFunction)
        vars(bound).update(vars(self))
        # Whoever holds the bound function keeps its object alive, as a bound method does; the batcher does not.
        bound._owner = instance
        vars(bound)["__wrapped__"] = types.MethodType(self._run, instance)
        bound.batcher = self._kept.batcher_of(
            instance, lambda: Batcher(_bind(self._run, instance), **self._options), self._title
        )
        return bound

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchedFunction) and self.batcher is other.batcher

    def __hash__(self) -> int:
        return hash(self.batcher)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # Threads and locks cannot be pickled: another process makes its own batcher.
        if self._owner is not None:
            name = self._title.rpartition(".")[2]
            if getattr(self._owner, name, None) != self:
                raise pickle.PicklingError(f"{self._title} is overridden; pickle the object and look it up there")
            return getattr, (self._owner, name)
        if _find(self.__module__, self._title) is self:
            return self._title
        kind = {"_is_static": self._is_static, "_is_of_class": self._is_of_class}
        return BatchedFunction, (self._run, self._options), kind

    def __repr__(self) -> str:
        return f"BatchedFunction({self.batcher!r})"

    async def __call__(self, item: Any, *more: Any, deadline_ms: float | None = None, priority: float = 0) -> Any:
        """Return the answer to one item; options as in ``Batcher.submit``."""
        function, item = self._resolve(item, more)
        return await function.batcher.submit(item, deadline_ms=deadline_ms, priority=priority)

    def sync(self, item: Any, *more: Any, deadline_ms: float | None = None, priority: float = 0) -> Any:
        """Return the answer to one item, from a thread without an event loop."""
        function, item = self._resolve(item, more)
        return function.batcher.submit_sync(item, deadline_ms=deadline_ms, priority=priority)

    def map(self, items: Iterable[Any] | AsyncIterable[Any], **options: Any) -> Mapped[Any]:
        """Return the answers to many items, in order; options as in ``Batcher.map``."""
        function = self._resolve(items, ())[0]
        mapped = function.batcher.map(items, **options)
        mapped._kept = function  # and its object, as a call keeps it
        return mapped

    def configure(self, **changes: Any) -> None:
        """Change settings while it runs, as in ``Batcher.configure``."""
        self.batcher.configure(**changes)

    def stats(self) -> Stats:
        """Return the figures so far."""
        return self.batcher.stats()

    async def drain(self) -> None:
        """Take no more requests and wait until those that were taken have ended."""
        await self.batcher.drain()

    async def close(self, *, drain: bool = True, timeout_seconds: float | None = None) -> None:
        """Take no more requests and end the workers, as in ``Batcher.close``."""
        await self.batcher.close(drain=drain, timeout_seconds=timeout_seconds)

    def _resolve(self, item: Any, more: tuple[Any, ...]) -> tuple[BatchedFunction, Any]:
        """Return what to call and with which item: ``Model.embed(model, item)`` is ``model.embed(item)``."""
        if self._owner is None and self._needs_owner:
            if len(more) == 1:
                return self.__get__(item), more[0]
            raise ArgumentError(
                f"{self._title} needs more than a list of items. If it is a method, call it on its object; if it "
                "is a class method, write @batched above @classmethod"
            )
        if more:
            raise ArgumentError(f"{self._title} takes one item, got {1 + len(more)}; call it once per item")
        return self, item


@overload
def batched(run: Run) -> BatchedFunction: ...
@overload
def batched(**options: Any) -> Callable[[Run], BatchedFunction]: ...
def batched(run: Run | None = None, **options: Any) -> BatchedFunction | Callable[[Run], BatchedFunction]:
    """Turn a function of a list into a function of one item that is answered in batches.

    Args:
        run: takes a list of items, returns one result per item; a plain function, a coroutine function or a method.
        options: options of ``Batcher``.

    >>> import asyncio
    >>> @batched(max_items=8, length_of=len)
    ... def shout(texts):
    ...     return [text.upper() for text in texts]
    >>> asyncio.run(shout("hello"))
    'HELLO'
    >>> shout.sync("again")
    'AGAIN'
    """
    if run is None:
        return functools.partial(BatchedFunction, options=options)
    return BatchedFunction(run, options)


@final
class _Kept:
    """One batcher per object, dropped with the object; by identity, since equal objects may come to differ."""

    def __init__(self) -> None:
        # A collection of garbage inside the lock may run code that looks up another object's batcher.
        self._lock = threading.RLock()
        self._entries: dict[int, tuple[weakref.ref[Any], Batcher[Any, Any]]] = {}

    def batcher_of(self, owner: Any, make: Callable[[], Batcher[Any, Any]], name: str) -> Batcher[Any, Any]:
        """Return the batcher of an object; the first look-up makes it."""
        with self._lock:
            entry = self._entries.get(id(owner))
            if entry is None or entry[0]() is not owner:
                try:
                    reference = weakref.ref(owner, functools.partial(_drop, self._entries, id(owner)))
                except TypeError:
                    raise ArgumentError(_not_referable(type(owner).__name__, name)) from None
                entry = self._entries[id(owner)] = (reference, make())
            return entry[1]


def _drop(entries: dict[int, Any], key: int, reference: weakref.ref[Any]) -> None:
    """Forget the batcher of an object that is gone; its number may belong to another object by now."""
    if key in entries and entries[key][0] is reference:
        del entries[key]


def _not_referable(kind: str, name: str) -> str:
    if kind in vars(builtins):  # hardly the object of a method
        return (
            f"{name} takes more than a list of items, so it was called as a method of a {kind}; a function takes one "
            f"list: put what belongs together into one item, {name}((first, second))"
        )
    return (
        f"{name} cannot be batched on a {kind}, which allows no weak references: its batcher could not go with it. Add "
        "'__weakref__' to __slots__ (weakref_slot=True in a dataclass), or batch a function of its own"
    )


def _takes_a_list(run: Run) -> bool:
    """Say whether a function can be called with nothing but a list; a method without its object cannot."""
    try:
        inspect.signature(run).bind([])
    except TypeError:
        return False
    except ValueError:  # some functions written in C do not say what they take
        return True
    return True


def _find(module: str, qualname: str) -> Any:
    """Return what stands under a name of a module, None if nothing does."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _bind(run: Run, instance: Any) -> Run:
    """Bind a method without keeping its object alive: the workers would hold it forever."""
    reference = weakref.ref(instance)

    @functools.wraps(run)
    def bound(items: list[Any]) -> Any:
        alive = reference()
        if alive is None:
            raise Closed("the object whose method is batched is gone")
        return run(alive, items)

    return bound
