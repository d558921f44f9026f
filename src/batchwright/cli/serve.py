"""The command ``serve``: load a function, put a batcher and HTTP in front of it, and run until told to end."""

from __future__ import annotations

import argparse
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .._optional import require
from ..errors import ArgumentError
from .options import Commands, add_command, add_option, count, load_function, load_object, positive

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..serve import Batcher

_LOOPBACK = ("127.0.0.1", "localhost")
# When the app ends, the server has already waited for every answer; nobody reads what still runs then.
_LAST_SECONDS = 1.0
# Options that are settings of a batcher, under the same name.
_SETTINGS = ("policy", "max_items", "max_wait_ms", "deadline_ms", "max_tokens", "max_queue")

_SERVE = """\
Serve a function over HTTP and run its requests in batches.

The function takes a list of items and returns a list of results. Each POST request carries one item as
JSON; requests that wait at the same time become one batch. Needs pip install 'batchwright[serve]'.

  POST /       one item as JSON; optional headers X-Deadline-Ms and X-Priority
  GET /        a live page: load, latency, batch sizes, padding and missed deadlines
  /metrics     figures for Prometheus
  /healthz     200 while the process is alive
  /readyz      200 while it accepts requests, 503 while it drains

After SIGTERM or Ctrl-C the server accepts no more requests, answers those it has, and ends.
"""

_EXAMPLES = """\
  batchwright serve my_model:embed --length-of my_model:count_tokens --max-tokens 8192 --deadline-ms 50
  curl -d '"one text"' -H 'X-Deadline-Ms: 20' http://127.0.0.1:8000/
  batchwright serve --demo             a small encoder, three policies side by side, a load slider
"""


def add_serve(commands: Commands) -> None:
    """Add the command ``serve``."""
    command = add_command(commands, "serve", _SERVE, _EXAMPLES, run=_run)
    function = "my_model:embed is the function embed in my_model.py; it takes and returns a list, or is a Batcher"
    command.add_argument("function", metavar="MODULE:FUNCTION", nargs="?", help=function)
    add_option(command, "--demo", "serve a small encoder with three policies and compare them on a page")
    batches = command.add_argument_group("batches")
    about = (
        "how batches are formed: adaptive takes requests of similar length, as many as meet their deadlines; greedy "
        "takes all that wait; window waits --max-wait-ms for more (default: adaptive)"
    )
    batches.add_argument("--policy", choices=("adaptive", "greedy", "window"), help=about)
    add_option(batches, "--max-items N", "requests per batch (default: 64)", type=positive)
    length = "returns the length of an item, to group by (default: all are alike)"
    add_option(batches, "--length-of MODULE:FUNCTION", length)
    tokens = "padded tokens per batch: items times the longest (default: no limit)"
    add_option(batches, "--max-tokens N", tokens, type=positive)
    deadline = "milliseconds from request to answer (default: no limit)"
    add_option(batches, "--deadline-ms MS", deadline, type=float)
    add_option(batches, "--max-wait-ms MS", "waiting time of --policy window (default: 10)", type=float)
    add_option(batches, "--max-queue N", "requests that may wait; more are refused (default: 1000)", type=positive)
    add_option(batches, "--workers N", "batches that run at the same time (default: 1)", type=positive)
    server = command.add_argument_group("server")
    add_option(server, "--host NAME", "address to listen on; 127.0.0.1 is this machine only", default="127.0.0.1")
    add_option(server, "--port N", "port to listen on; 0 takes any free one", type=count, default=8000)
    names = "also answer requests for this host name; a server on 127.0.0.1 answers only localhost and 127.0.0.1"
    add_option(server, "--allow-host NAME", names, action="append")
    add_option(server, "--max-body-bytes N", "largest request", type=positive, default=1_000_000)
    add_option(server, "--drain-seconds N", "time to answer open requests at the end", type=positive, default=30)
    add_option(server, "--no-page", "serve no live page")


def _run(arguments: argparse.Namespace) -> None:
    """Serve until told to end."""
    for package in ("starlette", "prometheus_client", "uvicorn"):
        require(package, extra="serve")
    if (arguments.function is None) != arguments.demo:
        raise ArgumentError("give module:function, a function that takes a list of items, or --demo")
    with _listen(arguments.host, arguments.port) as listening:
        app = _demo_app(arguments) if arguments.demo else _app(arguments)
        _guard(app, arguments.host, arguments.allow_host or [])
        _serve(app, listening, arguments.drain_seconds)


def load(name: str) -> Any:
    """Return the function or batcher that ``module:name`` stands for.

    >>> load("os.path:basename")("a/b")
    'b'
    """
    from ..serve import Batcher

    found = load_object(name)
    return found if isinstance(found, Batcher) else load_function(name)


def _app(arguments: argparse.Namespace) -> Starlette:
    from ..serve.http import make_app

    return make_app(
        _batcher(arguments),
        max_body_bytes=arguments.max_body_bytes,
        drain_seconds=_LAST_SECONDS,
        page=not arguments.no_page,
    )


def _batcher(arguments: argparse.Namespace) -> Batcher[Any, Any]:
    from ..serve import BatchedFunction, Batcher

    found = load(arguments.function)
    settings = _given(arguments)
    if not isinstance(found, Batcher | BatchedFunction):
        length_of = None if arguments.length_of is None else load_function(arguments.length_of)
        return Batcher(found, length_of=length_of, num_workers=arguments.workers or 1, **settings)
    if arguments.length_of is not None or arguments.workers is not None:
        raise ArgumentError(f"{arguments.function} is already batched; set length_of and num_workers where it is made")
    batcher = found.batcher if isinstance(found, BatchedFunction) else found
    batcher.configure(**settings)
    return batcher


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in _SETTINGS if getattr(arguments, name) is not None}


def _demo_app(arguments: argparse.Namespace) -> Starlette:
    from ..serve.demo import Demo, DemoEncoder, make_demo_app

    refused = [name for name in ("policy", "length_of", "workers", "no_page") if getattr(arguments, name)]
    if refused:
        raise ArgumentError(f"--{refused[0].replace('_', '-')} has no meaning with --demo; leave it out")
    return make_demo_app(Demo(DemoEncoder(), **_given(arguments)))


def _guard(app: Starlette, host: str, names: list[str]) -> None:
    """Refuse requests under a foreign host name: a web page could send them to this machine (DNS rebinding)."""
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    if host in _LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*_LOOPBACK, *names], www_redirect=False)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ArgumentError(f"cannot listen on {host} port {port}: {error}; choose another --host or --port") from None


def _serve(app: Starlette, listening: socket.socket, drain_seconds: int) -> None:
    uvicorn = require("uvicorn", extra="serve")
    host, port = listening.getsockname()[:2]
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}/   Ctrl-C ends it", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=drain_seconds)
    # uvicorn raises the signal again after it has drained. By then everything is done, and the exit code must say so.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, previous)
