"""Several items in one request, and several models behind one app."""

import asyncio
import gc

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher, batched
from batchwright.serve.http import Limits, make_app

from .. import in_processes
from ..tools import ROOT, Recorder, call_and_leave


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def client_of(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def post(batcher, path, **request):
    options = request.pop("options", {})

    async def main():
        async with client_of(make_app(batcher, **options)) as client:
            return await client.post(path, **request)

    return run(main())


# Several items


def test_several_items_are_answered_in_order_each_with_its_own_result_or_error():
    response = post(Batcher(Recorder(bad=[3])), "/batch", json=[5, 3, 1])
    assert response.status_code == 200
    assert response.json() == [
        {"result": 10},
        {"error": "ValueError", "message": "bad item 3", "status": 422},
        {"result": 2},
    ]


def test_several_items_share_batches():
    batcher = Batcher(Recorder())
    post(batcher, "/batch", json=list(range(64)))
    assert batcher.stats().num_answered == 64
    assert batcher.stats().num_batches < 64


def test_no_items_have_no_answers():
    assert post(Batcher(Recorder()), "/batch", json=[]).json() == []


def test_an_item_may_itself_be_a_list():
    assert post(Batcher(list), "/batch", json=[[1, 2], [3]]).json() == [{"result": [1, 2]}, {"result": [3]}]


@pytest.mark.parametrize("body", ['"text"', '{"a": 1}', "3", "[1", ""])
def test_what_is_no_list_is_refused(body):
    response = post(Batcher(Recorder()), "/batch", content=body)
    assert (response.status_code, response.json()["error"]) == (400, "BadRequest")


def test_more_items_than_allowed_are_refused():
    options = {"limits": Limits(max_items=3)}
    assert post(Batcher(Recorder()), "/batch", json=[1, 2, 3], options=options).status_code == 200
    response = post(Batcher(Recorder()), "/batch", json=[1, 2, 3, 4], options=options)
    assert (response.status_code, response.json()["error"]) == (413, "TooManyItems")


def test_an_answer_that_cannot_be_written_is_the_error_of_its_item():
    response = post(Batcher(lambda items: [object() if item == 1 else item for item in items]), "/batch", json=[0, 1])
    assert response.json()[0] == {"result": 0}
    assert (response.json()[1]["status"], response.json()[1]["error"]) == (500, "AnswerError")


def test_formats_of_ones_own_read_and_write_every_item():
    def decode(body):
        if body == b"7":
            raise ValueError("seven is not read")
        return int(body) + 1

    response = post(
        Batcher(Recorder()),
        "/batch",
        json=[1, 7],
        options={"decode": decode, "encode": lambda answer: b"[%d]" % answer},
    )
    assert response.json()[0] == {"result": [4]}
    assert (response.json()[1]["status"], response.json()[1]["error"]) == (400, "BadRequest")


def test_a_format_that_is_not_json_has_no_requests_of_several():
    options = {"decode": bytes.decode, "encode": str.encode, "media_type": "text/plain"}
    assert post(Batcher(list), "/batch", json=["a"], options=options).status_code == 404


def test_several_items_that_are_all_refused_are_one_refusal():
    batcher = Batcher(Recorder())
    batcher.close_sync()
    response = post(batcher, "/batch", json=[1, 2])
    assert (response.status_code, response.json()["error"]) == (503, "Closed")


def test_items_that_find_no_place_are_refused_and_the_others_answered():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder, max_queue=2)
        async with client_of(make_app(batcher)) as client:
            first = asyncio.create_task(client.post("/", json=0))
            await asyncio.to_thread(recorder.started.wait, 30)
            several = asyncio.create_task(client.post("/batch", json=[1, 2, 3]))
            while batcher.stats().num_waiting < 2:
                await asyncio.sleep(0.002)
            full = await client.post("/batch", json=[4, 5])
            recorder.gate.set()
            await first
            return full, (await several).json()

    full, answers = run(main())
    assert (full.status_code, full.json()["error"]) == (429, "QueueFull")
    assert int(full.headers["Retry-After"]) >= 1
    assert answers[:2] == [{"result": 2}, {"result": 4}]
    assert (answers[2]["status"], answers[2]["error"]) == (429, "QueueFull")


def test_a_client_that_goes_away_cancels_all_its_items_and_leaves_nothing_in_the_log():
    reported = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        recorder, leave = Recorder(held=True), asyncio.Event()
        batcher = Batcher(recorder)
        first = asyncio.create_task(batcher.submit(0))
        await asyncio.to_thread(recorder.started.wait, 30)
        request = asyncio.create_task(call_and_leave(make_app(batcher), "/batch", b"[1, 2, 3]", leave))
        while batcher.stats().num_waiting < 3:
            await asyncio.sleep(0.002)
        leave.set()
        status = await request
        recorder.gate.set()
        await first
        await batcher.close()
        gc.collect()  # a future that is collected reports its error
        return status, recorder.items_run, batcher.stats().num_cancelled

    assert run(main()) == (499, [0], 3)
    assert reported == []


# Several models


class Scale:
    def __init__(self, factor):
        self.factor = factor

    @batched
    def run(self, numbers):
        return [self.factor * number for number in numbers]


