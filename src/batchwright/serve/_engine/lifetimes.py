"""Lifetimes: what ends before the interpreter does, and what begins anew in the child of a fork."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util  # noqa: F401 - its handler waits for all processes, so it must run after ours: the last is first
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

# How long the end of the interpreter waits for batches that still run.
EXIT_SECONDS = 5.0


class Forgets(Protocol):
    """What has threads and locks, which a fork copies as they are."""

    def forget(self) -> None:
        """Begin anew in the child of a fork."""


class Joins(Protocol):
    """What has threads that may be in the middle of a batch."""

    def join(self, end_seconds: float) -> None:
        """End everything, and wait for the threads until ``time.monotonic()`` reaches ``end_seconds``."""


_forgetting: weakref.WeakSet[Forgets] = weakref.WeakSet()
_joining: weakref.WeakSet[Joins] = weakref.WeakSet()


@contextlib.contextmanager
def entered_at_once(lock: threading.Condition) -> Iterator[bool]:
    """Enter a lock if that needs no waiting, and say whether it was entered; never where this thread is in it already.

    For what a collection of garbage may call. That runs in the middle of anything: while its thread holds other locks,
    or is in the middle of a move under this one, which it could enter once more.
    """
    has_entered = not lock._is_owned() and lock.acquire(blocking=False)  # type: ignore[attr-defined]
    try:
        yield has_entered
    finally:
        if has_entered:
            lock.release()


def forget_in_forks(one: Forgets) -> None:
    """Have it begin anew in the child of every fork."""
    _forgetting.add(one)


def end_at_exit(one: Joins) -> None:
    """Have it end before the interpreter does, so that no thread is in the middle of a batch then."""
    _joining.add(one)


@atexit.register
def _end_all() -> None:
    """Leave no thread in the middle of a batch, and no process, when the interpreter ends."""
    end = time.monotonic() + EXIT_SECONDS
    for one in list(_joining):
        one.join(end)


def _forget_all() -> None:
    for one in list(_forgetting):
        one.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
