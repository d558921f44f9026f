"""pick: which requests run next, which are given up, and when to ask again. No clock, no thread, no state.

A batch closes after a window, at once in order, or by length, deadline and predicted time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import final

from ..latency import LatencyModel
from ..settings import MAX_WHOLE, Settings
from .request import Request, longest
from .waiting import Line

# The most urgent requests that one decision looks at; more would cost time and gain little.
MAX_POOL = 256
# How many batches are tried as the first one, and how often one request may be passed over by that.
MAX_CANDIDATES = 6
MAX_PASSED_OVER = 3
# Places that a cut may fall on. With more requests it falls only after every second or third one, and so on: neighbours
# then differ little in length, and the time to decide stays bounded.
MAX_CUTS = 24

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
        wake_seconds: ask again after this time; None: when a request comes.
        reason: why this batch: "window", "full", "all", "urgent" or "rescue".
        passed: the most urgent request, if another batch goes first.
    """

    batch: list[Request] = field(default_factory=list)
    shed: list[Request] = field(default_factory=list)
    wake_seconds: float | None = None
    reason: str = ""
    passed: Request | None = None


def pick(queue: Line | Iterable[Request], now: float, model: LatencyModel, settings: Settings) -> Decision:
    """Decide what a free worker does with the requests that wait.

    Args:
        queue: the requests that wait, in any order; a ``Line`` is not sorted again.
        now: the time in seconds, on the clock of the requests' arrival.
        model: how long batches take.
        settings: policy and limits.

    Returns:
        The batch to run now, which may be empty; the requests to give up; the seconds after which to ask again, None if
        only a new request can change the answer.

    >>> queue = [Request(item="a", length=3, arrival=0.0), Request(item="b", length=5, arrival=0.004)]
    >>> decision = pick(queue, 0.004, LatencyModel(), Settings(policy="window", max_wait_ms=10))
    >>> decision.batch, round(decision.wake_seconds, 6)
    ([], 0.006)
    >>> [request.item for request in pick(queue, 0.004, LatencyModel(), Settings()).batch]
    ['a', 'b']
    """
    line = queue if isinstance(queue, Line) else Line(queue)
    expired = line.expired(now)
    if len(expired) == len(line):
        return Decision(shed=expired)
    decision = _POLICIES[settings.policy](line, now, model, settings)
    return replace(decision, shed=expired + decision.shed) if expired else decision


def window(line: Line, now: float, model: LatencyModel, settings: Settings) -> Decision:
    """Collect requests for a fixed time after the first one, then run them in order.

    A full batch cannot collect more, so it runs before its time.
    """
    queue, num_due = _due(line, now, settings.max_items)
    batch = _fill_in_order(queue, settings)
    left = min(map(_arrival, queue)) + settings.max_wait_ms / 1e3 - now
    if len(batch) == settings.max_items or len(batch) < num_due:
        return Decision(batch, reason="full")
    if left <= 0:
        return Decision(batch, reason="window")
    return Decision(wake_seconds=min(left, min(map(_deadline, queue)) - now))


def greedy(line: Line, now: float, model: LatencyModel, settings: Settings) -> Decision:
    """Run the requests that wait, in order, as soon as a worker is free."""
    queue, num_due = _due(line, now, settings.max_items)
    batch = _fill_in_order(queue, settings)
    return Decision(batch, reason="all" if len(batch) == num_due else "full")


