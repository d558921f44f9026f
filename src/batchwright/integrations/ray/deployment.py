"""Ray Serve: a deployment that takes single items and runs them in batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..._checks import as_whole
from ..._optional import require
from ...serve import Batcher


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
    keys go to the ``reconfigure`` method of the class, where it has one. A config file (``serve deploy``) changes it
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
    from ._replica import check_user_config, make_replica  # starlette comes with Ray Serve

    # Never started: it finds mistakes in the options here, and not in a replica.
    batcher: Batcher[Any, Any] = Batcher(run, **batcher_options)
    num_workers = as_whole("num_workers", batcher_options.get("num_workers", 1), least=1)
    room = batcher.settings.max_queue + num_workers * batcher.settings.max_items
    options = {"max_ongoing_requests": room, **(deployment_options or {})}
    if options.get("user_config") is not None:
        check_user_config(options["user_config"], run, batcher)
    replica = make_replica(run, batcher_options)
    return serve.deployment(**{"name": replica.__name__, **options})(replica)


def import_serve() -> ModuleType:
    """Return ``ray.serve``, or say which extra brings it; its own deprecation warnings are not shown."""
    with warnings.catch_warnings():
        # Ray declares its settings in a way that pydantic deprecates; users of Ray cannot change that.
        warnings.simplefilter("ignore", DeprecationWarning)
        return require("ray.serve", extra="ray")
