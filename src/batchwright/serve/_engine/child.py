"""The process of a worker: it reads batches from a pipe, calls the function and writes what it gave.

Values travel as pickles, one per item, over a pipe between a program and the processes that it started itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any, final

from ..._oom import text_of
from ...errors import ArgumentError, ResultError, WorkerDied
from .calls import Garbage, Outcome
from .runners import Runner, ThreadRunner

# How often the process looks whether its parent still lives, where nobody tells it.
PARENT_SECONDS = 1.0
# The option of Linux's prctl by which a process has a signal sent to itself when its parent is gone.
_PR_SET_PDEATHSIG = 1

_garbage = Garbage()


@final
@dataclass(frozen=True)
class Message:
    """What a process answers to a batch: a pickle per value, or one of an error.

    Args:
        values: one pickle per item, of a ``Reply``.
        error: the pickle of an error of the whole call; None: there are values.
        is_oom: the error means that memory ran out; only the process could see that.
        trace: the traceback of the error, as text.
    """

    values: list[bytes] = field(default_factory=list)
    error: bytes | None = None
    is_oom: bool = False
    trace: str = ""


@final
class RemoteTrace(Exception):
    """The traceback in the worker's process, as the cause of an error that came from there."""

    def __str__(self) -> str:
        return f"in the process of the worker:\n{self.args[0]}"


def main(connection: Connection, packed_run: bytes) -> None:
    """Serve batches until the parent closes the pipe or is gone.

    Args:
        connection: one end of a pipe; the parent has the other.
        packed_run: the function, from ``pack_function``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what follows
    _be_killed_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own = os.getpid()
    try:
        runner = ThreadRunner(pickle.loads(packed_run))
    except BaseException as error:
        connection.send_bytes(pickle.dumps(_failed(error)))
        return
    connection.send_bytes(pickle.dumps(Message()))
    while (packed := _receive(connection)) is not None:
        message = _answer(runner, pickle.loads(packed))
        if os.getpid() != own:  # a fork inside the function came back: its answer would be taken for that of a batch
            os._exit(1)
        connection.send_bytes(pickle.dumps(message))
    runner.close()


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return None


def _be_killed_with_parent() -> None:
    """Ask the system to kill this process with its parent: a function that holds the GIL lets no thread of ours run.

    Linux takes the thread that started the process for the parent. That is a worker, which ends after its process.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # without it, the thread below looks
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent() -> None:
    """End the process when its parent is gone, even in the middle of a call.

    The sentinel of the parent stays open if a fork of the parent has it too, hence the look at the parent's id.
    """
    parent = parent_process()
    assert parent is not None
    while parent.is_alive() and os.getppid() == parent.pid:
        parent.join(PARENT_SECONDS)
    os._exit(1)


def _answer(runner: Runner, packed_items: list[bytes]) -> Message:
    """Call the function with the items that can be read; the others have their own error."""
    replies = [_load_item(packed) for packed in packed_items]
    items = [item for is_item, item in replies if is_item]
    outcome = runner(items) if items else Outcome()
    if outcome.error is not None:
        message = _failed(outcome.error, is_oom=outcome.is_oom)
        del outcome
        if message.is_oom:
            _garbage.collect(full=True)
        return message
    values = iter(outcome.values)
    return Message(values=[pack_value(next(values)) if is_item else pack_value(item) for is_item, item in replies])


def _load_item(packed: bytes) -> tuple[bool, Any]:
    try:
        return True, pickle.loads(packed)
    except BaseException as error:  # whatever a class of the user raises is about this item only
        problem = ArgumentError(
            f"the item cannot be unpickled in the process of the worker ({type(error).__name__}: {text_of(error)}); "
            "send values whose classes can be imported, or use worker='thread'"
        )
        return False, problem


def _failed(error: BaseException, *, is_oom: bool = False) -> Message:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Message(error=pack_error(error), is_oom=is_oom, trace=trace)


def pack_value(value: Any) -> bytes:
    """Return the pickle of a result, or of an error that says why there is none."""
    if issubclass(type(value), BaseException):  # a result may say anything when it is asked for its class
        return pack_error(value)
    try:
        return dumps(value)
    except BaseException as error:
        return dumps(
            ResultError(
                f"the result, a {type(value).__name__}, cannot be pickled ({type(error).__name__}: {text_of(error)}); "
                "return plain values or arrays, or use worker='thread'"
            )
        )


