"""One request: read the item, hand it to the batcher, write the answer or say why there is none."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..errors import ArgumentError
from ._errors import QueueFull
from ._http_errors import BAD_REQUEST, CLIENT_GONE, SERVER_ERROR, TOO_LARGE, Refused, body_of, status_of
from ._http_json import encode_json
from ._metrics import Metrics
from ._settings import check_deadline, check_priority
from .batcher import Batcher

DEADLINE = "X-Deadline-Ms"
PRIORITY = "X-Priority"
# A client that was refused is told to wait as long as the queue is, in seconds.
_RETRY_SECONDS = (1, 60)


@final
class ItemEndpoint:
    """Answers ``POST /``.

    Args:
        batcher: where items go.
        metrics: counts responses.
        max_body_bytes: a larger body is refused.
        decode: makes an item of a body.
        encode: makes a body of an answer.
        media_type: of that body.
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
        except Exception as error:  # whatever the function raised for this item is its answer
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
        except Exception as error:  # the item has been computed; only writing it down failed
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
    for header, name, check in ((DEADLINE, "deadline_ms", check_deadline), (PRIORITY, "priority", check_priority)):
        text = request.headers.get(header)
        if text is not None:
            options[name] = _read_number(header, text, check)
    return options


def _read_number(header: str, text: str, check: Callable[[Any], None]) -> float:
    try:
        number = float(text)
        check(number)
    except ArgumentError as error:
        raise Refused(BAD_REQUEST, f"{header}: {error}") from None
    except ValueError:
        raise Refused(BAD_REQUEST, f"{header} must be a number, got {text!r}") from None
    return number


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read no more than allowed, whatever the client says or sends."""
    named = request.headers.get("Content-Length", "")
    if named.isdecimal() and int(named) > max_bytes:
        raise Refused(TOO_LARGE, f"the body has {named} bytes, allowed are {max_bytes}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise Refused(TOO_LARGE, f"the body has more than the {max_bytes} bytes allowed")
    return bytes(body)


async def _unless_gone(submitted: Any, request: Request) -> Any:
    """Return the answer, or cancel the request and raise ``ClientDisconnect`` where nobody waits for it any more."""
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
