"""What a browser could be made to send, headers beyond the limits, and errors of one shape."""

import asyncio

import httpx
import pytest

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher
from batchwright.serve.http import Limits, make_app

from ..tools import Recorder


def ask(method, path, headers=None, *, content=None, base="http://model.example", **options):
    """Return the response to one request."""

    async def main():
        batcher = Batcher(Recorder())
        transport = httpx.ASGITransport(make_app(batcher, **options), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            response = await client.request(method, path, headers=headers, content=content)
        await batcher.close()
        return response

    return asyncio.run(asyncio.wait_for(main(), 30))


def error_of(response):
    body = response.json()
    assert set(body) >= {"error", "message"}
    return response.status_code, body["error"]


# Host


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "192.168.7.5", "model.example"]
)
def test_hosts_that_cannot_be_rebound_or_are_allowed_are_answered(host):
    assert ask("POST", "/", {"Host": host}, content="1", allow_hosts=["model.example"]).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[evil]"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/"), ("GET", "/"), ("GET", "/live"), ("GET", "/nowhere")])
def test_other_hosts_are_refused_on_every_path(host, method, path):
    response = ask(method, path, {"Host": host}, content="1", allow_hosts=["model.example"])
    assert error_of(response) == (400, "HostNotAllowed")


@pytest.mark.parametrize(
    ("host", "status"), [("a.model.example", 200), ("model.example", 400), ("amodel.example", 400)]
)
def test_a_star_stands_for_all_names_below_one(host, status):
    assert ask("POST", "/", {"Host": host}, content="1", allow_hosts=["*.model.example"]).status_code == status


def test_an_app_that_names_no_hosts_answers_to_all_and_a_star_does_too():
    assert ask("POST", "/", {"Host": "any.example"}, content="1").status_code == 200
    assert ask("POST", "/", {"Host": "any.example"}, content="1", allow_hosts="*").status_code == 200


# Other sites


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://model.example"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://model.example"},
        {"Origin": "https://model.example", "Host": "model.example"},  # a proxy took the encryption off
        {"Origin": "http://model.example:8000", "Host": "MODEL.example:8000"},
    ],
)
def test_a_post_of_the_own_page_or_of_no_browser_is_answered(headers):
    assert ask("POST", "/", headers, content="1").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://other.model.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://model.example:8001"},
        {"Origin": "null"},
        {"Origin": "http://model.example.evil.example"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/batch"])
def test_a_post_of_another_site_is_refused_and_nothing_runs(headers, path):
    assert error_of(ask("POST", path, headers, content="1")) == (403, "CrossSite")


def test_an_allowed_site_may_send_and_read():
    app = {"allow_origins": ["https://app.example"]}
    headers = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
    answer = ask("POST", "/", headers, content="21", **app)
    assert (answer.status_code, answer.json()) == (200, 42)
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    asked = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-deadline-ms"}
    before = ask("OPTIONS", "/", asked, **app)
    assert before.status_code == 204
    assert "X-Deadline-Ms" in before.headers["Access-Control-Allow-Headers"]
    other = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert error_of(ask("OPTIONS", "/", other, **app)) == (403, "CrossSite")
    assert "Access-Control-Allow-Origin" not in ask("GET", "/live", {"Origin": "https://evil.example"}, **app).headers


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://App.example", "ftp://app.example", ""]
)
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ArgumentError, match=r"is not an origin|must hold names"):
        make_app(Batcher(Recorder()), allow_origins=[origin])


def test_the_page_cannot_be_framed_and_nothing_can_be_embedded():
    page = ask("GET", "/")
    policy = page.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert (page.headers["X-Frame-Options"], page.headers["Referrer-Policy"]) == ("DENY", "no-referrer")
    assert page.headers["Cross-Origin-Opener-Policy"] == "same-origin"
    for response in (page, ask("GET", "/live"), ask("POST", "/", content="1"), ask("GET", "/nowhere")):
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"


# Headers


def test_too_many_or_too_large_headers_are_refused():
    # httpx sends five of its own: host, accept, accept-encoding, connection, user-agent.
    many = {f"x-{number}": "1" for number in range(20)}
    limits = Limits(max_headers=25, max_header_bytes=1000)
    assert ask("GET", "/healthz", many, limits=limits).status_code == 200
    assert error_of(ask("GET", "/healthz", {**many, "x-20": "1"}, limits=limits)) == (431, "HeadersTooLarge")
    assert error_of(ask("GET", "/healthz", {"x": "1" * 1000}, limits=limits)) == (431, "HeadersTooLarge")


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [("X-Deadline-Ms", "2000", "2001"), ("X-Deadline-Ms", "1999", "inf"), ("X-Priority", "2", "3")],
)
def test_clients_ask_for_no_more_than_they_may(name, allowed, refused):
    limits = Limits(max_deadline_ms=2000, max_priority=2)
    assert ask("POST", "/", {name: allowed}, content="1", limits=limits).status_code == 200
    response = ask("POST", "/", {name: refused}, content="1", limits=limits)
    assert error_of(response) == (400, "BadRequest")
    assert f"{name} must be at most" in response.json()["message"]


def test_the_defaults_leave_out_what_only_the_owner_should_ask_for():
    statuses = [ask("POST", "/", {"X-Priority": str(priority)}, content="1").status_code for priority in (-10, 4, 5)]
    assert statuses == [200, 200, 400]
    assert ask("POST", "/", {"X-Deadline-Ms": "inf"}, content="1").status_code == 400


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_items": 0}, "max_items"),
        ({"max_priority": 11}, "max_priority"),
        ({"body_seconds": 0}, "body_seconds"),
        ({"header_seconds": float("inf")}, "header_seconds"),
        ({"max_connections": 0}, "max_connections"),
        ({"max_deadline_ms": -1}, "max_deadline_ms"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options, name):
    with pytest.raises(ArgumentError, match=name):
        Limits(**options)


# One shape


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "NotFound"),
        ("PUT", "/", 405, "MethodNotAllowed"),
        ("GET", "/batch", 405, "MethodNotAllowed"),
    ],
)
def test_paths_and_methods_that_are_not_served_are_json_too(method, path, status, kind):
    response = ask(method, path)
    assert error_of(response) == (status, kind)
    assert set(response.json()) == {"error", "message"}
    assert (status == 405) == ("Allow" in response.headers)


def test_a_path_that_is_not_served_names_those_that_are():
    message = ask("GET", "/nowhere").json()["message"]
    assert message == "GET /nowhere: nothing is served here; send items by POST to /, /batch"
    assert ask("PUT", "/").json()["message"] == "PUT /: Method Not Allowed; send items by POST to /, /batch"


def test_a_mistake_of_the_app_is_json_and_says_nothing_of_its_inside():
    def fail():
        raise RuntimeError("a secret")

    response = ask("GET", "/readyz", ready=fail)
    assert error_of(response) == (500, "ServerError")
    assert "secret" not in response.text


@pytest.mark.parametrize("body", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "[1, 1e400]", '{"a": NaN}'])
@pytest.mark.parametrize("path", ["/", "/batch"])
def test_numbers_that_no_float_holds_are_refused(body, path):
    assert error_of(ask("POST", path, content=body)) == (400, "BadRequest")
