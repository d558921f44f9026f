"""The HTTP app: every status, cancellation, limits, and a real server that is told to end."""

import asyncio
import contextlib
import json
import math
import re
import signal
import subprocess
import sys

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, MissingDependencyError
from batchwright.serve import Batcher, LatencyModel, batched
from batchwright.serve.http import make_app
from batchwright.serve.http._answering import decode_json, encode_json, read_number
from batchwright.serve.http._errors import Refused
from batchwright.serve.settings import as_deadline

from ..tools import Recorder, call_and_leave


def run(coroutine):
    """Run a coroutine; a hang is a failure after 30 seconds."""
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def post(batcher, content, *, headers=None, **options):
    """Return the response to one request."""

    async def main():
        async with client_of(make_app(batcher, **options)) as client:
            response = await client.post("/", content=content, headers=headers)
        await batcher.close()
        return response

    return run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


def test_one_item_comes_in_and_its_answer_goes_out():
    response = post(Batcher(Recorder()), "21")
    assert (response.status_code, response.json()) == (200, 42)
    assert response.headers["content-type"] == "application/json"


def test_requests_at_the_same_time_share_batches():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder)
        async with client_of(make_app(batcher)) as client:
            tasks = [asyncio.create_task(client.post("/", content=str(item))) for item in range(9)]
            await until(lambda: batcher.stats().num_submitted == 9)
            recorder.gate.set()
            answers = [response.json() for response in await asyncio.gather(*tasks)]
        await batcher.close()
        assert answers == [2 * item for item in range(9)]
        assert batcher.stats().num_batches < 9

    run(main())


def test_a_batched_function_can_be_served():
    @batched(max_items=4)
    def shout(texts):
        return [text.upper() for text in texts]

    async def main():
        async with client_of(make_app(shout)) as client:
            return await client.post("/", json="hello")

    assert run(main()).json() == "HELLO"


def test_what_is_no_batcher_is_refused():
    with pytest.raises(ArgumentError, match="takes a Batcher or a function under @batched"):
        make_app(print)


def test_the_front_can_be_imported_without_the_packages_of_the_extra():
    code = "import sys; sys.modules.update(starlette=None, prometheus_client=None); import batchwright.serve.http"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["starlette", "prometheus_client"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingDependencyError, match=re.escape(f"{package} is not installed; run: pip install 'batchwright[serve]'")
    ):
        make_app(Batcher(Recorder()))


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"NaN", b"[" * 100_000, b"1 2"])
def test_a_body_that_is_no_json_is_a_bad_request(body):
    recorder = Recorder()
    response = post(Batcher(recorder), body)
    assert response.status_code == 400
    assert "the body cannot be read" in response.json()["message"]
    assert recorder.calls == []


def test_a_text_without_quotes_is_told_how_texts_are_sent():
    message = post(Batcher(Recorder()), b"one text").json()["message"]
    assert message == 'the body cannot be read: not JSON: Expecting value; a text needs its quotes, such as "one text"'


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Deadline-Ms", "soon"),
        ("X-Deadline-Ms", "0"),
        ("X-Deadline-Ms", "1_000"),
        ("X-Deadline-Ms", "nan"),
        ("X-Priority", "11"),
    ],
)
def test_a_header_that_cannot_be_used_is_a_bad_request_and_named(name, value):
    response = post(Batcher(Recorder()), "1", headers={name: value})
    assert response.status_code == 400
    assert name in response.json()["message"]


def test_a_body_over_the_limit_is_refused_and_one_at_the_limit_is_not():
    # "12345" has five bytes, "123456" six.
    assert post(Batcher(Recorder()), "12345", max_body_bytes=5).status_code == 200
    assert post(Batcher(Recorder()), "123456", max_body_bytes=5).status_code == 413


def test_a_body_over_the_limit_is_refused_where_its_length_is_not_named():
    sent = []

    async def endless():
        while True:
            sent.append(1)
            yield b"1" * 10
            await asyncio.sleep(0)

    response = post(Batcher(Recorder()), endless(), max_body_bytes=95)
    assert response.status_code == 413
    # Ten chunks of ten are the first to be over 95 bytes; no more than the next is asked for.
    assert len(sent) <= 11


def test_a_bad_item_fails_alone_with_its_own_error():
    async def main():
        recorder = Recorder(held=True, bad=[3])
        batcher = Batcher(recorder)
        async with client_of(make_app(batcher)) as client:
            tasks = [asyncio.create_task(client.post("/", content=str(item))) for item in range(5)]
            await until(lambda: batcher.stats().num_submitted == 5)
            recorder.gate.set()
            responses = await asyncio.gather(*tasks)
        await batcher.close()
        return responses

    responses = run(main())
    assert [response.status_code for response in responses] == [200, 200, 200, 422, 200]
    assert responses[3].json() == {"error": "ValueError", "message": "bad item 3"}


