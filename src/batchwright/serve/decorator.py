"""batched: turn a function of a list into a function of one item."""

from __future__ import annotations

import functools
import weakref
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, final, overload

from ..errors import Closed
from .batcher import Batcher
from .mapping import Mapped
from .stats import Stats

Run = Callable[..., Any]


@final
class BatchedFunction:
    """A function of one item; its ``Batcher`` calls the function of a list.

    Await it, or call ``sync`` from a thread. A batched method has one batcher per object.

    Args:
        run: the function of a list.
        options: options of ``Batcher``.

    Attributes:
        batcher: collects the requests; its threads start with the first request.
    """

    def __init__(self, run: Run, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, run)
        self._run = run
        self._options = options
        self._name: str | None = None
        self.batcher: Batcher[Any, Any] = Batcher(run, **options)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> BatchedFunction:
        if instance is None or self._name is None:
            return self
        bound = BatchedFunction(_bind(self._run, instance), self._options)
        # The object keeps it under the same name, so that the next look-up finds it there.
        kept: BatchedFunction = instance.__dict__.setdefault(self._name, bound)
        return kept

    def __reduce__(self) -> tuple[Any, ...]:
        # Threads and locks cannot be pickled: another process makes its own batcher.
        return BatchedFunction, (self._run, self._options), {"_name": self._name}

    def __repr__(self) -> str:
        return f"BatchedFunction({self.batcher!r})"

    async def __call__(self, item: Any, *, deadline_ms: float | None = None, priority: float = 0) -> Any:
        """Return the answer to one item; options as in ``Batcher.submit``."""
        return await self.batcher.submit(item, deadline_ms=deadline_ms, priority=priority)

    def sync(self, item: Any, *, deadline_ms: float | None = None, priority: float = 0) -> Any:
        """Return the answer to one item, from a thread without an event loop."""
        return self.batcher.submit_sync(item, deadline_ms=deadline_ms, priority=priority)

    def map(self, items: Iterable[Any] | AsyncIterable[Any], **options: Any) -> Mapped[Any]:
        """Return the answers to many items, in order; options as in ``Batcher.map``."""
        return self.batcher.map(items, **options)

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
