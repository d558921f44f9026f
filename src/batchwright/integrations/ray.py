"""Ray: a Serve deployment that answers in batches, and Data batches within a budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .._optional import require
from ..errors import ArgumentError
from ..plan import Budget, Grouping, WindowSort
from ..serve import Batcher

require("ray", extra="ray")

# After the check, so that its message is read.
from ._ray_dataset import LengthOf, PlannedDataset, make_planned_dataset  # noqa: E402

__all__ = ["PlannedDataset", "batched_deployment", "plan_dataset"]


def batched_deployment(
    run: Callable[..., Any], *, deployment_options: Mapping[str, Any] | None = None, **batcher_options: Any
) -> Any:
    """Return a Ray Serve deployment that takes single items and runs them in batches, through a ``Batcher``.

    It stands for a deployment with ``@serve.batch``. ``handle.remote(item, deadline_ms=…, priority=…)`` gives the
    answer to one item. An error reaches the caller as itself: catch ``DeadlineExceeded``, ``QueueFull``, or what
    ``run`` raised for that item. ``handle.stats.remote()`` gives the figures of one replica, whichever Ray chooses,
    ``handle.broadcast("stats")`` those of all.

    Over HTTP the body is the item as JSON, the headers ``X-Deadline-Ms`` and ``X-Priority`` are the options, and the
    answer is JSON. Refusals: 400 a bad request, 413 ``TooLarge``, 429 ``QueueFull``, 503 ``Closed``, 504
    ``DeadlineExceeded``; what ``run`` raised for the item is a 500.

    A deadline counts from the arrival at the replica. So the queue belongs there: ``max_ongoing_requests`` is
    ``max_queue + num_workers × max_items`` unless given, in place of Ray's 5, which would also cap the batch.

    ``user_config`` holds settings of ``Batcher.configure``; what it does not name is as in ``batcher_options``. Other
    keys go to ``reconfigure`` of the class, where it has one. A config file (``serve deploy``) changes it while
    requests run, and so does ``handle.broadcast("reconfigure", {…})``; a second ``serve.run`` starts new replicas. A
    replica that is stopped answers what it has taken, within Ray's ``graceful_shutdown_timeout_s``.

    Args:
        run: takes a list of items, returns one result for each, plain or async; or a class whose objects do, made
            once in each replica from the arguments of ``bind``.
        deployment_options: of ``serve.deployment``: ``num_replicas``, ``ray_actor_options``, ``user_config``, …
        batcher_options: of ``Batcher``: ``max_items``, ``deadline_ms``, ``length_of``, ``max_tokens``, …

    Returns:
        A ``ray.serve.Deployment``, for ``serve.run(deployment.bind())``.

    >>> def shout(texts):
    ...     return [text.upper() for text in texts]
    >>> deployment = batched_deployment(shout, max_items=8, length_of=len, deployment_options={"num_replicas": 2})
    >>> deployment.name, deployment.num_replicas, deployment.max_ongoing_requests
    ('shout', 2, 1008)
    """
    serve = _import_serve()
    from ._ray_replica import check_user_config, make_replica

    # Never started: it says here, and not in a replica, what is wrong with the options.
    batcher: Batcher[Any, Any] = Batcher(run, **batcher_options)
    room = batcher.settings.max_queue + batcher_options.get("num_workers", 1) * batcher.settings.max_items
    options = {"max_ongoing_requests": room, **(deployment_options or {})}
    if options.get("user_config") is not None:
        check_user_config(options["user_config"], run, batcher)
    replica = make_replica(run, batcher_options)
    return serve.deployment(**{"name": replica.__name__, **options})(replica)


def plan_dataset(
    dataset: Any,
    budget: Budget,
    *,
    length_of: LengthOf,
    buffer_size: int = 20_000,
    grouping: Grouping = WindowSort(),  # noqa: B008 - frozen
    shuffle: bool = True,
    seed: int = 0,
    size_multiple_of: int = 1,
    size_ladder: Any = None,
    pad_multiple_of: int = 1,
    oversize: Any = "error",
) -> PlannedDataset:
    """Return the batches of a Ray Data dataset, each within the budget; every row is in one of them.

    Rows are read in windows of ``buffer_size``, and each window is planned as ``plan_batches`` plans an epoch. The
    data set is never held whole: a window is, and Ray fetches the next meanwhile. Larger windows pad less; each ends
    with at most one batch that is short of rows (a few with a size ladder or buckets on two axes).

    ``map_batches`` runs a function on planned batches in Ray's workers, ``iter_batches`` brings them here. The order
    of the rows changes; keep a column that names them.

    Args:
        dataset: a ``ray.data.Dataset``, or for ``iter_batches`` alone a shard from ``ray.train.get_dataset_shard``.
            Shards may give unequal numbers of batches.
        budget: what a batch may cost.
        length_of: the name of a column that holds lengths (integers), or lists to be counted; several names for
            several axes; or a function from a row, a dict, to its length or lengths.
        buffer_size: rows planned together.
        grouping: as for ``plan_batches``; ``Packed`` is refused, since rows of a column cannot be joined.
        shuffle: and the other options: as for ``plan_batches``; ``oversize="truncate"`` is refused.

    Returns:
        The planned data set; nothing is read yet.

    Example::

        planned = plan_dataset(ray.data.read_parquet(path), bw.MaxTokens(16_384), length_of="input_ids")
        planned.map_batches(Embed, num_gpus=1, concurrency=2).write_parquet(out)
    """
    if not hasattr(dataset, "iter_batches"):
        raise ArgumentError(f"dataset must be a ray.data.Dataset or a shard of one, got {type(dataset).__name__}")
    return make_planned_dataset(
        dataset,
        budget,
        length_of,
        buffer_size,
        grouping=grouping,
        shuffle=shuffle,
        seed=seed,
        size_multiple_of=size_multiple_of,
        size_ladder=size_ladder,
        pad_multiple_of=pad_multiple_of,
        oversize=oversize,
    )


def _import_serve() -> ModuleType:
    with warnings.catch_warnings():
        # Ray declares its settings in a way that pydantic deprecates; who uses Ray cannot change that.
        warnings.simplefilter("ignore", DeprecationWarning)
        return require("ray.serve", extra="ray")
