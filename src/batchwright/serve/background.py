"""Background: batches of offline work that run while no request needs the function."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from .._checks import as_whole
from ..errors import ArgumentError
from ._engine.units import Unit, Units
from ._engine.waiters import has_running_loop
from ._engine.ways import look_around

Item = TypeVar("Item")
Result = TypeVar("Result")


@final
@dataclass(frozen=True)
class BackgroundBatch(Generic[Item, Result]):
    """A batch of background work that has ended.

    Args:
        index: its place among the batches, from 0.
        items: what it was made of.
        results: one per item, in order; empty if there is an error.
        error: what the function raised, or why the batch could not run; None: it worked.
    """

    index: int
    items: list[Item]
    results: list[Result]
    error: BaseException | None = None


@final
class Background(Generic[Item, Result]):
    """Batches that a ``Batcher`` runs while no request needs its function.

    Loop over it with ``for`` in a thread, or with ``async for``: it gives one ``BackgroundBatch`` per batch, in order.
    An error of a batch is part of what it gives, and ends neither the loop nor the service. Batches are read ahead in a
    thread of their own, at most ``max_ahead`` before they are handed out, so somebody must loop. If the batcher is
    closed before all batches have run, the loop ends with ``Closed``.

    A batch is run in parts that are short enough for the requests: a request that arrives just after a part has begun
    must still be in time. The function must therefore give an item the same result whatever the other items are. If it
    calls ``give_way`` between its steps, requests run in the middle of a part, which may then be longer.

    Args:
        batches: lists of items; may be a generator, or the batches of a plan.
        max_ahead: how many batches are read before they are handed out.

    >>> from batchwright.serve import Batcher
    >>> work = Background([["a", "b"], ["c"]])
    >>> with Batcher(lambda texts: [text.upper() for text in texts], background=work) as batcher:
    ...     for batch in work:
    ...         print(batch.index, batch.results)
    0 ['A', 'B']
    1 ['C']
    """

    _blocks_its_loop = False

    def __init__(self, batches: Iterable[Sequence[Item]], *, max_ahead: int = 16) -> None:
        if not isinstance(batches, Iterable) or isinstance(batches, str | bytes):
            raise ArgumentError(f"batches must be an iterable of lists of items, got {type(batches).__name__}")
        self._units = Units(batches, max_ahead=as_whole("max_ahead", max_ahead, least=1))

    @property
    def num_batches(self) -> int:
        """Return how many batches have ended."""
        return self._units.num_batches

    @property
    def num_failed(self) -> int:
        """Return how many of them ended with an error."""
        return self._units.num_failed

    @property
    def num_items(self) -> int:
        """Return how many items have results."""
        return self._units.num_items

    def __iter__(self) -> Iterator[BackgroundBatch[Item, Result]]:
        while (ended := self._units.next_ended()) is not None:
            if isinstance(ended, Unit):
                yield _as_batch(ended)
            elif self._blocks_its_loop and has_running_loop():
                raise ArgumentError("a for loop would block the event loop that runs the function; write async for")
            else:
                concurrent.futures.wait([ended])

    async def __aiter__(self) -> AsyncIterator[BackgroundBatch[Item, Result]]:
        while (ended := self._units.next_ended()) is not None:
            if isinstance(ended, Unit):
                yield _as_batch(ended)
            else:
                await asyncio.wrap_future(ended)


def give_way() -> None:
    """Let requests that wait run now, if this thread is in the middle of offline work; else do nothing.

    A batched function calls it between its steps: before every layer of a model, or every item of a loop. The requests
    run inside of this call, by the same function, so hold no lock here, and leave nothing half changed that they read.
    Context variables, autocast and the modes of gradients are then those with which the function was called. It costs
    about a microsecond where nobody waits. Coroutines, and functions in processes (``worker="process"``), are not
    interrupted.

    >>> from batchwright.serve import Batcher, give_way
    >>> def double(numbers):
    ...     results = []
    ...     for number in numbers:
    ...         give_way()
    ...         results.append(2 * number)
    ...     return results
    >>> with Batcher(double, background=[[1, 2, 3]]) as batcher:
    ...     [batch.results for batch in batcher.background]
    [[2, 4, 6]]
    """
    look_around()


# For torch.compile, which would take what it finds here for constant: the call ends a graph, and is made.
give_way._torchdynamo_disable = True  # type: ignore[attr-defined]


def _as_batch(unit: Unit) -> BackgroundBatch[Any, Any]:
    return BackgroundBatch(unit.index, unit.items, [] if unit.error is not None else unit.results, unit.error)


def as_background(background: Any) -> Background[Any, Any] | None:
    """Return background work as such; an iterable is one of batches."""
    if background is None or isinstance(background, Background):
        return background
    return Background(background)
