"""``/metrics``: the figures of a batcher and the responses, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
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


Read = Callable[[], Stats]


@final
class Metrics:
    """The metrics of one batcher, or of several under the label ``model``, in their own registry.

    Args:
        read: returns the figures of the batcher; a dict of several by name, where one may have an empty name.
        clock: returns seconds that never go back.
    """

    def __init__(self, read: Read | Mapping[str, Read], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._reads: Mapping[str, Read] = read if isinstance(read, Mapping) else {"": read}
        self._clock = clock
        self._latest: dict[str, tuple[float, Stats]] = {}
        self._registry = CollectorRegistry()
        self._labels = ["model"] if any(self._reads) else []
        labels = [*self._labels, "status"]
        self._responses = Counter(
            "batchwright_http_responses", "Responses to POST, by status.", labels, registry=self._registry
        )
        self._seconds = Histogram(
            "batchwright_http_response_seconds",
            "From the start of a POST to its response.",
            self._labels,
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._registry.register(_BatcherCollector(self._reads))

    def count(self, status: int, seconds: float, model: str = "") -> None:
        """Count a response."""
        labels = [model] if self._labels else []
        self._responses.labels(*labels, str(status)).inc()
        (self._seconds.labels(*labels) if labels else self._seconds).observe(seconds)

    def stats(self, model: str = "") -> Stats:
        """Return figures of a batcher that are at most half a second old."""
        now = self._clock()
        if model not in self._latest or now - self._latest[model][0] >= _STALE_SECONDS:
            self._latest[model] = (now, self._reads[model]())
        return self._latest[model][1]

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        text: bytes = generate_latest(self._registry)
        return text


@final
class _BatcherCollector(Collector):
    """Reads the figures when Prometheus asks; nothing is counted twice."""

    def __init__(self, reads: Mapping[str, Read]) -> None:
        self._reads = reads

    def collect(self) -> Iterator[Metric]:
        """Yield every family, with the samples of all batchers."""
        merged: dict[str, Metric] = {}
        for model, read in self._reads.items():
            for family in _families(read()):
                kept = merged.setdefault(family.name, family)
                labels = {"model": model} if model else {}
                samples = [sample._replace(labels={**labels, **sample.labels}) for sample in family.samples]
                kept.samples = samples if kept is family else kept.samples + samples
        yield from merged.values()


def _families(stats: Stats) -> Iterator[Metric]:
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
    sheds = {"queue_full": 0, "too_large": 0, "closed": 0, "deadline": 0, **stats.num_refused}
    sheds["deadline"] += stats.num_shed
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
