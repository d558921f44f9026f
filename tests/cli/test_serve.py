"""``batchwright serve`` as a user runs it."""

import argparse
import contextlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from batchwright.cli import main
from batchwright.cli.serve import add_serve, load
from batchwright.errors import ArgumentError
from batchwright.serve.settings import POLICIES

MODEL = """
import time
from batchwright.serve import Batcher, batched

answer = 42

def embed(texts):
    time.sleep(0.05)
    return [[len(text), text.count("a")] for text in texts]

def hang(texts):
    print("hanging", flush=True)
    time.sleep(600)

def count_tokens(text):
    return len(text.split())

@batched(max_items=4)
def shout(texts):
    return [text.upper() for text in texts]

batcher = Batcher(embed)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "raising.py").write_text("raise RuntimeError('no weights')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_model", "broken", "raising"):
        sys.modules.pop(name, None)


@contextlib.contextmanager
def serving(folder, *arguments):
    """Run the command and yield the process and its address."""
    command = [sys.executable, "-m", "batchwright", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        address = re.search(r"http://\S+:\d+", line)
        assert address, process.communicate(timeout=30)[1]
        yield process, address[0]
    finally:
        process.kill()
        process.communicate()


def fails(capsys, *arguments):
    """Return what the command says when it refuses."""
    assert main(["serve", *arguments]) == 2
    return capsys.readouterr().err


def test_a_function_is_served_with_its_options(folder):
    options = ("--length-of", "my_model:count_tokens", "--max-tokens", "3", "--deadline-ms", "10000")
    with serving(folder, "my_model:embed", *options) as (process, address):
        assert httpx.post(address, json="a banana").json() == [8, 4]
        assert httpx.post(address, json="one two three four").json()["error"] == "TooLarge"
        assert httpx.get(f"{address}/live").json()["deadline_ms"] == 10_000
        assert "<!doctype html>" in httpx.get(address).text
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


def test_the_request_that_is_printed_to_try_works_as_it_is_printed(folder):
    with serving(folder, "loud=my_model:shout", "numbers=my_model:embed") as (process, address):
        words = shlex.split(process.stdout.readline().partition("curl ")[2])
        assert words == ["-d", '"one text"', f"{address}/v1/loud"]
        assert httpx.post(words[2], content=words[1]).json() == "ONE TEXT"


def test_a_second_ctrl_c_ends_the_server_without_a_traceback(folder):
    with serving(folder, "my_model:embed") as (process, address):
        there = ("127.0.0.1", httpx.URL(address).port)
        with socket.create_connection(there) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
            assert b"100" in client.recv(100)  # the server waits for the body
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(ConnectionError):  # until it has noted the first one
                while True:
                    socket.create_connection(there).close()
            process.send_signal(signal.SIGINT)
            assert (process.wait(timeout=60), process.communicate()[1]) == (0, "")


def test_sigterm_answers_what_was_taken_and_ends_with_success(folder):
    answers = []
    with serving(folder, "my_model:embed", "--max-items", "1", "--no-page") as (process, address):
        with httpx.Client() as client:

            def ask():
                answers.append(client.post(address, json="banana", timeout=30).json())

            threads = [threading.Thread(target=ask) for _ in range(10)]
            for thread in threads:
                thread.start()
            while "submitted_requests_total 10.0" not in httpx.get(f"{address}/metrics").text:
                pass
            process.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join(30)
        code, (_, said) = process.wait(timeout=30), process.communicate()
    assert answers == [[6, 3]] * 10
    assert (code, said) == (0, "")


def test_a_function_that_never_returns_does_not_keep_the_server_from_ending(folder):
    with serving(folder, "my_model:hang", "--drain-seconds", "1") as (process, address):

        def ask():
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(address, json="a", timeout=60)

        thread = threading.Thread(target=ask)
        thread.start()
        assert process.stdout.readline().startswith("To try it: ")
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        thread.join(30)


def test_a_batched_function_keeps_its_own_options_but_for_those_given(folder):
    with serving(folder, "my_model:shout", "--deadline-ms", "5000") as (_, address):
        assert httpx.post(address, json="hello").json() == "HELLO"
        assert httpx.get(f"{address}/live").json()["deadline_ms"] == 5000


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "0.0.0.0", "::1"])
def test_a_name_of_another_machine_is_not_answered_unless_it_is_allowed(folder, bound):
    allowed = ("--allow-host", "inside.example", "--allow-host", "*.own.example")
    with serving(folder, "my_model:shout", "--host", bound, *allowed) as (_, address):
        address = address.replace("0.0.0.0", "127.0.0.1")
        hosts = ("evil.example", "inside.example", "a.own.example", "localhost", "127.0.0.1", "10.1.2.3")
        statuses = [httpx.get(f"{address}/healthz", headers={"Host": host}).status_code for host in hosts]
        own = httpx.get(f"{address}/healthz", headers={"Host": socket.gethostname()}).status_code
    assert statuses == [400, 200, 200, 200, 200, 200]
    assert own == (200 if bound == "0.0.0.0" else 400)


def test_a_page_of_another_site_is_refused_unless_it_is_allowed(folder):
    with serving(folder, "my_model:shout", "--allow-origin", "https://app.example") as (_, address):
        origins = ("https://evil.example", "https://app.example", address)
        answers = [httpx.post(address, json="a", headers={"Origin": origin}) for origin in origins]
    assert [answer.status_code for answer in answers] == [403, 200, 200]
    assert answers[1].headers["Access-Control-Allow-Origin"] == "https://app.example"


def test_several_functions_are_served_by_name(folder):
    with serving(folder, "loud=my_model:shout", "numbers=my_model:embed", "--deadline-ms", "5000") as (_, address):
        assert httpx.post(f"{address}/v1/loud", json="a").json() == "A"
        assert httpx.post(f"{address}/v1/numbers/batch", json=["a", 3]).json()[0] == {"result": [1, 1]}
        assert httpx.get(f"{address}/v1").json() == {"models": ["loud", "numbers"]}
        assert httpx.get(f"{address}/live").json()["deadline_ms"] == 5000


def test_a_tokenizer_can_be_named_and_limits_be_set(folder):
    options = ("--tokenizer", "words", "--max-tokens", "3", "--max-request-items", "2", "--max-priority", "1")
    with serving(folder, "my_model:embed", *options) as (_, address):
        assert httpx.post(address, json="a banana").json() == [8, 4]
        assert httpx.post(address, json="one two three four").json()["error"] == "TooLarge"
        assert httpx.post(f"{address}/batch", json=["a"] * 3).json()["error"] == "TooManyItems"
        assert httpx.post(address, json="a", headers={"X-Priority": "2"}).status_code == 400


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (["my_model:embed", "my_model:shout"], "several functions need names"),
        (["a=my_model:embed", "my_model:shout"], "several functions need names"),
        (["a=my_model:embed", "a=my_model:shout"], "two functions are named 'a'"),
        (["=my_model:embed"], "several functions need names"),
        (["a/b=my_model:embed"], "a name of a batcher"),
    ],
)
def test_names_of_functions_are_checked(folder, capsys, functions, message):
    assert message in fails(capsys, *functions, "--port", "0")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_model", "'my_model' is not module:function"),
        ("my_model.py", "'my_model.py' is not module:function; write for example my_model:embed"),
        ("my_model:", "is not module:function"),
        ("my_modle:embed", "there is no module 'my_modle'"),
        ("my_model.part:embed", "there is no module 'my_model.part'"),
        ("my_model:embd", "my_model has no 'embd'; did you mean 'embed'?"),
        ("my_model:predict", "my_model has no 'predict'; it has "),
        (
            "my_model.py:embed",
            "no module 'my_model.py' in this folder or among the installed packages; name the module wi",
        ),
        ("operator:add", "operator:add must take one argument, and is called as (a, b, /): missing a required"),
        ("my_model:answer", "my_model:answer is of type int and cannot be called"),
        ("broken:embed", "importing broken failed: No module named 'no_such_package'"),
        ("raising:embed", "importing raising failed: RuntimeError: no weights"),
    ],
)
def test_a_name_that_leads_nowhere_is_explained(folder, name, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        load(name)


def test_a_batcher_can_be_named(folder):
    assert load("my_model:batcher").settings.max_items == 64


def test_a_function_or_the_demo_must_be_named(capsys):
    assert "give module:function" in fails(capsys)
    assert "give module:function" in fails(capsys, "my_model:embed", "--demo")


def test_a_length_for_what_is_batched_already_is_refused(folder, capsys):
    said = fails(capsys, "my_model:shout", "--length-of", "my_model:count_tokens", "--port", "0")
    assert "my_model:shout is already batched; leave out --length-of" in said


def test_an_option_without_a_meaning_for_the_demo_is_refused(capsys):
    assert "--policy has no meaning with --demo" in fails(capsys, "--demo", "--policy", "greedy", "--port", "0")


def test_a_deadline_of_nothing_is_refused(folder, capsys):
    said = fails(capsys, "my_model:embed", "--deadline-ms", "0", "--port", "0")
    assert "deadline_ms must be a number above 0" in said


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_named(policy):
    arguments = argparse.ArgumentParser()
    add_serve(arguments.add_subparsers())
    assert arguments.parse_args(["serve", "my_model:embed", "--policy", policy]).policy == policy


def test_other_commands_do_not_load_what_serving_needs():
    code = "import sys, batchwright.cli; print('batchwright.serve' in sys.modules, 'starlette' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n"


def test_a_port_in_use_is_refused(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = fails(capsys, "my_model:embed", "--port", str(taken.getsockname()[1]))
    assert "cannot listen on 127.0.0.1" in said
    assert "choose another --host or --port" in said