def pack_error(error: BaseException) -> bytes:
    """Return the pickle of an error, or of a RuntimeError with its text if it would not arrive."""
    try:
        packed = dumps(error)
        if type(pickle.loads(packed)) is type(error):
            return packed
    except BaseException:  # many classes of errors pickle, but cannot be made again from their text alone
        pass
    return dumps(RuntimeError(f"{type(error).__name__}: {text_of(error)}"))


def unpack_value(packed: bytes) -> Any:
    """Return a result; one that cannot be read here is an error of its item."""
    try:
        return pickle.loads(packed)
    except BaseException as error:  # SystemExit too: it would end the worker, and with it the batcher
        return ResultError(
            f"the result cannot be unpickled ({type(error).__name__}: {text_of(error)}); return values whose classes "
            "this process can import, or use worker='thread'"
        )


def unpack_message(message: Message) -> Outcome:
    """Return what the function gave, as if it had run here."""
    if message.error is None:
        return Outcome(values=[unpack_value(packed) for packed in message.values])
    error = unpack_value(message.error)
    if not isinstance(error, BaseException):
        error = WorkerDied(f"the process of the worker answered with {type(error).__name__} in place of an error")
    with contextlib.suppress(Exception):  # the user's class may allow no attributes
        error.__cause__ = RemoteTrace(message.trace)
    return Outcome(error=error, is_oom=message.is_oom)


@final
class _Pickler(pickle.Pickler):
    """A pickler that copies tensors which are part of a larger one: torch would send all of that with each row."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return NotImplemented
        if value.untyped_storage().nbytes() <= value.numel() * value.element_size():
            return NotImplemented
        return value.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def dumps(value: Any) -> bytes:
    """Return the pickle of a value.

    Plain pickle copies; the one of ``multiprocessing`` would send handles of tensors that die with the process.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def pack_function(run: Callable[[list[Any]], Any]) -> bytes:
    """Return the pickle of a function, or say why another process could not have it.

    A function that a decorator has replaced under its own name is found through the ``__wrapped__`` of that.

    >>> pack_function(lambda items: items)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: worker='process' cannot send <lambda> to another process (...); define it with...
    """
    try:
        return dumps(_named(run) or run)
    except Exception as error:
        name = getattr(run, "__qualname__", type(run).__qualname__)
        raise ArgumentError(
            f"worker='process' cannot send {name} to another process ({type(error).__name__}: {text_of(error)}); "
            f"{_instead(run)}; or use worker='thread'"
        ) from error


def _instead(run: Callable[[list[Any]], Any]) -> str:
    """Say what to send in place of a function that cannot be sent."""
    if isinstance(run, FunctionType) and "." in run.__qualname__.rpartition("<locals>.")[2]:
        return "a batched method cannot be sent without its object: pass the method of an object that can be pickled"
    return (
        "define it with def at the top of a module, or pass an object that can be pickled; a model that cannot is best "
        "loaded in the process at the first call"
    )


def may_be_named_later(run: Callable[[list[Any]], Any]) -> bool:
    """Say whether a function cannot be found yet, but will be: its module is just being executed."""
    return isinstance(run, FunctionType) and "<" not in run.__qualname__


@final
@dataclass(frozen=True)
class _Named:
    """Where to find a function: a name in a module, and how many decorators lie above it."""

    module: str
    name: str
    depth: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (self.module, self.name, self.depth)


def _named(run: Callable[[list[Any]], Any]) -> _Named | None:
    """Return where a decorated function is found; None for all others, which pickle knows."""
    if not isinstance(run, FunctionType):
        return None
    try:
        found = _look_up(run.__module__, run.__qualname__)
    except (ImportError, AttributeError, KeyError):
        return None
    for depth in range(1, 100):
        found = getattr(found, "__wrapped__", None)
        if found is run:
            return _Named(run.__module__, run.__qualname__, depth)
    return None


def _look_up(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _find(module: str, name: str, depth: int) -> Any:
    found = _look_up(module, name)
    for _ in range(depth):
        found = found.__wrapped__
    return found
