"""pick: which requests run next, which are given up, and when to ask again. No clock, no thread, no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ._policies import Decision, adaptive, greedy, window
from ._request import Request
from ._settings import Settings
from .latency import LatencyModel

_POLICIES: dict[str, Callable[[list[Request], float, LatencyModel, Settings], Decision]] = {
    "adaptive": adaptive,
    "greedy": greedy,
    "window": window,
}


def pick(queue: Sequence[Request], now: float, model: LatencyModel, settings: Settings) -> Decision:
    """Decide what a free worker does with the requests that wait.

    Args:
        queue: the requests that wait, in any order.
        now: the time in seconds, on the clock of the requests' arrival.
        model: how long batches take.
        settings: policy and limits.

    Returns:
        The batch to run now, empty where there is none; the requests to give up; the seconds after which to ask
        again, None where only a new request can change the answer.

    >>> queue = [Request(item="a", length=3, arrival=0.0), Request(item="b", length=5, arrival=0.004)]
    >>> decision = pick(queue, 0.004, LatencyModel(), Settings(policy="window", max_wait_ms=10))
    >>> decision.batch, round(decision.wake_seconds, 6)
    ([], 0.006)
    >>> [request.item for request in pick(queue, 0.004, LatencyModel(), Settings()).batch]
    ['a', 'b']
    """
    due = [request for request in queue if request.deadline > now]
    if len(due) == len(queue):
        return _decide(due, now, model, settings) if due else Decision()
    expired = [request for request in queue if request.deadline <= now]
    if not due:
        return Decision(shed=expired)
    decision = _decide(due, now, model, settings)
    return Decision(decision.batch, expired + decision.shed, decision.wake_seconds, decision.reason, decision.passed)


def _decide(due: list[Request], now: float, model: LatencyModel, settings: Settings) -> Decision:
    return _POLICIES[settings.policy](due, now, model, settings)
