"""Deployments on a real Ray: answers, refusals, settings, HTTP and the end of a replica."""

import asyncio
import json
import pickle
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from batchwright.errors import ArgumentError
from batchwright.integrations.ray import batched_deployment
from batchwright.integrations.ray.deployment import import_serve, make_replica
from batchwright.serve import Closed, DeadlineExceeded, QueueFull, ResultError, TooLarge

serve = import_serve()

USER_CONFIG = {"max_items": 32, "greeting": "hello"}


class Gated:
    """Answers with the item, the size of its batch, the greeting and the call; waits while the gate is shut."""

    def __init__(self, gate):
        self.gate, self.greeting, self.num_calls = gate, None, 0

    def reconfigure(self, config):
        self.greeting = config.get("greeting")

    def __call__(self, items):
        while self.gate.exists():
            time.sleep(0.002)
        if "bad" in items:
            raise KeyError("bad")
        self.num_calls += 1
        return [[item, len(items), self.greeting, self.num_calls] for item in items]


async def double(items):
    await asyncio.sleep(0)
    return [np.array([item, item]) for item in items]


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("ray") / "gate"


@pytest.fixture(scope="module")
def deployment():
    options = {"graceful_shutdown_wait_loop_s": 0.1, "ray_actor_options": {"num_cpus": 0.1}}
    options["user_config"] = USER_CONFIG
    return batched_deployment(Gated, max_items=8, length_of=len, max_tokens=1000, deployment_options=options)


@pytest.fixture(scope="module")
def app(address, deployment, gate):
    return serve.run(deployment.bind(gate), name="gated", route_prefix="/gated")


@pytest.fixture
def shut(gate):
    """Shut the gate; a test opens it, and at the latest its end does."""
    gate.touch()
    yield gate
    gate.unlink(missing_ok=True)


def wait_until(app, **wanted):
    """Wait until the replica's figures are these."""
    for _ in range(1000):
        stats = app.stats.remote().result(timeout_s=30)
        if all(stats[name] == value for name, value in wanted.items()):
            return
        time.sleep(0.01)
    raise AssertionError(f"waited for {wanted}, it is {stats}")


def send_after_first(app, items, **options):
    """Send one item to the shut gate and the others after it; return the answers to those."""
    first = app.remote("first")
    wait_until(app, num_running=1)
    answers = [app.remote(item, **options) for item in items]
    wait_until(app, num_waiting=len(items))
    return first, answers


def test_requests_that_wait_together_share_a_batch_and_each_has_its_own_answer(app, shut):
    items = [f"item {index}" for index in range(20)]
    first, answers = send_after_first(app, items)
    shut.unlink()
    assert first.result()[:2] == ["first", 1]
    # All 20 wait when the worker becomes free, and 32 fit: one batch.
    assert [answer.result()[:2] for answer in answers] == [[item, 20] for item in items]


def test_a_bad_item_fails_alone(app, shut):
    _, answers = send_after_first(app, ["a", "bad", "b"])
    shut.unlink()
    assert [answers[index].result()[0] for index in (0, 2)] == ["a", "b"]
    with pytest.raises(KeyError, match="bad"):
        answers[1].result()


def test_a_missed_deadline_reaches_the_caller_as_itself(app, shut):
    first, _ = send_after_first(app, [])
    with pytest.raises(DeadlineExceeded, match="deadline") as caught:
        app.remote("late", deadline_ms=40).result(timeout_s=30)
    assert caught.value.deadline_seconds == pytest.approx(0.04)
    shut.unlink()
    assert first.result()[0] == "first"


def test_an_item_over_the_limit_is_refused_to_its_caller(app):
    with pytest.raises(TooLarge, match="1001"):
        app.remote("x" * 1001).result()


def test_a_wrong_option_of_a_request_is_refused_to_its_caller(app):
    with pytest.raises(ArgumentError, match="priority must be"):
        app.remote("x", priority=11).result()


def test_a_full_queue_refuses_the_next_request(app, shut):
    app.broadcast("reconfigure", {**USER_CONFIG, "max_queue": 2}).results()
    first, answers = send_after_first(app, ["a", "b"])
    with pytest.raises(QueueFull):
        app.remote("c").result()
    shut.unlink()
    assert [answer.result()[0] for answer in (first, *answers)] == ["first", "a", "b"]
    app.broadcast("reconfigure", USER_CONFIG).results()


def test_a_cancelled_request_is_not_run(app, shut):
    first, answers = send_after_first(app, ["a", "bad"])
    cancelled = app.stats.remote().result()["num_cancelled"]
    answers[1].cancel()
    wait_until(app, num_cancelled=cancelled + 1)
    shut.unlink()
    # Were it run, the call of both would fail first, and "a" be answered by the second.
    assert answers[0].result()[3] == first.result()[3] + 1


