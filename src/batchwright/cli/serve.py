"""The command ``serve``: load a function, put a batcher and HTTP in front of it, and run until told to end."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .._optional import require
from ..errors import ArgumentError
from .lengths import load_tokenizer
from .options import Commands, Options, add_command, add_option, load_function, load_object, port, positive

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..serve import BatchedFunction, Batcher
    from ..serve.http import Limits

# When the app ends, the server has already waited for every answer; nobody reads what still runs then.
_LAST_SECONDS = 1.0
# Connections that the system keeps until the server takes them.
_BACKLOG = 2048
# Options that are settings of a batcher, under the same name.
_SETTINGS = ("policy", "max_items", "max_wait_ms", "deadline_ms", "max_tokens", "max_queue")
# Options that a batcher has from its making, by the name of the option.
_FIXED = {
    "length_of": "length_of",
    "tokenizer": "tokenizer",
    "workers": "num_workers",
    "worker": "worker",
    "run_timeout_ms": "run_timeout_ms",
}
# Options that are limits of the server, by the name of the limit.
_LIMITS = {
    "max_items": "max_request_items",
    **{name: name for name in ("max_deadline_ms", "max_priority", "header_seconds", "body_seconds", "max_connections")},
}

_SERVE = """\
Serve functions over HTTP and run their requests in batches.

A function takes a list of items and returns a list of results. Each POST request carries one item as
JSON; requests that wait at the same time become one batch. Needs pip install 'batchwright[serve]'.

  POST /       one item as JSON; optional headers X-Deadline-Ms and X-Priority
  POST /batch  a JSON list of items; the answers come in the same order, each a result or an error
  GET /        a live page: load, latency, batch sizes, padding, failures and missed deadlines
  /metrics     figures for Prometheus
  /healthz     200 while every batcher lives, 503 with the reason if one has failed or is closed
  /readyz      200 while it accepts requests, 503 while it drains

Several functions, each as NAME=MODULE:FUNCTION, are served under /v1/NAME and /v1/NAME/batch. Items of
different length share batches with items of similar length; texts are measured by their characters
unless --length-of or --tokenizer says otherwise.

Browsers: requests under a foreign host name and requests that a page of another site sends are refused;
--allow-host and --allow-origin make exceptions. Slow and oversized requests are cut off.

After SIGTERM or Ctrl-C the server accepts no more requests, answers those it has, and ends.
"""

_EXAMPLES = """\
  batchwright serve my_model:embed --deadline-ms 50
  curl -d '"one text"' -H 'X-Deadline-Ms: 20' http://127.0.0.1:8000/
  curl -d '["one text", "another"]' http://127.0.0.1:8000/batch
  batchwright serve embed=my_model:embed rank=my_model:rank --tokenizer ./my-model --max-tokens 8192
  batchwright serve --demo             a small encoder, three policies side by side, a load slider
