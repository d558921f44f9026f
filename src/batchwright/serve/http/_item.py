"""Answer one request: read the item, hand it to the batcher, write the answer or say why there is none."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...errors import ArgumentError, QueueFull
from ..batcher import Batcher
from ..settings import as_deadline, as_priority
from ._bodies import BAD_REQUEST, CLIENT_GONE, SERVER_ERROR, TOO_LARGE, Refused, body_of, encode_json, status_of
from ._metrics import Metrics

DEADLINE = "X-Deadline-Ms"
PRIORITY = "X-Priority"
# A refused client is told to wait for as long as requests wait in the queue, within these seconds.
_RETRY_SECONDS = (1, 60)


@final
class ItemEndpoint:
    """Answers ``POST /``.

    Args:
        batcher: takes the items.
        metrics: counts the responses.
        max_body_bytes: a larger body is refused.
        decode: turns a body into an item.
        encode: turns an answer into a body.
        media_type: the media type of that body.
    """

    def __init__(
        self,
        batcher: Batcher[Any, Any],
        metrics: Metrics,
        *,
        max_body_bytes: int,
        decode: Callable[[bytes], Any],
        encode: Callable[[Any], bytes],
        media_type: str,
    ) -> None:
        self._batcher = batcher
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._decode = decode
        self._encode = encode
        self._media_type = media_type

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        start = time.monotonic()
        response = await self._respond(request)
        self._metrics.count(response.status_code, time.monotonic() - start)
        return response

    async def _respond(self, request: Request) -> Response:
        try:
            options = _read_options(request)
            item = self._read_item(await _read_body(request, self._max_body_bytes))
            answer = await _unless_gone(self._batcher.submit(item, **options), request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # what the function raised for this item is its answer
            return self._error(error)
        return self._answer(answer)

    def _read_item(self, body: bytes) -> Any:
        try:
            return self._decode(body)
        except (ValueError, RecursionError) as error:
            raise Refused(BAD_REQUEST, f"the body cannot be read: {error}") from error

    def _answer(self, answer: Any) -> Response:
        try:
            return Response(self._encode(answer), media_type=self._media_type)
        except Exception as error:  # the answer is there, but it cannot be encoded
            return self._error(Refused(SERVER_ERROR, f"the answer cannot be written: {error}"))

    def _error(self, error: Exception) -> Response:
        headers = {}
        if isinstance(error, QueueFull):
            headers["Retry-After"] = str(self._retry_seconds())
        return Response(encode_json(body_of(error)), status_of(error), headers, media_type="application/json")

    def _retry_seconds(self) -> int:
        least, most = _RETRY_SECONDS
        waits = self._metrics.stats().wait_ms
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
