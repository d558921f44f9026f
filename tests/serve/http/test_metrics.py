"""What Prometheus reads."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchwright.serve import Batcher, DeadlineExceeded, LatencyModel, QueueFull
from batchwright.serve.http import make_app
from batchwright.serve.http._metrics import Metrics

from ..tools import Recorder


def parse(text):
    """Return values by name and labels."""
    families = text_string_to_metric_families(text if isinstance(text, str) else text.decode())
    return {
        (sample.name.removeprefix("batchwright_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_figures_of_a_batcher_are_in_the_text():
    batcher = Batcher(Recorder(bad=[3]), length_of=lambda item: item, max_tokens=100)
    for item in (1, 2):
        batcher.submit_sync(item)
    with pytest.raises(ValueError, match="bad item"):
        batcher.submit_sync(3)
    values = parse(Metrics(batcher.stats).text())
    batcher.close_sync()
    assert values["submitted_requests_total",] == 3
    assert values["ended_requests_total", "answered"] == 2
    assert values["ended_requests_total", "failed"] == 1
    # One after the other, each is a batch of its own that holds all that waits.
    assert values["batches_total", "all"] == values["batch_items_count",] == values["batch_items_sum",] == 3
    assert values["queue_requests",] == values["running_requests",] == values["padding_ratio",] == 0
    assert values["max_tokens",] == 100
    assert values["latency_seconds", "0.99"] >= values["latency_seconds", "0.50"] > 0


def test_padding_is_counted_in_padded_tokens():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder, policy="greedy", length_of=lambda item: item)
        first = asyncio.create_task(batcher.submit(5))
        await asyncio.to_thread(recorder.started.wait, 30)
        others = [asyncio.create_task(batcher.submit(item)) for item in (1, 4)]
        while batcher.stats().num_waiting < 2:
            await asyncio.sleep(0.001)
        recorder.gate.set()
        await asyncio.gather(first, *others)
        await batcher.close()
        return parse(Metrics(batcher.stats).text())

    values = asyncio.run(main())
    # Batches [5] and [1, 4]: 10 tokens in 5 + 2 × 4 = 13 padded ones.
    assert values["padding_ratio",] == pytest.approx(3 / 13)
    assert values["batch_items_sum",] / values["batch_items_count",] == 1.5


def test_sheds_have_a_reason():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder, max_queue=1, time_model=LatencyModel.fixed(0.2))
        first = asyncio.create_task(batcher.submit(1))
        await asyncio.to_thread(recorder.started.wait, 30)
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(2, deadline_ms=20)
        second = asyncio.create_task(batcher.submit(2))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await batcher.submit(3)
        recorder.gate.set()
        await asyncio.gather(first, second)
        await batcher.close()
        return parse(Metrics(batcher.stats).text())

    values = asyncio.run(main())
    assert values["sheds_total", "queue_full"] == values["sheds_total", "deadline"] == 1
    assert values["sheds_total", "too_large"] == values["sheds_total", "closed"] == 0


def test_the_time_model_is_shown_once_it_has_learned():
    batcher = Batcher(Recorder())
    before = parse(Metrics(batcher.stats).text())
    for item in range(12):
        batcher.submit_sync(item)
    after = parse(Metrics(batcher.stats).text())
    batcher.close_sync()
    assert ("time_model_seconds", "1") not in before
    assert after["time_model_seconds", "1"] + after["time_model_seconds", "n*L"] > 0
    assert after["time_model_real_over_predicted",] >= 1
    assert 0 < after["time_model_batches_total",] <= 12


def test_an_answer_after_its_deadline_is_a_miss():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder)
        task = asyncio.create_task(batcher.submit(1, deadline_ms=500))
        await asyncio.to_thread(recorder.started.wait, 30)
        await asyncio.sleep(0.6)
        recorder.gate.set()
        await task
        await batcher.close()
        return parse(Metrics(batcher.stats).text())

    assert asyncio.run(main())["missed_requests_total",] == 1


def test_responses_are_counted_by_status():
    async def main():
        transport = httpx.ASGITransport(make_app(Batcher(Recorder(bad=[3]))))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for body in ("1", "2", "3", "{"):
                await client.post("/", content=body)
            return await client.get("/metrics")

    response = asyncio.run(main())
    values = parse(response.text)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert [values["http_responses_total", status] for status in ("200", "422", "400")] == [2, 1, 1]
    assert values["http_response_seconds_count",] == values["http_response_seconds_bucket", "+Inf"] == 4


def test_each_app_has_a_registry_of_its_own():
    first, second = (Metrics(Batcher(Recorder()).stats) for _ in range(2))
    first.count(200, 0.1)
    assert ("http_responses_total", "200") in parse(first.text())
    assert ("http_responses_total", "200") not in parse(second.text())


def test_figures_for_refusals_are_read_twice_a_second_at_most():
    now, reads = [0.0], []
    metrics = Metrics(lambda: reads.append(now[0]), clock=lambda: now[0])
    for seconds in (0.0, 0.2, 0.4, 0.6, 0.8, 1.2):
        now[0] = seconds
        metrics.stats()
    assert reads == [0.0, 0.6, 1.2]