def adaptive(line: Line, now: float, model: LatencyModel, settings: Settings) -> Decision:
    """Group by length, and run the whole batch that holds the most urgent request.

    A batch closes only when a worker is free to run it, so requests that arrive until then may still join. The requests
    that wait are sorted by length and cut into batches of least total time. The batch of the most urgent request goes
    first. Another batch goes before it only if more requests are then predicted to finish in time, and at most three
    times over the same request. Requests that would be late with their batch are left out of it while others wait. A
    request is given up only if it could not finish in time even alone.
    """
    pool, num_due, hopeless = _pool(line, now, model)
    if not pool:
        return Decision(shed=hopeless)
    head = pool[0]
    if len(pool) == 1:
        return Decision(pool, hopeless, reason="all" if num_due == 1 else "full")
    pool.sort(key=_by_length)
    batches = _cut(pool, head, model, settings)
    if len(batches) == 1:
        return Decision(batches[0], hopeless, reason="all" if len(pool) == num_due else "full")
    batches.sort(key=lambda batch: min(map(_by_urgency, batch)))
    chosen = 0
    if model.is_ready and head.passed_over < MAX_PASSED_OVER:
        chosen = _best_first(batches, now, model)
    batch = _in_time(batches[chosen], now, model)
    if chosen == 0:
        return Decision(batch, hopeless, reason="urgent")
    return Decision(batch, hopeless, reason="rescue", passed=head)


def _due(line: Line, now: float, num: int) -> tuple[list[Request], int]:
    """Return the most urgent requests that are not past their deadline, and how many of those wait in all."""
    num_expired = len(line.expired(now))
    queue = line.most_urgent(num + num_expired)
    return [request for request in queue if request.deadline > now][:num], len(line) - num_expired


def _pool(line: Line, now: float, model: LatencyModel) -> tuple[list[Request], int, list[Request]]:
    """Return the most urgent requests that may be in time, how many others may be, and those without hope.

    Only as many are looked at as it takes to fill the pool, so that a long line costs no more than a short one.
    """
    hopeless: list[Request] = []
    num = MAX_POOL
    while True:
        queue, num_due = _due(line, now, num)
        hopeless = _find_hopeless(queue, now, model) if queue else []
        if not hopeless or len(queue) == num_due or len(queue) - len(hopeless) >= MAX_POOL:
            break
        num *= 2
    gone = set(map(id, hopeless))
    pool = [request for request in queue if id(request) not in gone] if gone else queue
    return pool[:MAX_POOL], num_due - len(hopeless), hopeless


def _in_time(batch: list[Request], now: float, model: LatencyModel) -> list[Request]:
    """Return the requests of a batch that finish in time with it; all of them if none does.

    Others wait for the worker: the seconds of those that would be late are theirs.
    """
    if not model.is_ready:
        return batch
    finish = now + model.predict(len(batch), batch[-1].length)
    return [request for request in batch if request.deadline >= finish] or batch


_POLICIES: dict[str, Callable[[Line, float, LatencyModel, Settings], Decision]] = {
    "adaptive": adaptive,
    "greedy": greedy,
    "window": window,
}


def _fill_in_order(queue: list[Request], settings: Settings) -> list[Request]:
    """Take from the front until the next request does not fit; nothing is passed over."""
    if settings.max_tokens is None:
        return queue
    length = 0
    for count, request in enumerate(queue, start=1):
        length = max(length, request.length)
        if count > 1 and count * length > settings.max_tokens:
            return queue[: count - 1]
    return queue


def _find_hopeless(queue: list[Request], now: float, model: LatencyModel) -> list[Request]:
    """Return the requests that could not finish in time even alone."""
    if not model.is_ready or now + model.predict(1, longest(queue)) <= min(map(_deadline, queue)):
        return []
    return [request for request in queue if now + model.predict(1, request.least_length) > request.deadline]


def _cut(pool: list[Request], head: Request, model: LatencyModel, settings: Settings) -> list[list[Request]]:
    lengths = list(map(_by_length, pool))
    _, per_token, per_square, _ = model._coefficients
    per_item = [length * (per_token + per_square * length) for length in lengths]  # as ``model.per_item``
    limits = _limits(lengths, per_item, _longest_batch(head, model), settings)
    return [pool[start:stop] for start, stop in split(model.constant, per_item, limits)]


def _longest_batch(head: Request, model: LatencyModel) -> float:
    """Return the seconds that the items of a batch may take, without the constant.

    A request that arrives just after a batch has begun waits for that batch and then for its own. Two batches must fit
    into its allowance, so each may take half of it, but never less than twice the constant, where batching pays.
    """
    if not model.is_ready or head.deadline == math.inf:
        return math.inf
    return max(head.allowance / 2, 2 * model.constant) - model.constant


