"""The live page: its figures, and the page of a server and of the demo in a real browser without a network."""

import asyncio
import contextlib
import re
import socket
import threading
import time

import httpx
import uvicorn

from batchwright.serve import Batcher
from batchwright.serve.demo import make_demo_app
from batchwright.serve.http import make_app
from batchwright.serve.http._page import render_page

from ..tools import Recorder


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


def test_the_page_holds_its_own_style_and_script_and_names_no_other_machine():
    page = render_page()
    assert page.count("<style>") == page.count("<script>") == 1
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


def test_the_page_of_a_server_draws_what_it_did(browser):
    with served(make_app(Batcher(Recorder(), deadline_ms=5000))) as address:
        page = browser.open(address)
        for item in range(20):
            httpx.post(address, content=str(item))
        page.wait("document.querySelector('td[data-name=\"per batch\"]')?.textContent === '1.0'")
        assert page.value("document.querySelectorAll('#charts svg').length") == 7
        assert "due within 5000 ms" in page.value("document.getElementById('about').textContent")
        assert page.value("document.getElementById('load').checkVisibility()") is False
        assert page.value("document.querySelector('td[data-name=\"padding\"]').textContent") == "0 %"
        assert page.value("document.querySelector('#charts .line').getAttribute('d')").startswith("M")
        # No line can leave its plot, and every chart has a clip path of its own.
        assert page.value("[...document.querySelectorAll('#charts .line')].every((it) => it.closest('[clip-path]'))")
        assert page.value("new Set([...document.querySelectorAll('#charts clipPath')].map((it) => it.id)).size") == 7
        assert page.problems() == []


def test_failed_requests_have_a_column_and_a_plot_and_models_a_row_each(browser):
    app = make_app({"double": Batcher(Recorder(bad=range(100)), deadline_ms=50), "rank": Batcher(Recorder())})
    with served(app) as address:
        page = browser.open(address)
        for item in range(20):
            httpx.post(f"{address}/v1/{'double' if item % 2 else 'rank'}", content=str(item))
        page.wait("document.querySelector('td.bad[data-name=\"failed\"]') !== null")
        names = page.value("[...document.querySelectorAll('tbody td:first-child')].map((it) => it.textContent)")
        assert names == ["double", "rank"]
        assert page.value("document.querySelector('figcaption[data-key=failed]').textContent").startswith("Failed")
        assert page.value("document.getElementById('about').textContent") == "Every model has its own deadline."
        assert page.problems() == []


def eventually(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.05)


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
        page.wait("document.querySelectorAll('#charts .mark').length >= 18")
        eventually(lambda: demo.rate == 33)  # the server may be busy with the load it has
        assert page.problems() == []
        assert page.screenshot(tmp_path / "page.png").stat().st_size > 10_000


def test_a_phone_needs_no_sideways_scrolling(browser, demo):
    with served(make_demo_app(demo)) as address:
        page = browser.open(address, width=390, height=800, dark=True)
        assert page.value("document.documentElement.scrollWidth") == 390


def test_a_server_that_has_gone_is_said_to_be_gone(browser):
    with served(make_app(Batcher(Recorder()))) as address:
        page = browser.open(address)
        assert page.value("document.getElementById('state').textContent") == ""
    page.wait("document.getElementById('state').textContent.includes('does not answer')")