def test_an_item_over_max_tokens_is_unprocessable():
    response = post(Batcher(list, length_of=len, max_tokens=3), '"four"')
    assert (response.status_code, response.json()["error"]) == (422, "TooLarge")


def test_an_item_that_cannot_be_measured_is_unprocessable():
    response = post(Batcher(list, length_of=len), "7")
    assert (response.status_code, response.json()["error"]) == (422, "TypeError")


def test_a_function_that_loses_results_is_at_fault_itself():
    response = post(Batcher(lambda items: []), "7")
    assert (response.status_code, response.json()["error"]) == (500, "ResultError")


@pytest.mark.parametrize("answer", [object(), math.nan, {1: {2, 3}}])
def test_an_answer_that_is_no_json_is_the_functions_fault(answer):
    response = post(Batcher(lambda items: [answer] * len(items)), "7")
    assert response.status_code == 500
    assert "the answer cannot be written" in response.json()["message"]


def test_arrays_are_answered_as_lists():
    vectors = Batcher(lambda items: list(np.array([[1.5, 2.0]] * len(items), dtype=np.float32)))
    assert post(vectors, "7").json() == [1.5, 2.0]


def test_other_formats_can_be_read_and_written():
    batcher = Batcher(lambda texts: [text[::-1] for text in texts])
    response = post(batcher, b"abc", decode=bytes.decode, encode=str.encode, media_type="text/plain")
    assert response.text == "cba"
    assert response.headers["content-type"].startswith("text/plain")


def test_a_full_queue_asks_to_come_again():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder, max_queue=1)
        async with client_of(make_app(batcher)) as client:
            running = asyncio.create_task(client.post("/", content="1"))
            await asyncio.to_thread(recorder.started.wait, 30)
            waiting = asyncio.create_task(client.post("/", content="2"))
            await until(lambda: batcher.stats().num_waiting == 1)
            refused = await client.post("/", content="3")
            recorder.gate.set()
            assert [(await task).json() for task in (running, waiting)] == [2, 4]
        await batcher.close()
        return refused

    refused = run(main())
    assert (refused.status_code, refused.json()["error"]) == (429, "QueueFull")
    assert int(refused.headers["Retry-After"]) >= 1


def test_a_deadline_that_cannot_be_met_is_answered_with_the_predicted_finish():
    # A call takes 200 ms by the model, 50 ms are allowed.
    batcher = Batcher(Recorder(), time_model=LatencyModel.fixed(0.2))
    response = post(batcher, "1", headers={"X-Deadline-Ms": "50"})
    body = response.json()
    assert (response.status_code, body["error"]) == (504, "DeadlineExceeded")
    assert body["deadline_ms"] == pytest.approx(50)
    assert body["predicted_ms"] == pytest.approx(body["waited_ms"] + 200)


def test_a_priority_is_handed_on():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder, max_items=1)
        async with client_of(make_app(batcher)) as client:
            tasks = [asyncio.create_task(client.post("/", content="0"))]
            await asyncio.to_thread(recorder.started.wait, 30)
            for item, priority in ((1, "0"), (2, "4")):
                tasks.append(asyncio.create_task(client.post("/", content=str(item), headers={"X-Priority": priority})))
                await until(lambda item=item: batcher.stats().num_waiting == item)
            recorder.gate.set()
            await asyncio.gather(*tasks)
        await batcher.close()
        return recorder.items_run

    assert run(main()) == [0, 2, 1]


def test_a_closed_batcher_is_unavailable():
    async def main():
        batcher = Batcher(Recorder())
        await batcher.close()
        async with client_of(make_app(batcher)) as client:
            return [await client.post("/", content="1"), *[await client.get(path) for path in ("/readyz", "/healthz")]]

    responses = run(main())
    assert [response.status_code for response in responses] == [503, 503, 503]
    assert [response.json()["message"] for response in responses[1:]] == ["draining", "the batcher is closed"]


def test_a_server_is_ready_when_it_says_so():
    async def main():
        loaded = []
        async with client_of(make_app(Batcher(Recorder()), ready=lambda: bool(loaded))) as client:
            before = await client.get("/readyz")
            loaded.append(True)
            return before.status_code, (await client.get("/readyz")).status_code

    assert run(main()) == (503, 200)


def test_an_app_without_a_page_has_none():
    async def main():
        async with client_of(make_app(Batcher(Recorder()), page=False)) as client:
            return [(await client.get(path)).status_code for path in ("/", "/live", "/healthz")]

    assert run(main()) == [405, 404, 200]


