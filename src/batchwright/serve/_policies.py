"""When a batch closes: after a window, at once in order, or by length, deadline and predicted time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import final

from ._request import Request, longest
from ._settings import Settings
from ._split import split
from .latency import LatencyModel

# The most urgent requests that one decision looks at; more would cost time and gain little.
MAX_POOL = 256
# Other batches that may go before the most urgent one, and how often one request may be passed over like that.
MAX_CANDIDATES = 6
MAX_PASSED_OVER = 3

_by_urgency = attrgetter("urgency", "arrival")
_by_length = attrgetter("length")
_arrival = attrgetter("arrival")
_deadline = attrgetter("deadline")


@final
@dataclass(frozen=True)
class Decision:
    """What a free worker does next.

    Args:
        batch: the requests to run now.
        shed: the requests to give up: past their deadline, or unable to meet it even alone.
        wake_seconds: ask again after so long; None: when a request comes.
        reason: why this batch: "window", "full", "all", "urgent" or "rescue".
        passed: the most urgent request, where another batch goes first.
    """

    batch: list[Request] = field(default_factory=list)
    shed: list[Request] = field(default_factory=list)
    wake_seconds: float | None = None
    reason: str = ""
    passed: Request | None = None


def window(queue: list[Request], now: float, model: LatencyModel, settings: Settings) -> Decision:
    """Collect requests for a fixed time from the first one on, then submit them in order.

    A batch that is full cannot collect more, so it goes before its time.
    """
    batch = _fill_in_order(queue, settings)
    left = min(map(_arrival, queue)) + settings.max_wait_ms / 1e3 - now
    if len(batch) == settings.max_items or len(batch) < len(queue):
        return Decision(batch, reason="full")
    if left <= 0:
        return Decision(batch, reason="window")
    return Decision(wake_seconds=min(left, min(map(_deadline, queue)) - now))


def greedy(queue: list[Request], now: float, model: LatencyModel, settings: Settings) -> Decision:
    """Submit what waits, in order, as soon as a worker is free."""
    batch = _fill_in_order(queue, settings)
    return Decision(batch, reason="all" if len(batch) == len(queue) else "full")


def adaptive(queue: list[Request], now: float, model: LatencyModel, settings: Settings) -> Decision:
    """Group by length, run the batch that holds the most urgent request, whole.

    A batch closes when a worker is free to run it, never before: what arrives meanwhile may still join. The requests
    that wait are sorted by length and cut into batches of least total time. First goes the batch of the most urgent
    request. Another goes before it only if more requests are then predicted to finish in time, and not more than three
    times over the same request. A request is given up only when it could not finish in time even alone.
    """
    hopeless = _find_hopeless(queue, now, model)
    if hopeless:
        gone = set(map(id, hopeless))
        queue = [request for request in queue if id(request) not in gone]
        if not queue:
            return Decision(shed=hopeless)
    pool = sorted(queue, key=_by_urgency)[:MAX_POOL]
    head = pool[0]
    pool.sort(key=_by_length)
    batches = _cut(pool, head, model, settings)
    if len(batches) == 1:
        return Decision(batches[0], hopeless, reason="all" if len(pool) == len(queue) else "full")
    batches.sort(key=lambda batch: min(map(_by_urgency, batch)))
    chosen = 0
    if model.is_ready and head.passed_over < MAX_PASSED_OVER:
        chosen = _best_first(batches, now, model)
    if chosen == 0:
        return Decision(batches[0], hopeless, reason="urgent")
    return Decision(batches[chosen], hopeless, reason="rescue", passed=head)


def _find_hopeless(queue: list[Request], now: float, model: LatencyModel) -> list[Request]:
    """Return the requests that could not finish in time even alone."""
    if not model.is_ready or now + model.predict(1, longest(queue)) <= min(map(_deadline, queue)):
        return []
    return [request for request in queue if now + model.predict(1, request.length) > request.deadline]


def _fill_in_order(queue: list[Request], settings: Settings) -> list[Request]:
    """Take from the front until the next one does not fit; nothing is passed over."""
    ordered = sorted(queue, key=_by_urgency)[: settings.max_items]
    if settings.max_tokens is None:
        return ordered
    length = 0
    for count, request in enumerate(ordered, start=1):
        length = max(length, request.length)
        if count > 1 and count * length > settings.max_tokens:
            return ordered[: count - 1]
    return ordered


def _cut(pool: list[Request], head: Request, model: LatencyModel, settings: Settings) -> list[list[Request]]:
    lengths = list(map(_by_length, pool))
    per_item = list(map(model.per_item, lengths))
    limits = _limits(lengths, per_item, _longest_batch(head, model), settings)
    return [pool[start:stop] for start, stop in split(model.constant, per_item, limits)]


def _longest_batch(head: Request, model: LatencyModel) -> float:
    """Return the seconds that the items of a batch may take beside the constant.

    A request that comes just after a batch has begun waits for that one and then for its own: two batches to its
    deadline, so each may take half of what it is allowed. Never less than twice the constant, where batching pays.
    """
    if not model.is_ready or head.deadline == math.inf:
        return math.inf
    return max(head.allowance / 2, 2 * model.constant) - model.constant


def _limits(lengths: list[int], per_item: list[float], seconds: float, settings: Settings) -> list[int]:
    """Return the most items of a batch that is padded to each length."""
    most, tokens = settings.max_items, math.inf if settings.max_tokens is None else settings.max_tokens
    if most * lengths[-1] <= tokens and most * per_item[-1] <= seconds:
        return [most] * len(lengths)
    return [
        max(1, int(min(most, tokens / length, seconds / each if each else math.inf)))
        for length, each in zip(lengths, per_item, strict=True)
    ]


def _best_first(batches: Sequence[list[Request]], now: float, model: LatencyModel) -> int:
    """Return which batch goes first so that most requests are in time, the others following by urgency."""
    margin = model.margin
    seconds = [margin * model.predict(len(batch), batch[-1].length) for batch in batches]
    deadlines = [sorted(map(_deadline, batch)) for batch in batches]
    best, best_count = 0, -1
    for first in range(min(len(batches), MAX_CANDIDATES)):
        finish, count = now, 0
        for index in (first, *(other for other in range(len(batches)) if other != first)):
            finish += seconds[index]
            count += len(deadlines[index]) - bisect_left(deadlines[index], finish)
        if count > best_count:
            best, best_count = first, count
    return best
