"""The command ``serve``: load a function, put a batcher and HTTP in front of it, and run until told to end."""

from __future__ import annotations

import argparse
import signal
import socket
from typing import TYPE_CHECKING, Any

from .._optional import require
from ..errors import ArgumentError
from .options import Commands, add_command, count, load_function, load_object, positive

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..serve import Batcher

_LOOPBACK = ("127.0.0.1", "localhost")
# When the app ends, the server has already waited for every answer; nobody reads what still runs then.
_LAST_SECONDS = 1.0
# Options that are settings of a batcher, under the same name.
_SETTINGS = ("policy", "max_items", "max_wait_ms", "deadline_ms", "max_tokens", "max_queue")

_SERVE = """\
Serve a function over HTTP. The function takes a list of items and returns a list of results. Each POST
request carries one item as JSON; requests that wait at the same time become one batch.
Needs pip install 'batchwright[serve]'.

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
    command = add_command(
        commands,
        "serve",
        summary="serve a function over HTTP and run its requests in batches",
        description=_SERVE,
        examples=_EXAMPLES,
    )
    command.add_argument(
        "function", metavar="MODULE:FUNCTION", nargs="?", help="a function from a list to a list, or a Batcher"
    )
    command.add_argument(
        "--demo", action="store_true", help="serve a small encoder with three policies and compare them on a page"
    )
    _add_batching(command)
    _add_server(command)
    command.set_defaults(run=run)


def _add_batching(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("batches")
    group.add_argument(
        "--policy", choices=("adaptive", "greedy", "window"), help="how batches are formed (default: adaptive)"
    )
    group.add_argument("--max-items", metavar="N", type=positive, help="requests per batch (default: 64)")
    group.add_argument(
        "--length-of", metavar="MODULE:FUNCTION", help="returns the length of an item, to group by (default: all alike)"
    )
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=positive,
        help="padded tokens per batch: items times the longest (default: no limit)",
    )
    group.add_argument(
        "--deadline-ms", metavar="MS", type=float, help="milliseconds from request to answer (default: no limit)"
    )
    group.add_argument("--max-wait-ms", metavar="MS", type=float, help="waiting time of --policy window (default: 10)")
    group.add_argument(
        "--max-queue", metavar="N", type=positive, help="requests that may wait; more are refused (default: 1000)"
    )
    group.add_argument("--workers", metavar="N", type=positive, help="batches that run at the same time (default: 1)")


def _add_server(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, only this machine)"
    )
    group.add_argument(
        "--port",
        metavar="N",
        type=count,
        default=8000,
        help="port to listen on; 0 takes any free one (default: %(default)s)",
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="also answer requests for this host name; a server on 127.0.0.1 answers only localhost and 127.0.0.1",
    )
    group.add_argument(
        "--max-body-bytes", metavar="N", type=positive, default=1_000_000, help="largest request (default: %(default)s)"
    )
    group.add_argument(
        "--drain-seconds",
        metavar="N",
        type=positive,
        default=30,
        help="time to answer open requests at the end (default: %(default)s)",
    )
    group.add_argument("--no-page", action="store_true", help="serve no live page")


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to end."""
    for package in ("starlette", "prometheus_client", "uvicorn"):
        require(package, extra="serve")
    if (arguments.function is None) != arguments.demo:
        raise ArgumentError("give module:function, a function that takes a list of items, or --demo")
    listening = _listen(arguments.host, arguments.port)
    with listening:
        app = _demo_app(arguments) if arguments.demo else _app(arguments)
        _guard(app, arguments.host, arguments.allow_host)
        return _serve(app, listening, arguments.drain_seconds)


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
        length_of = None if arguments.length_of is None else load(arguments.length_of)
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


def _serve(app: Starlette, listening: socket.socket, drain_seconds: int) -> int:
    uvicorn = require("uvicorn", extra="serve")
    host, port = listening.getsockname()[:2]
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}/   Ctrl-C ends it", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=drain_seconds)
    # uvicorn raises the signal again after it has drained. By then everything is done, and the exit code must say so.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0
