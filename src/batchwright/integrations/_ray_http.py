"""One item over HTTP: JSON in, JSON out, refusals as status codes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import ArgumentError, BatchwrightError
from ..serve import Closed, DeadlineExceeded, QueueFull, TooLarge

# The first that fits: TooLarge is an ArgumentError too.
STATUS: tuple[tuple[type[BatchwrightError], int], ...] = (
    (TooLarge, 413),
    (ArgumentError, 400),
    (QueueFull, 429),
    (Closed, 503),
    (DeadlineExceeded, 504),
)


async def respond(request: Request, submit: Callable[..., Awaitable[Any]]) -> Response:
    """Answer a request whose body is an item.

    Args:
        request: its headers ``X-Deadline-Ms`` and ``X-Priority`` are the options.
        submit: takes the item, ``deadline_ms`` and ``priority``, and gives the answer.

    Returns:
        The answer, or why the item was refused. Errors of the item itself are raised, as a 500 of Ray's.
    """
    try:
        return _json(await submit(await _item(request), **_options(request.headers)))
    except tuple(kind for kind, _ in STATUS) as error:
        status = next(status for kind, status in STATUS if isinstance(error, kind))
        return JSONResponse({"error": type(error).__name__, "message": str(error)}, status)


async def _item(request: Request) -> Any:
    try:
        return await request.json()
    except ValueError as error:
        raise ArgumentError(f"the body must be one item as JSON: {error}") from None


def _options(headers: Mapping[str, str]) -> dict[str, float]:
    names = {"deadline_ms": "X-Deadline-Ms", "priority": "X-Priority"}
    return {option: _number(header, headers[header]) for option, header in names.items() if header in headers}


def _number(header: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"{header} must be a number, got {text!r}") from None


def _json(answer: Any) -> Response:
    return Response(json.dumps(answer, default=_plain, allow_nan=False), media_type="application/json")


def _plain(value: Any) -> Any:
    """Return an array, a tensor or a NumPy number as plain values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the batched function returned {type(value).__name__}, which JSON cannot hold")
