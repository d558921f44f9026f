"""A replica of Ray Serve: the user's function behind a ``Batcher``, reached by handle or as JSON over HTTP."""

from __future__ import annotations

import dataclasses
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import ArgumentError, BatchwrightError
from ...serve import Batcher, Closed, DeadlineExceeded, QueueFull, Settings, TooLarge

# The first match counts: TooLarge is an ArgumentError too.
_STATUSES: dict[type[BatchwrightError], int] = {
    TooLarge: 413,
    ArgumentError: 400,
    QueueFull: 429,
    Closed: 503,
    DeadlineExceeded: 504,
}
_HEADERS = {"deadline_ms": "X-Deadline-Ms", "priority": "X-Priority"}


class AbstractReplica(ABC):
    """A replica: takes one item, runs it in a batch, returns its answer.

    Attributes:
        options: the options of its ``Batcher``.
    """

    options: ClassVar[dict[str, Any]]

    @staticmethod
    @abstractmethod
    def make_run(*args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """Return the function of a list of items, from the arguments of ``bind``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._run = self.make_run(*args, **kwargs)
        self._batcher: Batcher[Any, Any] = Batcher(self._run, **self.options)
        self._initial = self._batcher.settings

    async def __call__(self, item: Any, *, deadline_ms: float | None = None, priority: float = 0) -> Any:
        if isinstance(item, Request):
            return await _respond(item, self._batcher.submit)
        return await self._batcher.submit(item, deadline_ms=deadline_ms, priority=priority)

    async def stats(self) -> dict[str, Any]:
        """Return the figures of this replica's batcher."""
        return self._batcher.stats().to_dict()

    async def reconfigure(self, user_config: Any) -> None:
        """Take a new ``user_config``; settings that it does not name go back to those of the options."""
        settings, rest = split_user_config(user_config, self._run)
        # As a whole: Ray declares what holds from now on, not what changes.
        self._batcher.configure(**{**dataclasses.asdict(self._initial), **settings})
        await _call_if_there(self._run, "reconfigure", rest)

    async def check_health(self) -> None:
        """Raise once this replica cannot answer any more, so that Ray starts another."""
        if not self._batcher.is_open:
            raise Closed("the batcher of this replica has ended")
        await _call_if_there(self._run, "check_health")

    def __del__(self) -> None:
        # Ray calls this after the last answer, or when its time for that is over: nothing is left worth waiting for.
        batcher: Batcher[Any, Any] | None = getattr(self, "_batcher", None)
        if batcher is not None:
            batcher.close_sync(drain=False, timeout_seconds=0)


def make_replica(run: Callable[..., Any], batcher_options: dict[str, Any]) -> type[AbstractReplica]:
    """Return the class of a deployment's replicas; Ray pickles it by value, with the function in it."""

    def hand_over() -> Callable[..., Any]:
        return run

    members = {
        "__doc__": inspect.getdoc(run),
        "make_run": staticmethod(run if isinstance(run, type) else hand_over),
        "options": batcher_options,
    }
    return type(getattr(run, "__name__", type(run).__name__), (AbstractReplica,), members)


def split_user_config(user_config: Any, run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the part of a ``user_config`` that belongs to the batcher, and the part for the user's own class.

    >>> split_user_config({"max_items": 8}, print)
    ({'max_items': 8}, {})
    >>> split_user_config({"max_item": 8}, print)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: user_config has max_item; allowed are deadline_ms, max_items, max_queue, \
max_tokens, max_wait_ms, on_error, on_oom, policy, and any other key where the class has a reconfigure method
    """
    if not isinstance(user_config, Mapping):
        raise ArgumentError(f"user_config must be a dict of settings, got {type(user_config).__name__}")
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = {name: value for name, value in user_config.items() if name in names}
    rest = {name: value for name, value in user_config.items() if name not in names}
    if rest and not hasattr(run, "reconfigure"):
        raise ArgumentError(
            f"user_config has {', '.join(map(str, rest))}; allowed are {', '.join(sorted(names))}, "
            "and any other key where the class has a reconfigure method"
        )
    return settings, rest


def check_user_config(user_config: Any, run: Any, batcher: Batcher[Any, Any]) -> None:
    """Refuse a ``user_config`` that a replica would refuse."""
    settings, _ = split_user_config(user_config, run)
    dataclasses.replace(batcher.settings, **settings)


async def _call_if_there(target: Any, name: str, *args: Any) -> None:
    method = getattr(target, name, None)
    if method is not None:
        result = method(*args)
        if inspect.isawaitable(result):
            await result


async def _respond(request: Request, submit: Callable[..., Awaitable[Any]]) -> Response:
    """Return the answer to an item over HTTP, or why it was refused; other errors are raised and become Ray's 500."""
    try:
        answer = await submit(await _item_of(request), **_options_of(request.headers))
        return Response(json.dumps(answer, default=_as_list, allow_nan=False), media_type="application/json")
    except tuple(_STATUSES) as error:
        status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
        return JSONResponse({"error": type(error).__name__, "message": str(error)}, status)


async def _item_of(request: Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise ArgumentError(f"the body must be one item as JSON: {error}") from None


def _options_of(headers: Mapping[str, str]) -> dict[str, float]:
    return {option: _as_float(header, headers[header]) for option, header in _HEADERS.items() if header in headers}


def _as_float(header: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"{header} must be a number, got {text!r}") from None


def _as_list(value: Any) -> Any:
    """Return an array, a tensor or a NumPy number as plain values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the batched function returned {type(value).__name__}, which JSON cannot hold")
