"""The live page: its figures, the demo behind it, and both in a real browser without a network."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time

import httpx
import numpy as np
import pytest
import uvicorn

from batchwright.serve import Batcher, _http_demo
from batchwright.serve._http_demo import Demo, make_demo_app
from batchwright.serve._http_encoder import DemoEncoder, length_of
from batchwright.serve._http_page import render_page
from batchwright.serve.http import make_app

from ..lab.browser import Browser, find_chromium
from .tools import Recorder

needs_browser = pytest.mark.skipif(
    find_chromium() is None, reason="needs a browser: install the Debian package chromium (apt-get install chromium)"
)


def tiny_encoder(**options):
    return DemoEncoder(width=8, num_layers=1, num_heads=2, **options)


@pytest.fixture(scope="module")
def encoder():
    return tiny_encoder()


@pytest.fixture
def demo(encoder):
    return Demo(encoder, deadline_ms=1000)


@contextlib.contextmanager
def served(app):
    """Run an app in a thread and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_the_page_holds_its_own_style_and_script_and_names_no_other_machine():
    page = render_page()
    assert "/* style */" not in page
    assert "/* script */" not in page
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)


def test_live_figures_count_what_the_batcher_did():
    async def main():
        batcher = Batcher(Recorder(bad=[3]), deadline_ms=5000)
        transport = httpx.ASGITransport(make_app(batcher))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for item in (1, 2, 3):
                await client.post("/", content=str(item))
            return (await client.get("/live")).json()

    live = asyncio.run(main())
    (arm,) = live["arms"]
    assert (live["deadline_ms"], live["load"]) == (5000, None)
    assert (arm["asked"], arm["answered"], arm["failed"], arm["late"], arm["shed"]) == (3, 2, 1, 0, 0)
    assert (arm["batches"], arm["items"], arm["waiting"]) == (3, 3, 0)


def test_a_vector_does_not_depend_on_its_mates(encoder):
    alone = encoder(["to be"])[0]
    np.testing.assert_allclose(encoder(["a much longer text", "to be"])[1], alone, atol=1e-5)
    assert np.abs(np.array(encoder(["or not"])[0]) - alone).max() > 0.01


def test_torch_and_numpy_give_the_same_vectors():
    texts = ["to be", "or not to be", "é"]
    with_torch, with_numpy = (tiny_encoder(use_torch=use)(texts) for use in (True, False))
    np.testing.assert_allclose(with_torch, with_numpy, atol=1e-5)


@pytest.mark.parametrize(("text", "length"), [("", 1), ("é", 2), ("x" * 300, 256)])
def test_the_length_of_a_text_is_what_the_encoder_pads(encoder, text, length):
    assert length_of(text) == length
    assert len(encoder([text])[0]) == 8


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
    monkeypatch.setattr(_http_demo, "REST_SECONDS", 0.0)

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


@needs_browser
def test_the_page_of_a_server_draws_what_it_did(browser):
    with served(make_app(Batcher(Recorder(), deadline_ms=5000))) as address:
        page = browser.open(address)
        for item in range(20):
            httpx.post(address, content=str(item))
        page.wait("document.querySelector('td[data-name=\"in a batch\"]')?.textContent === '1.0'")
        assert page.value("document.querySelectorAll('#charts svg').length") == 6
        assert "due within 5000 ms" in page.value("document.getElementById('about').textContent")
        assert page.value("document.getElementById('load').checkVisibility()") is False
        assert page.value("document.querySelector('td[data-name=\"padding\"]').textContent") == "0 %"
        assert page.value("document.querySelector('#charts .line').getAttribute('d')").startswith("M")
        assert page.problems() == []


def eventually(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.05)


@needs_browser
def test_the_slider_moves_the_load_of_three_policies(browser, demo, tmp_path):
    with served(make_demo_app(demo)) as address:
        page = browser.open(address)
        names = page.value("[...document.querySelectorAll('tbody td:first-child')].map((it) => it.textContent)")
        assert names == ["window", "greedy", "adaptive"]
        page.value(
            "(() => { const it = document.getElementById('rate'); it.value = 33;"
            "it.dispatchEvent(new Event('input')); it.dispatchEvent(new Event('change')); })()"
        )
        page.wait("document.getElementById('rate-now').textContent === '33'")
        page.wait("document.querySelectorAll('#charts .dot').length >= 18")
        eventually(lambda: demo.rate == 33)  # the server may be busy with the load it has
        assert page.problems() == []
        assert page.screenshot(tmp_path / "page.png").stat().st_size > 10_000


@needs_browser
def test_a_phone_needs_no_sideways_scrolling(browser, demo):
    with served(make_demo_app(demo)) as address:
        page = browser.open(address, width=390, height=800, dark=True)
        assert page.value("document.documentElement.scrollWidth") == 390


@needs_browser
def test_a_server_that_has_gone_is_said_to_be_gone(browser):
    with served(make_app(Batcher(Recorder()))) as address:
        page = browser.open(address)
        assert page.value("document.getElementById('state').textContent") == ""
    page.wait("document.getElementById('state').textContent.includes('does not answer')")


def test_the_figures_are_plain_json(demo):
    assert json.loads(json.dumps(demo.figures()))["load"]["max_rate"] == demo.max_rate