def test_user_config_changes_a_running_replica_and_what_it_leaves_out_goes_back(app, gate):
    # {}: max_items as in the options, 8.
    for config, size, greeting in (({"max_items": 4, "greeting": "ciao"}, 4, "ciao"), ({}, 8, None)):
        app.broadcast("reconfigure", config).results()
        gate.touch()
        _, answers = send_after_first(app, [f"item {index}" for index in range(8)])
        gate.unlink()
        assert {tuple(answer.result()[1:3]) for answer in answers} == {(size, greeting)}
    app.broadcast("reconfigure", USER_CONFIG).results()


def test_what_user_config_cannot_hold_is_refused_and_changes_nothing(app):
    with pytest.raises(ArgumentError, match="max_items must be"):
        app.reconfigure.remote({"max_items": 0, "greeting": "ciao"}).result()
    assert app.remote("x").result()[2] == "hello"


def test_the_urgent_go_first(app, shut):
    app.broadcast("reconfigure", {**USER_CONFIG, "max_items": 1}).results()
    first, answers = send_after_first(app, ["patient"] * 4, priority=-10)
    urgent = app.remote("urgent", priority=10)
    wait_until(app, num_waiting=5)
    shut.unlink()
    # One at a time: the urgent one came last and runs next after what ran already.
    assert urgent.result()[3] == first.result()[3] + 1
    assert sorted(answer.result()[3] - first.result()[3] for answer in answers) == [2, 3, 4, 5]
    app.broadcast("reconfigure", USER_CONFIG).results()


def post(url, body, **headers):
    """Return the status and what the JSON says."""
    request = urllib.request.Request(url, data=body.encode(), headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_an_item_over_http_is_json_both_ways(app, address):
    assert post(f"{address}/gated", '"straße"')[1][0] == "straße"


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        ("{", {}, 400, "one item as JSON"),
        ('"x"', {"X-Priority": "high"}, 400, "X-Priority must be a number"),
        (json.dumps("x" * 1001), {}, 413, "1001"),
    ],
)
def test_what_is_refused_over_http_has_a_status_and_a_reason(app, address, body, headers, status, words):
    answer = post(f"{address}/gated", body, **headers)
    assert answer[0] == status
    assert words in answer[1]["message"]


def test_an_error_of_the_item_is_a_500_over_http(app, address):
    with pytest.raises(urllib.error.HTTPError, match="500") as caught:
        urllib.request.urlopen(f"{address}/gated", data=b'"bad"', timeout=30)
    caught.value.close()


def test_a_missed_deadline_over_http_is_a_504(app, address, shut):
    first, _ = send_after_first(app, [])
    status, answer = post(f"{address}/gated", '"late"', **{"X-Deadline-Ms": "40"})
    assert (status, answer["error"]) == (504, "DeadlineExceeded")
    shut.unlink()
    first.result()


def test_an_async_function_may_answer_with_arrays(address):
    app = serve.run(batched_deployment(double).bind(), name="double", route_prefix="/d")
    assert app.remote(3).result().tolist() == [3, 3]
    assert post(f"{address}/d", "4") == (200, [4, 4])
    serve.delete("double", _blocking=False)


def test_a_replica_that_is_stopped_answers_what_it_has_taken(app, shut):
    first, answers = send_after_first(app, ["a", "b"])
    serve.delete("gated", _blocking=False)
    wait_for_stop("gated")
    shut.unlink()
    assert [answer.result()[0] for answer in (first, *answers)] == ["first", "a", "b"]


def wait_for_stop(name):
    for _ in range(1000):
        application = serve.status().applications.get(name)
        if application is None or application.status == "DELETING":
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} was not stopped")


@pytest.mark.parametrize("kind", [Closed, QueueFull, ResultError, TooLarge, DeadlineExceeded])
def test_errors_survive_the_way_between_processes(kind):
    error = kind("why")
    error.predicted_seconds = 0.5
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (kind, "why", vars(error))


def test_the_queue_is_in_the_replica():
    deployment = batched_deployment(Gated, max_items=8, max_queue=100, num_workers=2)
    assert (deployment.name, deployment.max_ongoing_requests) == ("Gated", 116)  # 100 wait, 2 × 8 run
    given = batched_deployment(double, deployment_options={"max_ongoing_requests": 7, "name": "other"})
    assert (given.name, given.max_ongoing_requests) == ("other", 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_items": 0}, "max_items must be"),
        ({"deployment_options": {"user_config": {"max_item": 3}}}, "has max_item; allowed are"),
        ({"deployment_options": {"user_config": {"max_items": 0}}}, "max_items must be"),
        ({"deployment_options": {"user_config": [3]}}, "must be a dict"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_deployed(options, words):
    with pytest.raises(ArgumentError, match=words):
        batched_deployment(double, **options)


def test_a_replica_is_healthy_until_it_has_ended():
    replica = make_replica(double, {})()
    asyncio.run(replica.check_health())
    replica.__del__()
    with pytest.raises(Closed, match="has ended"):
        asyncio.run(replica.check_health())
