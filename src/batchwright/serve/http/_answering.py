"""Answering: reads an item or several, hands them to a batcher, and writes the answers or says why there is none."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...errors import ArgumentError, Closed, QueueFull
from ..batcher import Batcher
from ..settings import as_deadline, as_priority
from ._errors import (
    BAD_REQUEST,
    CLIENT_GONE,
    REQUEST_TIMEOUT,
    SERVER_ERROR,
    TOO_LARGE,
    Refused,
    as_json,
    body_of,
    error_response,
    status_of,
)
from ._metrics import Metrics
from .limits import Limits

DEADLINE = "X-Deadline-Ms"
PRIORITY = "X-Priority"
# A refused client is told to wait for as long as requests wait in the queue, within these seconds.
_RETRY_SECONDS = (1, 60)
# Python reads no number of thousands of digits.
_MAX_DIGITS = 20


def decode_json(body: bytes) -> Any:
    """Read one JSON value; NaN and infinity are not JSON, and a number beyond all floats would become infinity.

    >>> decode_json(b'{"text": "to be"}')
    {'text': 'to be'}
    """
    try:
        return json.loads(body, parse_constant=_refuse, parse_float=_as_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON: {error.msg}; a text needs its quotes, such as "one text"') from error


def encode_json(answer: Any) -> bytes:
    """Write an answer as JSON; values with ``tolist``, such as arrays and tensors, become lists.

    >>> import numpy as np
    >>> encode_json({"vector": np.array([1.5, 2.0])})
    b'{"vector":[1.5,2.0]}'
    """
    return as_json(answer, default=_as_list)


@final
@dataclass(frozen=True)
class Format:
    """How bodies are read and written.

    Args:
        max_body_bytes: a larger body is refused.
        decode: turns a body into an item.
        encode: turns an answer into a body.
        media_type: the media type of that body.
    """

    max_body_bytes: int
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    media_type: str

    def read_item(self, body: bytes) -> Any:
        """Return the item of a body."""
        try:
            return self.decode(body)
        except (ValueError, RecursionError) as error:
            raise Refused(BAD_REQUEST, f"the body cannot be read: {error}") from error

    def read_items(self, body: bytes, max_items: int) -> list[Any]:
        """Return the items of a body that is a JSON list; each is an item or the error of reading it."""
        try:
            values = decode_json(body)
        except (ValueError, RecursionError) as error:
            raise Refused(BAD_REQUEST, f"the body cannot be read: {error}") from error
        if not isinstance(values, list):
            raise Refused(BAD_REQUEST, f"the body must be a JSON list of items, got {type(values).__name__}")
        if len(values) > max_items:
            message = f"{len(values)} items in one request, at most {max_items} are allowed; send several requests"
            raise Refused(TOO_LARGE, message, kind="TooManyItems")
        return values if self.decode is decode_json else list(map(self._read_part, values))

    def _read_part(self, value: Any) -> Any:
        try:
            return self.read_item(as_json(value))
        except Refused as error:
            return error

    def write(self, answer: Any) -> bytes:
        """Return the body of an answer."""
        try:
            return self.encode(answer)
        except Exception as error:  # the answer is there, but it cannot be encoded
            raise Refused(SERVER_ERROR, f"the answer cannot be written: {error}", kind="AnswerError") from error

    def write_part(self, outcome: Any) -> bytes:
        """Return one element of the answers to several items."""
        if not isinstance(outcome, BaseException):
            try:
                return b'{"result":' + self.write(outcome) + b"}"
            except Refused as error:
                outcome = error
        return as_json({**body_of(outcome), "status": status_of(outcome)})


@final
@dataclass(frozen=True)
class Answering:
    """Answers the requests for one batcher.

    Args:
        batcher: takes the items.
        metrics: counts the responses.
        name: the name of the model in the metrics; empty for the only one.
        limits: what a request may take.
        form: how bodies are read and written.
    """

    batcher: Batcher[Any, Any]
    metrics: Metrics
    name: str
    limits: Limits
    form: Format

    async def one(self, request: Request) -> Response:
        """Answer a request of one item."""
        return await self._counted(self._one, request)

    async def several(self, request: Request) -> Response:
        """Answer a request of several items, in order, each with its own result or error."""
        return await self._counted(self._several, request)

    async def _counted(self, answer: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
        start = time.monotonic()
        try:
            response = await answer(request)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_GONE)
        except Exception as error:  # what the function raised for this item is its answer
            response = self._error(error)
        self.metrics.count(response.status_code, time.monotonic() - start, self.name)
        return response

    async def _one(self, request: Request) -> Response:
        options = read_options(request, self.limits)
        item = self.form.read_item(await self._read_body(request))
        answer = await _unless_gone(self.batcher.submit(item, **options), request)
        return Response(self.form.write(answer), media_type=self.form.media_type)

    async def _several(self, request: Request) -> Response:
        options = read_options(request, self.limits)
        items = self.form.read_items(await self._read_body(request), self.limits.max_items)
        outcomes: list[Any] = await _unless_gone(self._submit_all(items, options), request)
        for refused in (QueueFull, Closed):  # nothing ran, and the client should come again
            if outcomes and all(isinstance(outcome, refused) for outcome in outcomes):
                raise outcomes[0]
        body = b"[" + b",".join(map(self.form.write_part, outcomes)) + b"]"
        return Response(body, media_type="application/json")

    async def _submit_all(self, items: list[Any], options: dict[str, Any]) -> list[Any]:
        # A task of its own: a gathering that is cancelled would be reported as an error that nobody has seen.
        return await asyncio.gather(*(self._submit(item, options) for item in items), return_exceptions=True)

    async def _submit(self, item: Any, options: dict[str, Any]) -> Any:
        if isinstance(item, Refused):
            raise item
        return await self.batcher.submit(item, **options)

    async def _read_body(self, request: Request) -> bytes:
        seconds = self.limits.body_seconds
        try:
            return await asyncio.wait_for(read_body(request, self.form.max_body_bytes), seconds)
        except asyncio.TimeoutError:
            message = f"the body took longer than the {seconds:g} seconds that are allowed"
            raise Refused(REQUEST_TIMEOUT, message) from None

    def _error(self, error: Exception) -> Response:
        headers = {"Retry-After": str(self._retry_seconds())} if isinstance(error, QueueFull) else {}
        return error_response(error, headers)

    def _retry_seconds(self) -> int:
        least, most = _RETRY_SECONDS
        waits = self.metrics.stats(self.name).wait_ms
        return min(most, max(least, math.ceil(waits.get("p99", 0.0) / 1e3)))


def read_options(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the options of ``submit`` that the headers name."""
    options = {}
    for header, name, convert, most in (
        (DEADLINE, "deadline_ms", as_deadline, limits.max_deadline_ms),
        (PRIORITY, "priority", as_priority, limits.max_priority),
    ):
        text = request.headers.get(header)
        if text is not None:
            options[name] = read_number(header, text, convert, most)
    return options


def read_number(header: str, text: str, convert: Callable[[Any], float], most: float = math.inf) -> float:
    """Return the number of a header, or say what is wrong with it."""
    try:
        number = convert(float(text.replace("_", "?")))  # in Python an underscore may stand inside of a number
    except ArgumentError as error:
        raise Refused(BAD_REQUEST, f"{header}: {error}") from None
    except ValueError:
        raise Refused(BAD_REQUEST, f"{header} must be a number, got {text!r}") from None
    if number > most:
        raise Refused(BAD_REQUEST, f"{header} must be at most {most:g} on this server, got {text}")
    return number


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read no more than is allowed, whatever the client announces or sends."""
    named = request.headers.get("Content-Length", "")
    if named.isdecimal() and (len(named) > _MAX_DIGITS or int(named) > max_bytes):
        raise Refused(TOO_LARGE, f"the body has {named[:_MAX_DIGITS]} bytes or more, at most {max_bytes} are allowed")
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


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _as_finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is larger than any float")
    return number


def _as_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON; return plain values, or pass encode=")
