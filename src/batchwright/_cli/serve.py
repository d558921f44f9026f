"""``batchwright serve module:function``: load a function, put a batcher and HTTP before it, run until told to end."""

from __future__ import annotations

import argparse
import difflib
import importlib
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._optional import is_installed, require
from ..errors import ArgumentError
from .numbers import count, positive

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..serve import Batcher

_LOOPBACK = ("127.0.0.1", "localhost")
# The server has waited for every answer when the app ends; what still runs then has no reader.
_LAST_SECONDS = 1.0
# Options that are settings of a batcher, by their name there.
_SETTINGS = ("policy", "max_items", "max_wait_ms", "deadline_ms", "max_tokens", "max_queue")

_SERVE = """\
Serve a function over HTTP. It takes a list of items and returns a list of results; each POST carries one
item as JSON, and requests that wait together become one batch. Needs pip install 'batchwright[serve]'.

  POST /       one JSON item; headers X-Deadline-Ms, X-Priority
  GET /        a page with load, latency, batch sizes, padding and misses
  /metrics     for Prometheus
  /healthz     the process lives
  /readyz      it takes requests; 503 while it drains

SIGTERM and Ctrl-C take no more requests, answer those that were taken, and end.
"""

_EXAMPLES = """\
examples:
  batchwright serve my_model:embed --length-of my_model:count_tokens --max-tokens 8192 --deadline-ms 50
  curl -d '"one text"' -H 'X-Deadline-Ms: 20' http://127.0.0.1:8000/
  batchwright serve --demo             a small encoder, three policies side by side, a load slider
"""


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``serve``."""
    command = commands.add_parser(
        "serve",
        help="serve a function over HTTP in batches",
        description=_SERVE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("function", metavar="MODULE:FUNCTION", nargs="?", help="a list in, a list out; or a Batcher")
    command.add_argument("--demo", action="store_true", help="serve a small encoder and compare the policies on a page")
    _add_batching(command)
    _add_server(command)
    command.set_defaults(run=run)


def _add_batching(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("batches")
    group.add_argument(
        "--policy", choices=("adaptive", "greedy", "window"), help="what a batch holds (default: adaptive)"
    )
    group.add_argument("--max-items", metavar="N", type=positive, help="requests in a batch (default: 64)")
    group.add_argument(
        "--length-of", metavar="MODULE:FUNCTION", help="the length of an item, to group by (default: all alike)"
    )
    group.add_argument(
        "--max-tokens", metavar="N", type=positive, help="items times longest in a batch (default: no limit)"
    )
    group.add_argument("--deadline-ms", metavar="MS", type=float, help="from submission to answer (default: no limit)")
    group.add_argument("--max-wait-ms", metavar="MS", type=float, help="the window of --policy window (default: 10)")
    group.add_argument("--max-queue", metavar="N", type=positive, help="requests that may wait (default: 1000)")
    group.add_argument("--workers", metavar="N", type=positive, help="batches that run at once (default: 1)")


def _add_server(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    group.add_argument("--port", metavar="N", type=count, default=8000, help="0 takes any (default: %(default)s)")
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="also answer requests for this name; a server of this machine alone answers localhost and 127.0.0.1",
    )
    group.add_argument(
        "--max-body-bytes", metavar="N", type=positive, default=1_000_000, help="of a request (default: %(default)s)"
    )
    group.add_argument(
        "--drain-seconds", metavar="N", type=positive, default=30, help="to answer at the end (default: %(default)s)"
    )
    group.add_argument("--no-page", action="store_true", help="no page at /")


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to end."""
    for package in ("starlette", "prometheus_client", "uvicorn"):
        require(package, extra="serve")
    if (arguments.function is None) != arguments.demo:
        raise ArgumentError("give module:function, a function of a list of items, or --demo")
    listening = _listen(arguments.host, arguments.port)
    with listening:
        app = _demo_app(arguments) if arguments.demo else _app(arguments)
        _guard(app, arguments.host, arguments.allow_host)
        return _serve(app, listening, arguments.drain_seconds)


def load(name: str) -> Any:
    """Return what ``module:name`` stands for, which must be callable; a dot looks inside.

    >>> load("os.path:basename")("a/b")
    'b'
    """
    from ..serve import Batcher

    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ArgumentError(f"{name!r} is not module:function; write for example my_model:embed")
    found = _import(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"{module_name} has no {path!r}{_suggest(part, found)}")
        found = getattr(found, part)
    if not callable(found) and not isinstance(found, Batcher):
        raise ArgumentError(f"{name} is of type {type(found).__name__} and cannot be called; name a function")
    return found


def _import(name: str) -> Any:
    # A console script does not look for modules where it was started, unlike ``python -m``.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ArgumentError(
                f"there is no module {error.name!r} in this folder or among the installed packages"
            ) from None
        raise ArgumentError(f"importing {name} failed: {error}") from error
    except Exception as error:  # a module may raise anything while it is imported
        raise ArgumentError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _suggest(name: str, holder: Any) -> str:
    public = [known for known in vars(holder) if not known.startswith("_")] if hasattr(holder, "__dict__") else []
    close = difflib.get_close_matches(name, public, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


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
        raise ArgumentError(f"{arguments.function} is batched already; give --length-of and --workers where it is made")
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
    if is_installed("torch"):
        require("torch", extra="torch").set_num_threads(1)  # three arms share the processor
    return make_demo_app(Demo(DemoEncoder(), **_given(arguments)))


def _guard(app: Starlette, host: str, names: list[str]) -> None:
    """Refuse pages from elsewhere that reach this machine's own address under another name."""
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
    # The server raises the signal again after it has drained. By then all is done, and the exit code shall say so.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0
