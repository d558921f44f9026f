"""make_app: an ASGI app that answers HTTP requests from a batcher, one item per request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from ..._checks import as_flag, as_number, as_whole
from ..._optional import require
from ...errors import ArgumentError
from ..batcher import Batcher
from ..decorator import BatchedFunction
from ._bodies import decode_json, encode_json

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


def make_app(
    batcher: Batcher[Any, Any] | BatchedFunction,
    *,
    max_body_bytes: int = 1_000_000,
    decode: Callable[[bytes], Any] = decode_json,
    encode: Callable[[Any], bytes] = encode_json,
    media_type: str = "application/json",
    ready: Callable[[], bool] | None = None,
    drain_seconds: float | None = 30.0,
    page: bool = True,
) -> Starlette:
    """Return an ASGI app that answers ``POST /`` from a batcher.

    The body is one item. The headers ``X-Deadline-Ms`` and ``X-Priority`` are the options of ``Batcher.submit``. A
    client that disconnects cancels its request.

    ======  =================================================================================
    status  means
    ======  =================================================================================
    200     the answer
    400     the body or a header cannot be read
    413     the body is over ``max_body_bytes``
    422     the function failed on this item, or the item alone is over ``max_tokens``
    429     the queue is full; ``Retry-After`` says when to try again
    500     the function did not return one result per item, or the answer cannot be encoded
    503     the batcher drains or is closed
    504     the deadline cannot be met, so the item was not run; ``predicted_ms`` says when it would have finished
    ======  =================================================================================

    Every response but 200 has a JSON body with ``error`` and ``message``. ``GET /metrics`` is for Prometheus,
    ``/healthz`` says that the process lives, ``/readyz`` that it takes requests, ``GET /`` is a page with live plots.

    Args:
        batcher: a ``Batcher`` or a function under ``@batched``. The app drains and closes it when the server ends.
        max_body_bytes: a larger body is refused before it is read.
        decode: turns a body into an item; raises ``ValueError`` if it cannot.
        encode: turns an answer into a body.
        media_type: the media type of that body.
        ready: asked by ``/readyz``, for example while weights still load; None: always ready.
        drain_seconds: how long the end of the server waits for requests that were taken; None: as long as it takes.
        page: also serve the page and its figures, ``/live``.

    Returns:
        A Starlette app, which any ASGI server runs.

    >>> app = make_app(Batcher(lambda texts: [text.upper() for text in texts]))
    >>> sorted(route.path for route in app.routes)
    ['/', '/', '/healthz', '/live', '/metrics', '/readyz']
    """
    require("starlette", extra="serve")
    require("prometheus_client", extra="serve")
    from starlette.applications import Starlette
    from starlette.routing import Route

    from ._item import ItemEndpoint
    from ._metrics import Metrics

    max_bytes = as_whole("max_body_bytes", max_body_bytes, least=1)
    if drain_seconds is not None:
        drain_seconds = as_number("drain_seconds", drain_seconds, least=0, infinite=True)
    batcher = _batcher_of(batcher)
    metrics = Metrics(batcher.stats)
    post = ItemEndpoint(batcher, metrics, max_body_bytes=max_bytes, decode=decode, encode=encode, media_type=media_type)
    routes = [Route("/", post.respond, methods=["POST"]), *_watching(batcher, metrics, ready)]
    if as_flag("page", page):
        from ._page import figures_of_server, page_routes

        routes += page_routes(lambda: figures_of_server(batcher))
    return Starlette(routes=routes, lifespan=_closing(batcher, drain_seconds))


def _batcher_of(batcher: Any) -> Batcher[Any, Any]:
    found = batcher.batcher if isinstance(batcher, BatchedFunction) else batcher
    if not isinstance(found, Batcher):
        raise ArgumentError(f"make_app takes a Batcher or a function under @batched, got {batcher!r}")
    return found


def _watching(batcher: Batcher[Any, Any], metrics: Any, ready: Callable[[], bool] | None) -> list[Any]:
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    from ._metrics import CONTENT_TYPE

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def show_health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def show_readiness(request: Request) -> Response:
        if not batcher.is_open:
            return PlainTextResponse("draining\n", 503)
        if ready is not None and not ready():
            return PlainTextResponse("not ready\n", 503)
        return PlainTextResponse("ready\n")

    return [Route("/metrics", show_metrics), Route("/healthz", show_health), Route("/readyz", show_readiness)]


def _closing(batcher: Batcher[Any, Any], drain_seconds: float | None) -> Callable[[Any], Any]:
    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await batcher.close(timeout_seconds=drain_seconds)

    return lifespan
