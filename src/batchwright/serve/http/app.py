"""make_app: an ASGI app that answers HTTP requests from one batcher, or from several under their names."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from ..._checks import as_flag, as_number, as_whole
from ..._optional import is_installed, require
from ...errors import ArgumentError
from ..batcher import Batcher
from ..decorator import BatchedFunction
from .limits import Limits

if is_installed("starlette") and is_installed("prometheus_client"):  # otherwise make_app says what to install
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from ._answering import Answering, Format, decode_json, encode_json
    from ._errors import UNAVAILABLE, Refused, error_response
    from ._guards import guarded_app
    from ._metrics import CONTENT_TYPE, Metrics
    from ._page import figures_of_server, page_routes

JSON = "application/json"
# What may stand in a path and in a label of Prometheus.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def make_app(
    batcher: Batcher[Any, Any] | BatchedFunction | Mapping[str, Batcher[Any, Any] | BatchedFunction],
    *,
    max_body_bytes: int = 1_000_000,
    decode: Callable[[bytes], Any] | None = None,
    encode: Callable[[Any], bytes] | None = None,
    media_type: str = JSON,
    ready: Callable[[], bool] | None = None,
    drain_seconds: float | None = 30.0,
    page: bool = True,
    limits: Limits | None = None,
    allow_hosts: Iterable[str] | None = None,
    allow_origins: Iterable[str] = (),
) -> Starlette:
    """Return an ASGI app that answers ``POST /`` from a batcher, or ``POST /v1/NAME`` from several.

    The body is one item. A request to ``/batch`` or ``/v1/NAME/batch`` holds a JSON list of items; its answer is a list
    in the same order, of ``{"result": …}`` or ``{"error": …, "message": …, "status": …}``. The headers
    ``X-Deadline-Ms`` and ``X-Priority`` are the options of ``Batcher.submit``. A client that disconnects cancels its
    request.

    ======  =================================================================================
    status  means
    ======  =================================================================================
    200     the answer
    400     the body or a header cannot be read, or ``Host`` is not allowed
    403     a page of another site sent the request
    404     nothing is served under this path
    405     the path takes another method
    408     the body took longer than ``limits.body_seconds``
    413     the body is over ``max_body_bytes``, or holds more than ``limits.max_items``
    422     the function failed on this item, or the item alone is over ``max_tokens``
    429     the queue is full; ``Retry-After`` says when to try again
    431     the headers are too many or too large
    500     the function did not return one result per item, its process died, or the answer cannot be encoded
    503     the batcher drains or is closed
    504     the deadline cannot be met, so the item was not run; ``predicted_ms`` says when it would have finished;
            or the function took longer than ``run_timeout_ms``
    ======  =================================================================================

    Every response but 200 has a JSON body with ``error`` and ``message``. ``GET /metrics`` is for Prometheus,
    ``/healthz`` says that every batcher lives, ``/readyz`` that requests are taken; ``GET /`` is a page with plots.

    Args:
        batcher: a ``Batcher`` or a function under ``@batched``, or a dict of several by name. The app drains and closes
            them when the server ends.
        max_body_bytes: a larger body is refused before it is read.
        decode: turns a body into an item; raises ``ValueError`` if it cannot. None reads JSON.
        encode: turns an answer into a body; None writes JSON.
        media_type: the media type of that body. Only JSON can be answered to several items.
        ready: asked by ``/readyz``, for example while weights still load; None: always ready.
        drain_seconds: how long the end of the server waits for requests that were taken; None: as long as it takes.
        page: also serve the page and its figures, ``/live``.
        limits: what one request may take; None: the defaults.
        allow_hosts: host names to answer to, besides localhost and addresses in numbers; ``*.example.org`` for all
            below one. None: any, for an app that does not know where it runs.
        allow_origins: other sites whose pages may send requests and read the answers.

    Returns:
        A Starlette app, which any ASGI server runs.

    >>> app = make_app(Batcher(lambda texts: [text.upper() for text in texts]))
    >>> sorted(route.path for route in app.routes)
    ['/', '/', '/batch', '/healthz', '/live', '/metrics', '/readyz']
    >>> app = make_app({"upper": Batcher(list)}, page=False)
    >>> sorted(route.path for route in app.routes)
    ['/healthz', '/metrics', '/readyz', '/v1', '/v1/upper', '/v1/upper/batch']
    """
    require("starlette", extra="serve")
    require("prometheus_client", extra="serve")
    if drain_seconds is not None:
        drain_seconds = as_number("drain_seconds", drain_seconds, least=0, infinite=True)
    form = Format(
        as_whole("max_body_bytes", max_body_bytes, least=1), decode or decode_json, encode or encode_json, media_type
    )
    limits = Limits() if limits is None else limits
    served = _served(batcher)
    batchers = {name: _batcher_of(found) for name, found in served.items()}
    routes = answering_routes(batchers, form, limits, ready)
    if as_flag("page", page):
        routes += page_routes(lambda: figures_of_server(batchers))
    # The lifespan also keeps the objects of batched methods, which their batchers do not.
    return guarded_app(
        routes, _closing(served, batchers, drain_seconds), limits, allow_hosts=allow_hosts, allow_origins=allow_origins
    )


def answering_routes(
    batchers: Mapping[str, Batcher[Any, Any]],
    form: Format | None = None,
    limits: Limits | None = None,
    ready: Callable[[], bool] | None = None,
) -> list[Route]:
    """Return the routes that answer items and those that watch over it.

    Args:
        batchers: by name; the only one may have an empty name.
        form: how bodies are read and written; None: JSON of up to a million bytes.
        limits: what a request may take.
        ready: asked by ``/readyz``.
    """
    form = form or Format(1_000_000, decode_json, encode_json, JSON)
    metrics = Metrics({name: batcher.stats for name, batcher in batchers.items()})
    routes = []
    for name, batcher in batchers.items():
        answering = Answering(batcher, metrics, name, limits or Limits(), form)
        path = f"/v1/{name}" if name else ""
        routes.append(Route(path or "/", answering.one, methods=["POST"]))
        if form.media_type == JSON:
            routes.append(Route(f"{path}/batch", answering.several, methods=["POST"]))
    if "" not in batchers:
        routes.append(Route("/v1", _show_names(sorted(batchers))))
    return [*routes, *_watching(batchers, metrics, ready)]


def _served(batcher: Any) -> dict[str, Any]:
    if not isinstance(batcher, Mapping):
        return {"": batcher}
    if not batcher:
        raise ArgumentError("make_app takes at least one batcher, got an empty dict")
    for name in batcher:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ArgumentError(
                f"a name of a batcher may hold letters, digits, '_', '-' and '.', and begins with a letter or digit, "
                f"got {name!r}"
            )
    return dict(batcher)


def _batcher_of(batcher: Any) -> Batcher[Any, Any]:
    found = batcher.batcher if isinstance(batcher, BatchedFunction) else batcher
    if not isinstance(found, Batcher):
        raise ArgumentError(f"make_app takes a Batcher or a function under @batched, got {batcher!r}")
    return found


def _show_names(names: list[str]) -> Callable[[Request], Any]:
    async def show(request: Request) -> Response:
        return JSONResponse({"models": names})

    return show


def _watching(
    batchers: Mapping[str, Batcher[Any, Any]], metrics: Metrics, ready: Callable[[], bool] | None
) -> list[Route]:
    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def show_health(request: Request) -> Response:
        reasons = [f"{name}: {why}".removeprefix(": ") for name, one in batchers.items() if (why := _why_dead(one))]
        return _unavailable("; ".join(reasons)) if reasons else PlainTextResponse("ok\n")

    async def show_readiness(request: Request) -> Response:
        if not all(batcher.is_open for batcher in batchers.values()):
            return _unavailable("draining")
        return PlainTextResponse("ready\n") if ready is None or ready() else _unavailable("not ready")

    return [Route("/metrics", show_metrics), Route("/healthz", show_health), Route("/readyz", show_readiness)]


def _unavailable(why: str) -> Response:
    return error_response(Refused(UNAVAILABLE, why))


def _why_dead(batcher: Batcher[Any, Any]) -> str | None:
    """Return why a batcher will answer nothing more; None while it takes or still answers requests."""
    stats = batcher.stats()
    if stats.failure is not None:
        return f"the batcher failed: {stats.failure}"
    if not batcher.is_open and not stats.num_waiting and not stats.num_running:
        return "the batcher is closed"
    return None


def _closing(
    served: dict[str, Any], batchers: Mapping[str, Batcher[Any, Any]], drain_seconds: float | None
) -> Callable[[Any], Any]:
    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await asyncio.gather(*(batcher.close(timeout_seconds=drain_seconds) for batcher in batchers.values()))
        served.clear()

    return lifespan
