"""Ray Serve: a deployment that takes single items and runs them in batches, and the replicas it consists of."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from ..._checks import as_whole
from ..._optional import require
from ...errors import ArgumentError, BatchwrightError
from ...serve import Batcher, Closed, DeadlineExceeded, QueueFull, Settings, TooLarge

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

# The first match counts: TooLarge is an ArgumentError too.
_STATUSES: dict[type[BatchwrightError], int] = {
    TooLarge: 413,
    ArgumentError: 400,
    QueueFull: 429,
    Closed: 503,
    DeadlineExceeded: 504,
}
_HEADERS = {"deadline_ms": "X-Deadline-Ms", "priority": "X-Priority"}


def batched_deployment(
    run: Callable[..., Any], *, deployment_options: Mapping[str, Any] | None = None, **batcher_options: Any
) -> Any:
    """Return a Ray Serve deployment that takes single items and runs them in batches, through a ``Batcher``.

    It replaces a deployment with ``@serve.batch``. ``handle.remote(item, deadline_ms=…, priority=…)`` returns the
    answer to one item. Errors reach the caller as they are: catch ``DeadlineExceeded``, ``QueueFull``, or what ``run``
    raised for that item. ``handle.stats.remote()`` returns the figures of one replica, whichever Ray chooses, and
    ``handle.broadcast("stats")`` those of all replicas.

    Over HTTP the body is the item as JSON, the headers ``X-Deadline-Ms`` and ``X-Priority`` are the options, and the
    answer is JSON. Refusals have these statuses: 400 a bad request, 413 ``TooLarge``, 429 ``QueueFull``, 503
    ``Closed``, 504 ``DeadlineExceeded``. What ``run`` raised for the item is a 500.

    A deadline counts from the arrival at the replica, so the queue belongs there: ``max_ongoing_requests`` is
    ``max_queue + num_workers × max_items`` unless given, in place of Ray's 5, which would also limit the batch.

    ``user_config`` holds settings of ``Batcher.configure``; those it does not name are as in ``batcher_options``. Other
    keys go to the ``reconfigure`` method of the class, if it has one. A config file (``serve deploy``) changes it
    while requests run, and so does ``handle.broadcast("reconfigure", {…})``; a second ``serve.run`` starts new
    replicas. A replica that is stopped answers the requests it has accepted, within Ray's
    ``graceful_shutdown_timeout_s``.

    Args:
        run: takes a list of items and returns one result per item, plain or async; or a class of such objects, made
            once per replica from the arguments of ``bind``.
        deployment_options: options of ``serve.deployment``: ``num_replicas``, ``ray_actor_options``, ``user_config``, …
        batcher_options: options of ``Batcher``: ``max_items``, ``deadline_ms``, ``length_of``, ``max_tokens``, …

    Returns:
        A ``ray.serve.Deployment``, for ``serve.run(deployment.bind())``.

    >>> def shout(texts):
    ...     return [text.upper() for text in texts]
    >>> deployment = batched_deployment(shout, max_items=8, length_of=len, deployment_options={"num_replicas": 2})
    >>> deployment.name, deployment.num_replicas, deployment.max_ongoing_requests
    ('shout', 2, 1008)
    """
    serve = import_serve()
    # Never started: it finds mistakes in the options here, and not in a replica.
    batcher: Batcher[Any, Any] = Batcher(run, **batcher_options)
    num_workers = as_whole("num_workers", batcher_options.get("num_workers", 1), least=1)
    room = batcher.settings.max_queue + num_workers * batcher.settings.max_items
    options = {"max_ongoing_requests": room, **(deployment_options or {})}
    if options.get("user_config") is not None:
        settings, _ = split_user_config(options["user_config"], run)
        dataclasses.replace(batcher.settings, **settings)  # refuses what a replica would refuse
    replica = make_replica(run, batcher_options)
    return serve.deployment(**{"name": replica.__name__, **options})(replica)


def import_serve() -> ModuleType:
    """Return ``ray.serve``, or say which extra brings it; its own deprecation warnings are not shown."""
    with warnings.catch_warnings():
        # Ray declares its settings in a way that pydantic deprecates; users of Ray cannot change that.
        warnings.simplefilter("ignore", DeprecationWarning)
        return require("ray.serve", extra="ray")


class Replica:
    """A replica: takes one item, runs it in a batch, returns its answer.

    Attributes:
        make_run: returns the function of a list of items, from the arguments of ``bind``.
        options: the options of its ``Batcher``.
    """

    make_run: ClassVar[Callable[..., Callable[[list[Any]], Any]]]
    options: ClassVar[dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._run = self.make_run(*args, **kwargs)
        self._batcher: Batcher[Any, Any] = Batcher(self._run, **self.options)
        self._initial = self._batcher.settings

    async def __call__(self, item: Any, *, deadline_ms: float | None = None, priority: float = 0) -> Any:
        """Return the answer to one item; a request over HTTP holds the item as JSON."""
        from starlette.requests import Request  # comes with Ray Serve

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
        """Raise an error if this replica can no longer answer, so that Ray starts another."""
        if not self._batcher.is_open:
            raise Closed("the batcher of this replica has ended")
        await _call_if_there(self._run, "check_health")

    def __del__(self) -> None:
        # Ray calls this after the last answer, or when the time for answers is over: there is nothing left to wait for.
        batcher: Batcher[Any, Any] | None = getattr(self, "_batcher", None)
        if batcher is not None:
            batcher.close_sync(drain=False, timeout_seconds=0)


def make_replica(run: Callable[..., Any], batcher_options: dict[str, Any]) -> type[Replica]:
    """Return the class of a deployment's replicas; Ray pickles it by value, with the function in it."""

    def hand_over() -> Callable[..., Any]:
        return run

    members = {
        "__doc__": inspect.getdoc(run),
        "make_run": staticmethod(run if isinstance(run, type) else hand_over),
        "options": batcher_options,
    }
    return type(getattr(run, "__name__", type(run).__name__), (Replica,), members)


def split_user_config(user_config: Any, run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the part of a ``user_config`` that belongs to the batcher, and the part for the user's own class.

    >>> split_user_config({"max_items": 8}, print)
    ({'max_items': 8}, {})
    >>> split_user_config({"max_item": 8}, print)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: user_config has max_item; allowed are deadline_ms, max_items, max_queue, \
max_tokens, max_wait_ms, on_error, on_oom, policy, and any other key if the class has a reconfigure method
    """
    if not isinstance(user_config, Mapping):
        raise ArgumentError(f"user_config must be a dict of settings, got {type(user_config).__name__}")
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = {name: value for name, value in user_config.items() if name in names}
    rest = {name: value for name, value in user_config.items() if name not in names}
    if rest and not hasattr(run, "reconfigure"):
        raise ArgumentError(
            f"user_config has {', '.join(map(str, rest))}; allowed are {', '.join(sorted(names))}, "
            "and any other key if the class has a reconfigure method"
        )
    return settings, rest


async def _call_if_there(target: Any, name: str, *args: Any) -> None:
    method = getattr(target, name, None)
    if method is not None:
        result = method(*args)
        if inspect.isawaitable(result):
            await result


async def _respond(request: Request, submit: Callable[..., Awaitable[Any]]) -> Response:
    """Return the answer to an item over HTTP, or why it was refused; other errors are raised and become Ray's 500."""
    from starlette.responses import JSONResponse, Response

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
