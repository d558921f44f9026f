"""Items that are good or bad in a known way, and the functions that serving_stress.py serves them with.

An item is ``(number, kind, length)``. The answer to a good one is a function of its number, so an answer that went to
the wrong caller is seen. A process of a worker imports this module.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from batchwright.errors import (
    ArgumentError,
    DoesNotFitError,
    ResultError,
    RunInterrupted,
    RunTimeout,
    WorkerDied,
)

Item = tuple[int, str, int]

# A batch of more padded tokens than this runs out of memory.
MAX_TOKENS = 2048
MAX_LENGTH = 128
# Lengths that are refused where they are measured.
BAD_LENGTHS: dict[str, Any] = {"length 10**400": 10**400, "length 2**64": 2**64, "length NaN": math.nan}


class OutOfMemoryError(RuntimeError):
    """Named like that of torch, as ``is_out_of_memory`` knows it."""


class Mute(Exception):
    """An error that cannot be written."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Liar(list[Any]):
    """A list that says it is longer than it is."""

    def __len__(self) -> int:
        return super().__len__() + 1


def answer(number: int) -> int:
    """Return what belongs to an item; no two have the same."""
    return (number * 2_654_435_761 + 12_345) % 2**32


def value_of(result: Any) -> Any:
    """Return the answer in a result; mappings and tables give each caller a dict."""
    return result["value"] if isinstance(result, dict) else result


def length_of(item: Item) -> Any:
    return BAD_LENGTHS.get(item[1], item[2])


def raising(make: Callable[[int], BaseException]) -> Callable[[int, list[Any]], Any]:
    def act(number: int, values: list[Any]) -> Any:
        raise make(number)

    return act


def _kill(number: int, values: list[Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(number: int, values: list[Any]) -> None:
    time.sleep(3600)


# What a function does with a batch that holds such an item.
ACTS: dict[str, Callable[[int, list[Any]], Any]] = {
    "ValueError": raising(lambda number: ValueError(number)),
    "no text": raising(Mute),
    "SystemExit": raising(SystemExit),
    "KeyboardInterrupt": raising(KeyboardInterrupt),
    "CancelledError": raising(asyncio.CancelledError),
    "StopIteration": raising(StopIteration),
    "never fits": raising(lambda number: MemoryError(number)),
    "one result less": lambda number, values: values[:-1],
    "one result more": lambda number, values: [*values, 0],
    "a text": lambda number, values: "x" * len(values),
    "an empty mapping": lambda number, values: {},
    "an uneven mapping": lambda number, values: {"value": values, "other": values[:-1]},
    "a wrong len": lambda number, values: Liar(values[:-1]),
    "kill -9": _kill,
    "os._exit": lambda number, values: os._exit(3),
    "hang": _hang,
}
# The error that the caller of such an item must get. Those in OWN carry the number of the item.
ERRORS: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "no text": Mute,
    "returned": LookupError,
    "SystemExit": RunInterrupted,
    "KeyboardInterrupt": RunInterrupted,
    "CancelledError": RunInterrupted,
    "StopIteration": RuntimeError,
    "never fits": DoesNotFitError,
    "one result less": ResultError,
    "one result more": ResultError,
    "a text": ResultError,
    "an empty mapping": ResultError,
    "an uneven mapping": ResultError,
    "a wrong len": ResultError,
    "kill -9": WorkerDied,
    "os._exit": WorkerDied,
    "hang": RunTimeout,
    **dict.fromkeys(BAD_LENGTHS, ArgumentError),
}
OWN = frozenset({"ValueError", "no text", "returned"})
ORDINARY = tuple(kind for kind in ERRORS if kind not in ("kill -9", "os._exit", "hang"))


def _table(values: list[Any]) -> Any:
    import pandas

    return pandas.DataFrame({"value": values})


def _array(values: list[Any]) -> Any:
    import numpy as np

    return np.array(values, dtype=object)


# The right results, in every shape that is allowed.
FORMS: tuple[Callable[[list[Any]], Any], ...] = (list, tuple, iter, _array, lambda values: {"value": values})


def forms() -> tuple[Callable[[list[Any]], Any], ...]:
    """Return the shapes that can be made here: tables only with pandas."""
    try:
        import pandas  # noqa: F401
    except ImportError:
        return FORMS
    return (*FORMS, _table)


def respond(items: Sequence[Item], shapes: Sequence[Callable[[list[Any]], Any]] = FORMS) -> Any:
    """Answer a batch, or do what the first bad item in it says."""
    values: list[Any] = [LookupError(item[0]) if item[1] == "returned" else answer(item[0]) for item in items]
    for number, kind, _ in items:
        if kind in ACTS:
            return ACTS[kind](number, values)
        if kind == "pid":
            return [os.getpid()] * len(items) if len(items) == 1 else _raise_alone(number)
    if len(items) * max(item[2] for item in items) > MAX_TOKENS:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if any(kind == "returned" for _, kind, _ in items):
        return values  # in a list: a row of a table that holds an exception is a row
    return shapes[(items[0][0] + len(items)) % len(shapes)](values)


def _raise_alone(number: int) -> Any:
    """Make a batch run in parts until the item that asks for the process is alone."""
    raise ValueError(number)


class Recorder:
    """Responds in a thread, and counts how often each good item was answered: more than once is a duplicate."""

    def __init__(self, num_items: int) -> None:
        self.num_runs = bytearray(num_items)
        self._shapes = forms()

    def __call__(self, items: list[Item]) -> Any:
        results = respond(items, self._shapes)
        if not any(kind in ACTS for _, kind, _ in items):
            self.note(items)
        return results

    def note(self, items: Sequence[Item]) -> None:
        for number, _, _ in items:
            if 0 <= number < len(self.num_runs):
                self.num_runs[number] += 1

    @property
    def num_duplicates(self) -> int:
        return sum(count > 1 for count in self.num_runs)


class AsyncRecorder(Recorder):
    """The same as a coroutine, which gives the loop back on the way."""

    async def __call__(self, items: list[Item]) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        if any(kind == "hang" for _, kind, _ in items):
            await asyncio.sleep(3600)
        return super().__call__(items)
