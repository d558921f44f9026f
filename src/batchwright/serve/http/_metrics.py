"""``/metrics``: the figures of a batcher and the responses, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from .._engine.request import ENDED
from ..stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds of a response: from a quick model on the same machine to a long queue.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Refused requests read new figures only this often: there may be thousands of them per second.
_STALE_SECONDS = 0.5


@final
class Metrics:
    """The metrics of one batcher, in their own registry.

    Args:
        read: returns the figures of the batcher.
        clock: returns seconds that never go back.
    """

    def __init__(self, read: Callable[[], Stats], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._latest: tuple[float, Stats] | None = None
        self._registry = CollectorRegistry()
        self._responses = Counter(
            "batchwright_http_responses", "Responses to POST, by status.", ["status"], registry=self._registry
        )
        self._seconds = Histogram(
            "batchwright_http_response_seconds",
            "From the start of a POST to its response.",
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._registry.register(_BatcherCollector(read))

    def count(self, status: int, seconds: float) -> None:
        """Count a response."""
        self._responses.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def stats(self) -> Stats:
        """Return figures of the batcher that are at most half a second old."""
        now = self._clock()
        if self._latest is None or now - self._latest[0] >= _STALE_SECONDS:
            self._latest = (now, self._read())
        return self._latest[1]

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        text: bytes = generate_latest(self._registry)
        return text


@final
class _BatcherCollector(Collector):
    """Reads the figures when Prometheus asks; nothing is counted twice."""

    def __init__(self, read: Callable[[], Stats]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        stats = self._read()
        yield from _requests(stats)
        yield from _batches(stats)
        yield from _times(stats)


def _requests(stats: Stats) -> Iterator[Metric]:
    yield _gauge("queue_requests", "Requests that wait.", stats.num_waiting)
    yield _gauge("running_requests", "Requests in batches that run.", stats.num_running)
    yield _counter("submitted_requests", "Requests taken in.", stats.num_submitted)
    ends = {state.value: getattr(stats, f"num_{state.value}") for state in ENDED}
    yield _counters("ended_requests", "Requests that have ended, by how they ended.", "end", ends)
    yield _counter("missed_requests", "Requests answered after their deadline.", stats.num_missed)
    sheds = {"queue_full": 0, "too_large": 0, "closed": 0, **stats.num_refused, "deadline": stats.num_shed}
    yield _counters("sheds", "Requests refused or given up without being run, by reason.", "reason", sheds)


def _batches(stats: Stats) -> Iterator[Metric]:
    yield _counters("batches", "Batches formed, by what closed them.", "reason", stats.reasons)
    items = SummaryMetricFamily("batchwright_batch_items", "Requests per batch.")
    items.add_metric([], count_value=stats.num_batches, sum_value=stats.num_items)
    yield items
    yield _counter("calls", "Calls of the function; more than batches if some ran in parts.", stats.num_calls)
    yield _counter("out_of_memory", "Calls that ran out of memory.", stats.num_ooms)
    tokens = {"real": stats.num_tokens, "padding": stats.num_padded_tokens - stats.num_tokens}
    yield _counters("tokens", "Tokens in batches, real or padding.", "kind", tokens)
    yield _gauge("padding_ratio", "Share of padded tokens that is padding, since the start.", stats.padding)
    if stats.max_tokens is not None:
        yield _gauge("max_tokens", "Padded tokens that a batch may hold now.", stats.max_tokens)


def _times(stats: Stats) -> Iterator[Metric]:
    for name, what, figures in (
        ("wait_seconds", "From submission to the start of the batch", stats.wait_ms),
        ("latency_seconds", "From submission to the answer", stats.latency_ms),
    ):
        seconds = {f"0.{key[1:]}": value / 1e3 for key, value in figures.items()}
        yield _gauges(name, f"{what}, quantiles of the latest 1,000.", "quantile", seconds)
    model = stats.time_model
    terms = {term: model[term] for term in ("1", "n*L", "n*L^2")} if model["num_observed"] else {}
    yield _gauges("time_model_seconds", "Predicted seconds of a batch, by term.", "term", terms)
    yield _counter("time_model_batches", "Batches that the time model has learned from.", model["num_observed"])
    margin = "Real over predicted seconds of a batch, 95 % quantile of the latest 128, 1 or more."
    yield _gauge("time_model_real_over_predicted", margin, model["margin"])


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"batchwright_{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"batchwright_{name}", what, value=value)


def _gauges(name: str, what: str, label: str, values: dict[str, Any]) -> Metric:
    return _labelled(GaugeMetricFamily(f"batchwright_{name}", what, labels=[label]), values)


def _counters(name: str, what: str, label: str, values: dict[str, Any]) -> Metric:
    return _labelled(CounterMetricFamily(f"batchwright_{name}", what, labels=[label]), values)


def _labelled(family: Any, values: dict[str, Any]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    metric: Metric = family
    return metric