"""


def add_serve(commands: Commands) -> None:
    """Add the command ``serve``."""
    command = add_command(commands, "serve", _SERVE, _EXAMPLES, run=_run)
    function = (
        "my_model:embed is the function embed in my_model.py; it takes and returns a list, or is a Batcher; several "
        "need names: embed=my_model:embed"
    )
    command.add_argument("functions", metavar="MODULE:FUNCTION", nargs="*", help=function)
    add_option(command, "--demo", "serve a small encoder with three policies and compare them on a page")
    _add_batches(command.add_argument_group("batches"))
    _add_server(command.add_argument_group("server"))
    _add_limits(command.add_argument_group("limits of one client"))


def _add_batches(batches: Options) -> None:
    about = (
        "how batches are formed: adaptive takes requests of similar length, as many as meet their deadlines; greedy "
        "takes all that wait; window waits --max-wait-ms for more (default: adaptive)"
    )
    batches.add_argument("--policy", choices=("adaptive", "greedy", "window"), help=about)
    add_option(batches, "--max-items N", "requests per batch (default: 64)", type=positive)
    length = "returns the length of an item, to group by (default: an estimate, such as the characters of a text)"
    add_option(batches, "--length-of MODULE:FUNCTION", length)
    tokenizer = "counts the tokens of texts: a tokenizer.json, a folder of transformers, words, chars or bytes"
    add_option(batches, "--tokenizer NAME", tokenizer)
    tokens = "padded tokens per batch: items times the longest (default: no limit)"
    add_option(batches, "--max-tokens N", tokens, type=positive)
    deadline = "milliseconds from request to answer (default: no limit)"
    add_option(batches, "--deadline-ms MS", deadline, type=float)
    add_option(batches, "--max-wait-ms MS", "waiting time of --policy window (default: 10)", type=float)
    add_option(batches, "--max-queue N", "requests that may wait; more are refused (default: 1000)", type=positive)
    add_option(batches, "--workers N", "batches that run at the same time (default: 1)", type=positive)
    batches.add_argument("--worker", choices=("thread", "process"), help="what runs a batch (default: thread)")
    add_option(batches, "--run-timeout-ms MS", "longest call of the function (default: no limit)", type=float)


def _add_server(server: Options) -> None:
    add_option(server, "--host NAME", "address to listen on; 127.0.0.1 is this machine only", default="127.0.0.1")
    add_option(server, "--port N", "port to listen on; 0 takes any free one", type=port, default=8000)
    names = (
        "also answer requests for this host name, or *.NAME for all below it; may be repeated. Without it the server "
        "answers to localhost, to addresses in numbers and, unless it listens on this machine only, to its own name"
    )
    add_option(server, "--allow-host NAME", names, action="append")
    origins = "let pages of this site send requests and read answers, such as https://app.example.org; may be repeated"
    add_option(server, "--allow-origin ORIGIN", origins, action="append")
    add_option(server, "--drain-seconds N", "time to answer open requests at the end", type=positive, default=30)
    add_option(server, "--no-page", "serve no live page")


def _add_limits(limits: Options) -> None:
    add_option(limits, "--max-body-bytes N", "largest request", type=positive, default=1_000_000)
    add_option(limits, "--max-request-items N", "items in one request to /batch (default: 256)", type=positive)
    add_option(limits, "--max-deadline-ms MS", "longest X-Deadline-Ms (default: 600000)", type=float)
    add_option(limits, "--max-priority N", "highest X-Priority, from -10 to 10 (default: 4)", type=float)
    add_option(limits, "--header-seconds S", "time for the headers of a request (default: 10)", type=float)
    add_option(limits, "--body-seconds S", "time for the body of a request (default: 30)", type=float)
    most = "connections at once (default: what the limit on open files leaves)"
    add_option(limits, "--max-connections N", most, type=positive)


def _run(arguments: argparse.Namespace) -> None:
    """Serve until told to end."""
    for package in ("starlette", "prometheus_client", "uvicorn"):
        require(package, extra="serve")
    from ..serve.http import Limits

    if bool(arguments.functions) == arguments.demo:
        raise ArgumentError("give module:function, a function that takes a list of items, or --demo")
    given = {name: getattr(arguments, option) for name, option in _LIMITS.items()}
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    options = {
        "limits": limits,
        "allow_hosts": _hosts(arguments.host, arguments.allow_host or []),
        "allow_origins": arguments.allow_origin or [],
    }
    with _listen(arguments.host, arguments.port) as listening:
        app = _demo_app(arguments, options) if arguments.demo else _app(arguments, options)
        _say_where(listening, arguments.functions)
        _serve(app, listening, limits, arguments.drain_seconds)


def load(name: str) -> Any:
    """Return the function or batcher that ``module:name`` stands for.

    >>> load("os.path:basename")("a/b")
    'b'
    """
    from ..serve import Batcher

    found = load_object(name)
    return found if isinstance(found, Batcher) else load_function(name)


def _app(arguments: argparse.Namespace, options: dict[str, Any]) -> Starlette:
    from ..serve.http import make_app

    named = split_names(arguments.functions)
    batchers = {name: _batcher(path, arguments) for name, path in named.items()}
    return make_app(
        batchers[""] if "" in batchers else batchers,
        max_body_bytes=arguments.max_body_bytes,
        drain_seconds=_LAST_SECONDS,
        page=not arguments.no_page,
        **options,
    )


def split_names(functions: Sequence[str]) -> dict[str, str]:
    """Return ``module:function`` by name; the only one may go without, under an empty name.

    >>> split_names(["embed=my_model:embed", "rank=my_model:rank"])
    {'embed': 'my_model:embed', 'rank': 'my_model:rank'}
    >>> split_names(["my_model:embed"])
    {'': 'my_model:embed'}
    """
    named: dict[str, str] = {}
    for function in functions:
        name, equals, path = function.rpartition("=")
        if not name and (equals or len(functions) > 1):
            raise ArgumentError(f"several functions need names, got {function!r}; write NAME=module:function for each")
        if name in named:
            raise ArgumentError(f"two functions are named {name!r}; give each a name of its own")
        named[name] = path
    return named


def _batcher(path: str, arguments: argparse.Namespace) -> Batcher[Any, Any] | BatchedFunction:
    from ..serve import BatchedFunction, Batcher

    found = load(path)
    settings = _given(arguments)
    if not isinstance(found, Batcher | BatchedFunction):
        return Batcher(found, **_fixed(arguments), **settings)
    fixed = [name for name in _FIXED if getattr(arguments, name) is not None]
    if fixed:
        raise ArgumentError(
            f"{path} is already batched; leave out --{fixed[0].replace('_', '-')}, and set {_FIXED[fixed[0]]} where it "
            "is made"
        )
    found.configure(**settings)
    return found


def _fixed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a batcher that cannot be changed later."""
    given = {name: getattr(arguments, name) for name in _FIXED if getattr(arguments, name) is not None}
    if "length_of" in given:
        given["length_of"] = load_function(given["length_of"])
    if "tokenizer" in given:
        given["tokenizer"] = load_tokenizer(given["tokenizer"])
    return {_FIXED[name]: value for name, value in given.items()}


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in _SETTINGS if getattr(arguments, name) is not None}


