"""make_app: an ASGI app that answers HTTP requests from a batcher, one item per request.

``Answering`` reads an item, hands it to the batcher, and writes the answer or says why there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, final

from ..._checks import as_flag, as_number, as_whole
from ..._optional import is_installed, require
from ...errors import ArgumentError, Closed, DeadlineExceeded, QueueFull, ResultError
from ..batcher import Batcher
from ..decorator import BatchedFunction
from ..settings import as_deadline, as_priority

if is_installed("starlette") and is_installed("prometheus_client"):  # otherwise make_app says what to install
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    from ._metrics import CONTENT_TYPE, Metrics
    from ._page import figures_of_server, page_routes

DEADLINE = "X-Deadline-Ms"
PRIORITY = "X-Priority"
# A refused client is told to wait for as long as requests wait in the queue, within these seconds.
_RETRY_SECONDS = (1, 60)

BAD_REQUEST = 400
TOO_LARGE = 413
ITEM_FAILED = 422
# Nobody reads this status, since the client has gone. Proxies write it into their logs.
CLIENT_GONE = 499
SERVER_ERROR = 500

# The name of an error that does not come from the batcher or the function.
_KINDS = {BAD_REQUEST: "BadRequest", TOO_LARGE: "BodyTooLarge", SERVER_ERROR: "AnswerError"}
# A message may quote the whole item, which the client already has.
_MAX_MESSAGE = 2000

_STATUSES: dict[type[Exception], int] = {QueueFull: 429, Closed: 503, DeadlineExceeded: 504, ResultError: SERVER_ERROR}


def decode_json(body: bytes) -> Any:
    """Read one JSON value; NaN and infinity are not JSON.

    >>> decode_json(b'{"text": "to be"}')
    {'text': 'to be'}
    """
    return json.loads(body, parse_constant=_refuse)


def encode_json(answer: Any) -> bytes:
    """Write an answer as JSON; values with ``tolist``, such as arrays and tensors, become lists.

    >>> import numpy as np
    >>> encode_json({"vector": np.array([1.5, 2.0])})
    b'{"vector":[1.5,2.0]}'
    """
    # Everything but ASCII is escaped: JSON can hold half of a surrogate pair, and UTF-8 cannot.
    return json.dumps(answer, default=_as_list, allow_nan=False, separators=(",", ":")).encode("ascii")


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
    max_bytes = as_whole("max_body_bytes", max_body_bytes, least=1)
    if drain_seconds is not None:
        drain_seconds = as_number("drain_seconds", drain_seconds, least=0, infinite=True)
    batcher = _batcher_of(batcher)
    metrics = Metrics(batcher.stats)
    answering = Answering(batcher, metrics, max_bytes, decode, encode, media_type)
    routes = [Route("/", answering.respond, methods=["POST"]), *_watching(batcher, metrics, ready)]
    if as_flag("page", page):
        routes += page_routes(lambda: figures_of_server(batcher))
    return Starlette(routes=routes, lifespan=_closing(batcher, drain_seconds))


def _batcher_of(batcher: Any) -> Batcher[Any, Any]:
    found = batcher.batcher if isinstance(batcher, BatchedFunction) else batcher
    if not isinstance(found, Batcher):
        raise ArgumentError(f"make_app takes a Batcher or a function under @batched, got {batcher!r}")
    return found


def _watching(batcher: Batcher[Any, Any], metrics: Metrics, ready: Callable[[], bool] | None) -> list[Route]:
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


@final
@dataclass(frozen=True)
class Answering:
    """Answers ``POST /``.

    Args:
        batcher: takes the items.
        metrics: counts the responses.
        max_body_bytes: a larger body is refused.
        decode: turns a body into an item.
        encode: turns an answer into a body.
        media_type: the media type of that body.
    """

    batcher: Batcher[Any, Any]
    metrics: Metrics
    max_body_bytes: int
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    media_type: str

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        start = time.monotonic()
        response = await self._respond(request)
        self.metrics.count(response.status_code, time.monotonic() - start)
        return response

    async def _respond(self, request: Request) -> Response:
        try:
            options = _read_options(request)
            item = self._read_item(await _read_body(request, self.max_body_bytes))
            answer = await _unless_gone(self.batcher.submit(item, **options), request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # what the function raised for this item is its answer
            return self._error(error)
        return self._answer(answer)

    def _read_item(self, body: bytes) -> Any:
        try:
            return self.decode(body)
        except (ValueError, RecursionError) as error:
            raise Refused(BAD_REQUEST, f"the body cannot be read: {error}") from error

    def _answer(self, answer: Any) -> Response:
        try:
            return Response(self.encode(answer), media_type=self.media_type)
        except Exception as error:  # the answer is there, but it cannot be encoded
            return self._error(Refused(SERVER_ERROR, f"the answer cannot be written: {error}"))

    def _error(self, error: Exception) -> Response:
        headers = {}
        if isinstance(error, QueueFull):
            headers["Retry-After"] = str(self._retry_seconds())
        return Response(encode_json(body_of(error)), status_of(error), headers, media_type="application/json")

    def _retry_seconds(self) -> int:
        least, most = _RETRY_SECONDS
        waits = self.metrics.stats().wait_ms
        return min(most, max(least, math.ceil(waits.get("p99", 0.0) / 1e3)))


def _read_options(request: Request) -> dict[str, Any]:
    """Return the options of ``submit`` that the headers name."""
    options = {}
    for header, name, convert in ((DEADLINE, "deadline_ms", as_deadline), (PRIORITY, "priority", as_priority)):
        text = request.headers.get(header)
        if text is not None:
            options[name] = _read_number(header, text, convert)
    return options


def _read_number(header: str, text: str, convert: Callable[[Any], float]) -> float:
    try:
        return convert(float(text))
    except ArgumentError as error:
        raise Refused(BAD_REQUEST, f"{header}: {error}") from None
    except ValueError:
        raise Refused(BAD_REQUEST, f"{header} must be a number, got {text!r}") from None


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read no more than is allowed, whatever the client announces or sends."""
    named = request.headers.get("Content-Length", "")
    if named.isdecimal() and int(named) > max_bytes:
        raise Refused(TOO_LARGE, f"the body has {named} bytes, at most {max_bytes} are allowed")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise Refused(TOO_LARGE, f"the body has more than the {max_bytes} bytes that are allowed")
    return bytes(body)