def _limits(lengths: list[int], per_item: list[float], seconds: float, settings: Settings) -> list[int]:
    """Return the most items in a batch that is padded to each length."""
    most, tokens = settings.max_items, MAX_WHOLE if settings.max_tokens is None else settings.max_tokens
    if most * lengths[-1] <= tokens and most * per_item[-1] <= seconds:
        return [most] * len(lengths)
    return [
        max(1, int(min(most, tokens // length, seconds / each if each else math.inf)))
        for length, each in zip(lengths, per_item, strict=True)
    ]


def _best_first(batches: Sequence[list[Request]], now: float, model: LatencyModel) -> int:
    """Return which batch goes first so that most requests are in time, if the others follow by urgency."""
    margin = model.margin
    seconds = [margin * model.predict(len(batch), batch[-1].length) for batch in batches]
    deadlines = [sorted(map(_deadline, batch)) for batch in batches]
    best, best_count = 0, -1
    for first in range(min(len(batches), MAX_CANDIDATES)):
        finish, count = now, 0
        for index in (first, *(other for other in range(len(batches)) if other != first)):
            finish += seconds[index]
            # Deadlines are sorted: all from this place on are at or after the finish.
            count += len(deadlines[index]) - bisect_left(deadlines[index], finish)
        if count > best_count:
            best, best_count = first, count
    return best


# A call takes at least this share of its longest item, even if the fit says 0; so of equal cuts the fewest batches win.
_LEAST_CONSTANT = 1e-6


def split(constant: float, per_item: Sequence[float], limits: Sequence[int]) -> list[tuple[int, int]]:
    """Return the cut of length-sorted requests with the least total time, as ``(start, stop)``, shortest first.

    A batch ``[start, stop)`` takes ``constant + (stop - start) × per_item[stop - 1]``, since its items are padded to
    the longest. The cut is found by dynamic programming over the prefixes. As ``per_item`` rises and ``limits`` fall,
    the best start never moves back while the prefix grows, so each prefix looks only at starts from the last one on.

    Args:
        constant: seconds of any call.
        per_item: seconds of an item at each request's length, rising.
        limits: the most items in a batch that ends with each request, 1 or more, falling.

    >>> split(4.0, [1.0, 1.0, 1.0, 9.0], [64] * 4)
    [(0, 3), (3, 4)]
    >>> split(4.0, [1.0, 1.0, 1.0, 1.5], [64] * 4)
    [(0, 4)]
    >>> split(0.0, [1.0, 1.0, 1.0, 1.0], [64] * 4)
    [(0, 4)]
    """
    places = _places(limits)
    totals, starts, start = [0.0], [0], 0
    constant = max(constant, _LEAST_CONSTANT * per_item[-1])
    slack = 1e-9 * constant
    for index in range(1, len(places)):
        stop = places[index]
        slope, earliest = per_item[stop - 1], stop - limits[stop - 1]
        while places[start] < earliest:
            start += 1
        # totals[j] + constant + (stop - places[j]) × slope, without the terms that all candidates share.
        least = totals[start] - places[start] * slope
        for candidate in range(start + 1, index):
            total = totals[candidate] - places[candidate] * slope
            if total <= least + slack:  # the latest of equals: batches of short, most often urgent requests are full
                least, start = min(total, least), candidate
        totals.append(least + stop * slope + constant)
        starts.append(start)
    return _walk_back(places, starts)


def _places(limits: Sequence[int]) -> list[int]:
    """Return where cuts may fall, with 0 and the end; the gaps are never larger than a batch may be."""
    step = -(-len(limits) // MAX_CUTS)
    places = [len(limits)]
    while places[-1] > 0:
        places.append(max(0, places[-1] - min(step, limits[places[-1] - 1])))
    return places[::-1]


def _walk_back(places: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int]]:
    batches, index = [], len(places) - 1
    while index > 0:
        batches.append((places[starts[index]], places[index]))
        index = starts[index]
    return batches[::-1]