def _demo_app(arguments: argparse.Namespace, options: dict[str, Any]) -> Starlette:
    from ..serve.demo import Demo, DemoEncoder, make_demo_app

    refused = [name for name in ("policy", *_FIXED, "no_page") if getattr(arguments, name)]
    if refused:
        raise ArgumentError(f"--{refused[0].replace('_', '-')} has no meaning with --demo; leave it out")
    return make_demo_app(Demo(DemoEncoder(), **_given(arguments)), **options)


def _hosts(host: str, names: list[str]) -> list[str]:
    """Return the host names to answer to; a server that others can reach also has a name of its own."""
    is_local = host == "localhost" or host == "::1" or host.startswith("127.")
    return names if is_local else [*names, host, socket.gethostname()]


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ArgumentError(f"cannot listen on {host} port {port}: {error}; choose another --host or --port") from None


def _say_where(listening: socket.socket, functions: Sequence[str]) -> None:
    """Print the address of the page, and a request to try with the first function."""
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    print(f"{address}   Ctrl-C ends it", flush=True)
    if functions:
        name = next(iter(split_names(functions)))
        path = f"v1/{name}" if name else ""
        print(f"To try it: curl -d '\"one text\"' {address}{path}", flush=True)


def _serve(app: Starlette, listening: socket.socket, limits: Limits, drain_seconds: int) -> None:
    uvicorn = require("uvicorn", extra="serve")
    from ..serve.http.connections import ACCEPTED_AT_ONCE, limited_protocol

    config = uvicorn.Config(
        app,
        http=limited_protocol(limits),
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_seconds,
    )
    server = uvicorn.Server(config)
    start = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await start(sockets=sockets)
        # A backlog is also how many connections asyncio accepts in one turn. The system may keep more.
        listening.listen(_BACKLOG)

    server.startup = startup
    # A second Ctrl-C does not wait for the app to end, which uvicorn would report with a traceback.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.force_exit)
    # uvicorn raises the signal again after it has drained. By then everything is done, and the exit code must say so.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, previous)