def test_a_client_that_goes_away_while_it_waits_is_never_run():
    async def main():
        recorder, leave = Recorder(held=True), asyncio.Event()
        batcher = Batcher(recorder)
        app = make_app(batcher)
        first = asyncio.create_task(batcher.submit(1))
        await asyncio.to_thread(recorder.started.wait, 30)
        second = asyncio.create_task(call_and_leave(app, "/", b"2", leave))
        await until(lambda: batcher.stats().num_waiting == 1)
        leave.set()
        assert await second == 499
        assert batcher.stats().num_cancelled == 1
        recorder.gate.set()
        assert await first == 2
        await batcher.close()
        return recorder.items_run

    assert run(main()) == [1]


def test_the_end_of_the_app_answers_what_was_taken_and_closes_the_batcher():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder)
        app = make_app(batcher)
        async with app.router.lifespan_context(app):
            tasks = [asyncio.create_task(batcher.submit(item)) for item in range(20)]
            await until(lambda: batcher.stats().num_submitted == 20)
            asyncio.get_running_loop().call_later(0.05, recorder.gate.set)
        assert await asyncio.gather(*tasks) == [2 * item for item in range(20)]
        assert not batcher.is_open

    run(main())


SERVER = """
import sys, time
import uvicorn
from batchwright.serve import Batcher
from batchwright.serve.http import make_app

def double(items):
    time.sleep(0.05)
    return [2 * item for item in items]

uvicorn.run(make_app(Batcher(double, max_items=4)), host="127.0.0.1", port=0, log_level="info")
"""


@contextlib.contextmanager
def served(command):
    """Run a server and yield its process and address, which uvicorn writes when it listens."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield process, found[0]
                break
        else:
            pytest.fail("the server did not start")
    finally:
        process.kill()
        process.communicate()


def test_sigterm_under_load_answers_every_request_that_was_taken():
    async def main(process, address):
        async with httpx.AsyncClient(base_url=address, timeout=30) as client:
            tasks = [asyncio.create_task(client.post("/", content=str(item))) for item in range(60)]
            # 60 requests are 15 batches of 50 ms; the first answers show that the server is in the midst of it.
            await until(lambda: sum(task.done() for task in tasks) >= 8)
            live = (await client.get("/live")).json()["arms"][0]
            process.send_signal(signal.SIGTERM)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        return live["asked"], ends

    with served([sys.executable, "-c", SERVER]) as (process, address):
        num_taken, ends = run(main(process, address))
        process.wait(timeout=30)
    assert num_taken == 60
    assert [end.json() for end in ends] == [2 * item for item in range(60)]


def test_a_client_of_a_real_server_that_hangs_up_cancels_its_requests():
    async def main(address):
        async with httpx.AsyncClient(base_url=address, timeout=30) as client:
            async with httpx.AsyncClient(base_url=address, timeout=30) as other:
                tasks = [asyncio.create_task(other.post("/", content=str(item))) for item in range(40)]
                await until(lambda: any(task.done() for task in tasks))
                for task in tasks:
                    task.cancel()
            # Ten batches without the cancellation; fewer calls with it.
            while "batchwright_queue_requests 0.0" not in (text := (await client.get("/metrics")).text):
                await asyncio.sleep(0.01)
        return float(re.search(r'batchwright_ended_requests_total{end="cancelled"} (\S+)', text)[1])

    with served([sys.executable, "-c", SERVER]) as (_, address):
        assert run(main(address)) > 0


def test_errors_are_json_with_the_kind_and_the_message():
    body = json.loads(post(Batcher(Recorder()), b"{").content)
    assert body["error"] == "BadRequest"
    assert sorted(body) == ["error", "message"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON_VALUES)
def test_every_json_value_comes_through_unchanged(value):
    assert decode_json(encode_json(value)) == value


@given(st.text() | st.floats().map(str))
def test_a_header_is_a_usable_number_or_refused(text):
    status = []
    try:
        assert read_number("X-Deadline-Ms", text, as_deadline) > 0
    except Refused as error:
        status.append(error.status)
    assert status in ([], [400])


def fail_with_the_item(texts):
    raise ValueError(f"cannot read {texts[0]}")


@pytest.mark.parametrize(("function", "status"), [(list, 200), (fail_with_the_item, 422)])
def test_half_of_a_character_pair_comes_back_as_it_went_in(function, status):
    response = post(Batcher(function), b'"\\ud800"')
    assert response.status_code == status
    assert b"\\ud800" in response.content


def test_a_message_that_quotes_a_large_item_is_cut():
    response = post(Batcher(fail_with_the_item), json.dumps("x" * 50_000))
    assert response.json()["message"].startswith("cannot read xxx")
    assert len(response.content) < 3000