def test_every_model_has_its_path():
    async def main():
        shout = Batcher(lambda texts: [text.upper() for text in texts])
        app = make_app({"double": Batcher(Recorder(bad=[3])), "shout": shout, "ten": Scale(10).run})
        gc.collect()  # the app keeps the object of a batched method
        async with client_of(app) as client:
            answers = [
                (await client.post("/v1/double", json=4)).json(),
                (await client.post("/v1/shout", json="a")).json(),
                (await client.post("/v1/ten", json=4)).json(),
                (await client.post("/v1/double/batch", json=[1, 3])).json()[0],
                (await client.get("/v1")).json(),
                (await client.post("/", json=1)).status_code,
                (await client.post("/v1/other", json=1)).json()["error"],
            ]
            live = (await client.get("/live")).json()
            metrics = (await client.get("/metrics")).text
            await shout.close()
            health, ready = await client.get("/healthz"), await client.get("/readyz")
        return answers, live, metrics, health, ready

    answers, live, metrics, health, ready = run(main())
    assert answers == [8, "A", 40, {"result": 2}, {"models": ["double", "shout", "ten"]}, 405, "NotFound"]
    assert [(arm["name"], arm["answered"], arm["failed"]) for arm in live["arms"]] == [
        ("double", 2, 1), ("shout", 1, 0), ("ten", 1, 0),
    ]  # fmt: skip
    families = {family.name: family for family in text_string_to_metric_families(metrics)}
    submitted = {sample.labels["model"]: sample.value for sample in families["batchwright_submitted_requests"].samples}
    assert submitted == {"double": 3, "shout": 1, "ten": 1}
    responses = {
        (sample.labels["model"], sample.labels["status"]): sample.value
        for sample in families["batchwright_http_responses"].samples
        if sample.name.endswith("_total")
    }
    assert responses == {("double", "200"): 2, ("shout", "200"): 1, ("ten", "200"): 1}
    assert (health.status_code, health.json()["message"]) == (503, "shout: the batcher is closed")
    assert ready.status_code == 503


def test_deadlines_that_differ_are_said_to_differ():
    async def main(**deadlines):
        app = make_app({name: Batcher(list, deadline_ms=deadline) for name, deadline in deadlines.items()})
        async with client_of(app) as client:
            live = (await client.get("/live")).json()
        return live["deadline_ms"], live["deadlines_differ"]

    assert run(main(a=50, b=50)) == (50, False)
    assert run(main(a=50, b=None)) == (None, True)


@pytest.mark.parametrize("name", ["", "a/b", "é", "a b", ".", 1])
def test_a_name_that_no_path_can_hold_is_refused(name):
    with pytest.raises(ArgumentError, match="a name of a batcher"):
        make_app({name: Batcher(list)})


def test_no_models_are_refused():
    with pytest.raises(ArgumentError, match="at least one batcher"):
        make_app({})


# Health


def test_a_batcher_that_failed_is_unhealthy_with_the_reason():
    async def main():
        batcher = Batcher(Recorder())
        async with client_of(make_app(batcher)) as client:
            before = await client.get("/healthz")
            # What a worker thread does at its own end; only a broken machine makes it.
            batcher._workers._core.crash(OSError("no clock"), 0.0)
            return before, await client.get("/healthz")

    before, after = run(main())
    assert (before.status_code, before.text) == (200, "ok\n")
    assert (after.status_code, after.json()["error"]) == (503, "ServiceUnavailable")
    assert "the batcher failed: OSError: no clock" in after.json()["message"]


def test_a_batcher_that_drains_is_healthy_until_it_has_answered():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder)
        async with client_of(make_app(batcher)) as client:
            first = asyncio.create_task(batcher.submit(1))
            await asyncio.to_thread(recorder.started.wait, 30)
            drained = asyncio.create_task(batcher.drain())
            await asyncio.sleep(0)
            during = [(await client.get(path)).status_code for path in ("/healthz", "/readyz")]
            recorder.gate.set()
            await asyncio.gather(first, drained)
            return during, (await client.get("/healthz")).status_code

    assert run(main()) == ([200, 503], 503)


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(("path", "body"), [("/", '"bad"'), ("/batch", '["good", "bad"]')])
def test_an_error_without_a_text_takes_no_answer_from_others(path, body):
    batcher = Batcher(lambda items: [Mute() if item == "bad" else item for item in items])
    response = post(batcher, path, content=body)
    failed = {"error": "Mute", "message": "an error whose text cannot be read"}
    if path == "/":
        assert (response.status_code, response.json()) == (422, failed)
    else:
        assert response.json() == [{"result": "good"}, {**failed, "status": 422}]


def test_a_length_of_thousands_of_digits_is_too_large():
    response = post(Batcher(list), "/", content="1", headers={"Content-Length": "9" * 5000})
    assert (response.status_code, response.json()["error"]) == (413, "BodyTooLarge")


def test_a_batcher_whose_process_cannot_start_is_unhealthy_with_the_reason(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))

    async def main():
        batcher = Batcher(in_processes.Obeying("raise"), worker="process")
        async with client_of(make_app(batcher)) as client:
            before = await client.get("/healthz")
            answer = await client.post("/", content="1")
            after = await client.get("/healthz")
        await batcher.close(drain=False)
        return before, answer, after

    before, answer, after = run(main())
    assert (before.status_code, answer.status_code, after.status_code) == (200, 500, 503)
    assert "could not start: ValueError: bad" in after.json()["message"]
