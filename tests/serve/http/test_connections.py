"""Connections of a real server: slow, half-open and too many, over sockets of this machine."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import uvicorn

from batchwright.serve import Batcher
from batchwright.serve.http import limited_protocol, make_app
from batchwright.serve.http.connections import most_connections

# A server with a small limit on open files; "hold" waits until there is a file of that name.
SERVER = """
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
if sys.argv[2] == "asyncio":
    sys.modules["uvloop"] = None
from batchwright.cli import main
import batchwright.serve
sys.path.insert(0, str(Path(sys.argv[3]).parent))
sys.exit(main(["serve", "my_model:double", "--port", "0", *sys.argv[4:]]))
"""
MODEL = """
import time
from pathlib import Path

def double(items):
    while "hold" in items and not Path(__file__).with_name("go").exists():
        time.sleep(0.005)
    return [2 * item for item in items]
"""


@contextlib.contextmanager
def served(folder, *options, num_files=1024, loop="asyncio"):
    (folder / "my_model.py").write_text(MODEL)
    command = [sys.executable, "-c", SERVER, str(num_files), loop, str(folder / "my_model.py"), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    try:
        found = re.search(r":(\d+)/", process.stdout.readline())
        assert found, process.communicate(timeout=30)[1]
        yield int(found[1])
    finally:
        process.kill()
        process.communicate()


def connect(port, text):
    made = socket.create_connection(("127.0.0.1", port), timeout=30)
    made.sendall(text)
    return made


def read(connection):
    """Return the status and body of what the server sends until it closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def head(*lines):
    return "\r\n".join(("POST / HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


KINDS = {
    "silent": b"",
    "headers": head()[:-2] + b"X-Slow: ",
    "body": head("Content-Length: 100") + b"[",
    "refused": head("Origin: https://evil.example", "Content-Length: 100") + b"[",
}


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_open_requests_leave_room_for_good_clients(tmp_path, kind, loop):
    # 200 files are fewer than 260 connections.
    with served(tmp_path, num_files=200, loop=loop) as port, contextlib.ExitStack() as stack:
        for _ in range(260):
            stack.enter_context(connect(port, KINDS[kind]))
        for item in range(5):
            assert httpx.post(f"http://127.0.0.1:{port}", json=item, timeout=30).json() == 2 * item


def test_the_oldest_incomplete_request_goes_first_and_a_waiting_client_stays(tmp_path):
    with served(tmp_path, "--max-connections", "3") as port, contextlib.ExitStack() as stack:
        waiting = stack.enter_context(connect(port, head("Content-Length: 6") + b'"hold"'))
        oldest = stack.enter_context(connect(port, KINDS["headers"]))
        newer = stack.enter_context(connect(port, KINDS["headers"]))
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").text == "ok\n"
        assert oldest.recv(100) == b""
        newer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            newer.recv(100)
        (tmp_path / "go").touch()
        assert b"200 OK" in waiting.recv(100)


def test_a_connection_too_many_is_refused_where_every_client_waits_for_an_answer(tmp_path):
    with served(tmp_path, "--max-connections", "2") as port, contextlib.ExitStack() as stack:
        held = []
        for _ in range(2):
            held.append(stack.enter_context(connect(port, head("Content-Length: 6") + b'"hold"')))
            time.sleep(0.5)  # the server reads the request; asking it whether it has would take a connection
        status, body = read(stack.enter_context(connect(port, b"")))
        assert (status, body["error"]) == (503, "ServiceUnavailable")
        (tmp_path / "go").touch()
        assert [b"200 OK" in one.recv(100) for one in held] == [True, True]


def test_an_idle_connection_gives_way(tmp_path):
    with served(tmp_path, "--max-connections", "1") as port, httpx.Client() as idle:
        for client in (idle, httpx, idle):
            assert client.post(f"http://127.0.0.1:{port}", json=4).json() == 8


def test_slow_headers_are_cut_off_with_the_reason(tmp_path):
    with served(tmp_path, "--header-seconds", "0.3") as port:
        for kind in ("silent", "headers"):
            with connect(port, KINDS[kind]) as slow:
                status, body = read(slow)
            assert (status, body["error"]) == (408, "RequestTimeout")
        # On a connection that has had an answer too.
        with connect(port, head("Content-Length: 1") + b"4") as again:
            received = b""
            while not received.endswith(b"\r\n\r\n8"):
                received += (part := again.recv(1000))
                assert part, received
            again.sendall(KINDS["headers"])
            assert read(again)[0] == 408


def drip(connection, stop):
    with contextlib.suppress(OSError):
        while not stop.wait(0.05):
            connection.sendall(b"1")


@pytest.mark.parametrize(("kind", "status"), [("body", 408), ("refused", 403)])
def test_a_body_that_drips_is_cut_off(tmp_path, kind, status):
    text = KINDS[kind].replace(b"Length: 100", b"Length: 100000")
    with served(tmp_path, "--body-seconds", "0.3") as port, connect(port, text) as slow:
        stop = threading.Event()
        thread = threading.Thread(target=drip, args=(slow, stop))
        thread.start()
        try:
            received = slow.recv(65536)
            assert int(received.split()[1]) == status
            while True:  # until the server closes, although more is sent
                try:
                    if not slow.recv(65536):
                        break
                except ConnectionResetError:
                    break
        finally:
            stop.set()
            thread.join(30)


def test_headers_beyond_the_limit_are_refused_whether_they_end_or_not(tmp_path):
    with served(tmp_path) as port:
        with connect(port, head()[:-2] + b"X-Large: " + b"x" * 40_000) as endless:
            status, body = read(endless)
        assert (status, body["error"]) == (431, "HeadersTooLarge")
        assert httpx.get(f"http://127.0.0.1:{port}/", headers={"x": "1" * 20_000}).status_code == 431
        assert httpx.get(f"http://127.0.0.1:{port}/", headers={f"x-{i}": "1" for i in range(101)}).status_code == 431


def test_what_is_no_http_is_answered_in_json(tmp_path):
    with served(tmp_path) as port, connect(port, b"\x16\x03\x01 hello\r\n\r\n") as strange:
        status, body = read(strange)
    assert (status, body["error"]) == (400, "BadRequest")


def test_two_requests_at_once_on_a_connection_are_both_answered(tmp_path):
    with served(tmp_path, "--header-seconds", "1", "--body-seconds", "1") as port:
        with connect(
            port, (head("Content-Length: 1") + b"4") * 2 + head("Content-Length: 1", "Connection: close") + b"5"
        ) as one:
            received = b""
            while part := one.recv(65536):
                received += part
    assert re.findall(rb"\r\n\r\n(\d+)", received) == [b"8", b"8", b"10"]


def test_the_most_connections_leave_files_for_everything_else():
    resource = pytest.importorskip("resource")
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 8 <= most_connections() <= max(8, allowed - 100)


def test_a_request_that_asks_for_a_websocket_is_answered_as_any_other():
    config = uvicorn.Config(make_app(Batcher(list)), port=0, log_level="error", http=limited_protocol())
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        response = httpx.post(f"http://127.0.0.1:{address[1]}/", content="1", headers=headers, timeout=10)
        assert (response.status_code, response.json()) == (200, 1)
    finally:
        server.should_exit = True
        thread.join()
