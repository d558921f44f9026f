"""The demo: the same load on three policies, at the rate that the slider sets."""

import asyncio
import json

import httpx

from batchwright.serve.demo import arms, make_demo_app


def test_the_demo_asks_every_policy_the_same_and_loses_nothing(demo):
    async def main():
        demo.set_rate(100)
        driver = asyncio.create_task(demo.drive())
        while demo.figures()["arms"][0]["answered"] < 20:
            await asyncio.sleep(0.01)
        driver.cancel()
        for arm in demo.arms:
            await arm.batcher.drain()
        return demo.figures()["arms"]

    arms = asyncio.run(asyncio.wait_for(main(), 60))
    assert [arm["name"] for arm in arms] == ["window", "greedy", "adaptive"]
    assert len({arm["asked"] for arm in arms}) == 1
    assert all(arm["answered"] + arm["shed"] == arm["asked"] >= 20 for arm in arms)
    # The real tokens are the same for all where all were run; padding is what the policies differ in.
    assert len({arm["tokens"][0] for arm in arms if not arm["shed"]}) <= 1
    assert all(arm["tokens"][1] >= arm["tokens"][0] > 0 for arm in arms)


def test_the_load_rests_when_nobody_looks_any_more(demo, monkeypatch):
    # With no patience at all, one look long ago is as good as none.
    monkeypatch.setattr(arms, "REST_SECONDS", 0.0)

    async def main():
        demo.set_rate(demo.max_rate)
        demo.figures()
        driver = asyncio.create_task(demo.drive())
        await asyncio.sleep(0.2)
        asked = [arm.batcher.stats().num_submitted for arm in demo.arms]
        driver.cancel()
        await demo.close()
        return asked

    assert asyncio.run(main()) == [0, 0, 0]


def test_the_demo_is_warm_before_anybody_can_look(demo):
    async def main():
        app = make_demo_app(demo)
        async with app.router.lifespan_context(app):
            return [arm.batcher.stats() for arm in demo.arms], demo.figures()["arms"]

    stats, figures = asyncio.run(asyncio.wait_for(main(), 60))
    # 1 + 2 + 4 + 8 + 16 requests, four times, and time models that are in use; no latency of them is shown.
    assert [one.num_answered for one in stats] == [124] * 3
    assert all(arm.batcher.time_model.is_ready for arm in demo.arms)
    assert [arm["p99_ms"] for arm in figures] == [None] * 3


def test_latencies_count_once_the_load_has_settled(demo, monkeypatch):
    async def shown(settle_seconds):
        monkeypatch.setattr(arms, "SETTLE_SECONDS", settle_seconds)
        demo.set_rate(100)
        driver = asyncio.create_task(demo.drive())
        answered = demo.figures()["arms"][2]["answered"]
        while demo.figures()["arms"][2]["answered"] < answered + 10:
            await asyncio.sleep(0.01)
        driver.cancel()
        return demo.figures()["arms"][2]["p99_ms"]

    async def main():
        found = [await shown(1e9), await shown(0.0)]
        await demo.close()
        return found

    first, second = asyncio.run(asyncio.wait_for(main(), 60))
    assert first is None
    assert second > 0


def test_the_slider_of_the_demo_takes_rates_within_its_range_only(demo):
    async def main():
        transport = httpx.ASGITransport(make_demo_app(demo))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = [("7", "application/json"), ("-1", "application/json"), ("nan", "application/json")]
            sent += [("1e9", "application/json"), ("fast", "application/json"), ("9", "text/plain")]
            answers = [await client.post("/load", content=body, headers={"Content-Type": kind}) for body, kind in sent]
            vector = await client.post("/", json="a text")
            not_text = await client.post("/", json=7)
        await demo.close()
        return [answer.status_code for answer in (*answers, vector, not_text)]

    assert asyncio.run(main()) == [200, 400, 400, 400, 400, 415, 200, 422]
    assert demo.rate == 7


def test_the_figures_are_plain_json(demo):
    assert json.loads(json.dumps(demo.figures()))["load"]["max_rate"] == demo.max_rate
