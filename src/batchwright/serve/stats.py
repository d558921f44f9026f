"""The figures of a batcher: the counters that it keeps, and what people read."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from ._engine.request import ENDED, Request, State, longest, num_tokens

# Percentiles are taken over this many of the latest requests.
NUM_RECENT = 1000


@final
@dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures since the start; percentiles over the last 1,000 answers.

    ``submitted = waiting + running + answered + failed + shed + cancelled + closed``.

    Attributes:
        num_waiting: requests in the queue.
        num_running: requests in batches that run.
        num_submitted: requests taken in.
        num_answered: requests that got their answer.
        num_failed: requests that ended with the error of their item.
        num_shed: requests given up with ``DeadlineExceeded``.
        num_cancelled: requests that their caller cancelled.
        num_closed: requests that ended with ``Closed``.
        num_missed: requests answered, but after their deadline.
        num_refused: requests not taken in, by reason: "queue_full", "too_large", "closed", "deadline".
        num_batches: batches formed.
        num_calls: calls of the function; more than ``num_batches`` if batches failed and were run in parts.
        num_ooms: calls that ran out of memory.
        num_items: requests in all batches formed.
        num_tokens: the sum of their lengths.
        num_padded_tokens: the same after padding: the sum of ``num_items × longest`` over the batches.
        mean_items: requests per batch, on average.
        padding: the share of padded tokens that is padding.
        reasons: batches by what closed them: "all" (everything that waited), "full", "window", "urgent", "rescue",
            "probe".
        wait_ms: from submission to the start of the batch, by percentile.
        latency_ms: from submission to the answer, by percentile.
        max_tokens: the limit now; lower than the setting after memory ran out.
        time_model: the coefficients in seconds, the margin that 95 % of batches stay below, and how many were learned
            from.
        num_abandoned: threads given up in calls that took longer than ``run_timeout_ms``.
        num_restarts: processes of workers that were started in place of one that ended.
        failure: what ended the batcher by mistake, or why none of its processes can start; None while it works, and
            after it was closed on purpose.
        background: of offline work beside the requests: ``part_ms`` that a part of it may take now, None before the
            first; ``slowness`` of the machine beside what the time model says; ``boldness``, the share of the allowed
            risk that is taken; ``num_late`` requests that would have been in time without it; ``waiting``, why its next
            item waits, None if it does not. Empty without such work.
    """

    num_waiting: int
    num_running: int
    num_submitted: int
    num_answered: int
    num_failed: int
    num_shed: int
    num_cancelled: int
    num_closed: int
    num_missed: int
    num_refused: dict[str, int]
    num_batches: int
    num_calls: int
    num_ooms: int
    num_items: int
    num_tokens: int
    num_padded_tokens: int
    mean_items: float
    padding: float
    reasons: dict[str, int]
    wait_ms: dict[str, float]
    latency_ms: dict[str, float]
    max_tokens: int | None
    time_model: dict[str, Any]
    num_abandoned: int = 0
    num_restarts: int = 0
    failure: str | None = None
    background: dict[str, Any] = field(default_factory=dict)

    @property
    def is_healthy(self) -> bool:
        """Say whether the batcher can answer; no mistake has ended it. A batcher that was closed is healthy."""
        return self.failure is None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values, ready for JSON."""
        return dataclasses.asdict(self)


@final
class Counters:
    """The running counts that ``Stats`` is made from."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.num_missed = 0
        self.num_calls = 0
        self.num_ooms = 0
        self.refused: Counter[str] = Counter()
        self.ended: Counter[State] = Counter()
        self.reasons: Counter[str] = Counter()
        self._num_items = 0
        self._num_tokens = 0
        self._num_padded = 0
        self._waits: deque[float] = deque(maxlen=NUM_RECENT)
        self._latencies: deque[float] = deque(maxlen=NUM_RECENT)

    def start(self, batch: list[Request], reason: str, now: float) -> None:
        """Count a batch that begins."""
        self.reasons[reason] += 1
        self._num_items += len(batch)
        self._num_tokens += num_tokens(batch)
        self._num_padded += len(batch) * longest(batch)
        self._waits.extend([now - request.arrival for request in batch])

    def end(self, request: Request, now: float) -> None:
        """Count a request that has ended."""
        self.ended[request.state] += 1
        if request.state is State.ANSWERED:
            self._latencies.append(now - request.arrival)
            self.num_missed += now > request.deadline

    def figures(self) -> dict[str, Any]:
        """Return the fields of ``Stats`` that follow from the counts."""
        num_batches = sum(self.reasons.values())
        return {
            "num_submitted": self.num_submitted,
            **{f"num_{state.value}": self.ended[state] for state in ENDED},
            "num_missed": self.num_missed,
            "num_refused": dict(self.refused),
            "num_batches": num_batches,
            "num_calls": self.num_calls,
            "num_ooms": self.num_ooms,
            "num_items": self._num_items,
            "num_tokens": self._num_tokens,
            "num_padded_tokens": self._num_padded,
            "mean_items": self._num_items / num_batches if num_batches else 0.0,
            "padding": 1 - self._num_tokens / self._num_padded if self._num_padded else 0.0,
            "reasons": dict(self.reasons),
            "wait_ms": _percentiles(self._waits),
            "latency_ms": _percentiles(self._latencies),
        }


def _percentiles(seconds: deque[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.array(seconds) * 1e3, [50, 95, 99]).tolist()
    return dict(zip(("p50", "p95", "p99"), values, strict=True))
