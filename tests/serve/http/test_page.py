"""The live page: its figures, and the page of a server and of the demo in a real browser without a network."""

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time

import httpx
import pytest
import uvicorn

from batchwright._charts.page import read_asset
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
        page.wait("document.getElementById('verdict').textContent === 'No request came in the last two seconds.'")
        for item in range(20):
            httpx.post(f"{address}/v1/{'double' if item % 2 else 'rank'}", content=str(item))
        page.wait(  # both at once: they are true for two seconds
            "document.querySelector('td.bad[data-name=\"failed\"]') !== null"
            "&& /raises errors for items at double/.test(document.getElementById('verdict').textContent)"
        )
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


def in_words(*points):
    """Return the sentence of the page for points of a few figures; what is not named is nothing."""
    shown = [{"asked": 10, "waiting": 0, "missed": 0, "failed": 0, "padding": None, **point} for point in points]
    names = ["one", "two", "three"][: len(points)] if len(points) > 1 else [""]
    function = re.search(
        r"^function inWords.*?^}", read_asset("batchwright.serve.http", "live/script.js"), re.M | re.S
    )[0]
    shared = read_asset("batchwright._charts", "svg.js")
    code = f"{shared}\n{function}\nconsole.log(inWords(...{json.dumps([names, shown])}))"
    return subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_page_says_in_words_what_its_figures_say():
    assert in_words({"asked": 0}) == "No request came in the last two seconds."
    assert in_words({}) == "10 requests per second. Nothing was late or refused in the last two seconds."
    assert in_words({"missed": 12.34}).endswith("late, given up or refused: 12.3 % at this server.")
    assert in_words({"failed": 1}).endswith(" The function raises errors for items at this server.")
    # Missing 0.04 % would be shown as 0.0 %.
    found = in_words({"missed": 0.04, "padding": 51}, {"padding": 6}, {"missed": 2, "padding": 26})
    assert found.startswith("Missed, which is late, given up or refused: 2.0 % at three.")
    assert found.endswith("Padding, work for nothing: 6 % at two, 26 % at three, 51 % at one.")


def test_a_phone_needs_no_sideways_scrolling(browser, demo):
    with served(make_demo_app(demo)) as address:
        page = browser.open(address, width=390, height=800, dark=True)
        assert page.value("document.documentElement.scrollWidth") == 390


def test_a_server_that_has_gone_is_said_to_be_gone(browser):
    with served(make_app(Batcher(Recorder()))) as address:
        page = browser.open(address)
        assert page.value("document.getElementById('state').textContent") == ""
    page.wait("document.getElementById('state').textContent.includes('does not answer')")