async def _unless_gone(submitted: Any, request: Request) -> Any:
    """Return the answer; if the client disconnects first, cancel the request and raise ``ClientDisconnect``."""
    answer = asyncio.ensure_future(submitted)
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        gone.cancel()
        answer.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@final
class Refused(Exception):
    """The request ends here, without the batcher.

    Args:
        status: the status of the response.
        message: says what came and what is allowed.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: Exception) -> int:
    """Return the status for an error; an error that is not the batcher's own belongs to the item.

    >>> status_of(QueueFull("full")), status_of(KeyError("text"))
    (429, 422)
    """
    return error.status if isinstance(error, Refused) else _STATUSES.get(type(error), ITEM_FAILED)


def body_of(error: Exception) -> dict[str, Any]:
    """Return what the client reads: the kind of error, its message, and for a deadline the times.

    >>> body_of(ValueError("no text"))
    {'error': 'ValueError', 'message': 'no text'}
    """
    kind = _KINDS[error.status] if isinstance(error, Refused) else type(error).__name__
    body: dict[str, Any] = {"error": kind, "message": str(error)[:_MAX_MESSAGE]}
    if isinstance(error, DeadlineExceeded):
        predicted = error.predicted_seconds
        body["deadline_ms"] = error.deadline_seconds * 1e3
        body["waited_ms"] = error.waited_seconds * 1e3
        body["predicted_ms"] = None if predicted is None else predicted * 1e3
    return body


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _as_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON; return plain values, or pass encode=")
