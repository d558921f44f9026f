"""What a client reads when there is no answer: one status and one shape of JSON for every error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, final

from starlette.responses import Response

from ..._oom import text_of
from ...errors import Closed, DeadlineExceeded, QueueFull, ResultError, RunInterrupted, RunTimeout, WorkerDied

BAD_REQUEST = 400
FORBIDDEN = 403
NOT_FOUND = 404
REQUEST_TIMEOUT = 408
TOO_LARGE = 413
ITEM_FAILED = 422
HEADERS_TOO_LARGE = 431
# Nobody reads this status, since the client has gone. Proxies write it into their logs.
CLIENT_GONE = 499
SERVER_ERROR = 500
UNAVAILABLE = 503

# The name of an error that does not come from the batcher or the function; others are named by their phrase.
_KINDS = {
    TOO_LARGE: "BodyTooLarge",
    HEADERS_TOO_LARGE: "HeadersTooLarge",
    SERVER_ERROR: "ServerError",
}
# A message may quote the whole item, which the client already has.
_MAX_MESSAGE = 2000

_STATUSES: dict[type[Exception], int] = {
    QueueFull: 429,
    Closed: UNAVAILABLE,
    DeadlineExceeded: 504,
    RunTimeout: 504,
    ResultError: SERVER_ERROR,
    RunInterrupted: SERVER_ERROR,
    WorkerDied: SERVER_ERROR,
}


@final
class Refused(Exception):
    """The request ends here, without the batcher.

    Args:
        status: the status of the response.
        message: says what came and what is allowed.
        kind: the name of the error; None: by the status.
    """

    def __init__(self, status: int, message: str, *, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or kind_of(status)


def kind_of(status: int) -> str:
    """Return the name of an error by its status.

    >>> kind_of(413), kind_of(404), kind_of(405)
    ('BodyTooLarge', 'NotFound', 'MethodNotAllowed')
    """
    return _KINDS.get(status) or HTTPStatus(status).phrase.title().replace(" ", "")


def status_of(error: BaseException) -> int:
    """Return the status for an error; an error that is not the batcher's own belongs to the item.

    >>> status_of(QueueFull("full")), status_of(KeyError("text"))
    (429, 422)
    """
    if isinstance(error, Refused):
        return error.status
    return _STATUSES.get(type(error), ITEM_FAILED)  # type: ignore[arg-type]


def body_of(error: BaseException) -> dict[str, Any]:
    """Return what the client reads: the kind of error, its message, and for a deadline the times.

    >>> body_of(ValueError("no text"))
    {'error': 'ValueError', 'message': 'no text'}
    """
    kind = error.kind if isinstance(error, Refused) else type(error).__name__
    body: dict[str, Any] = {"error": kind, "message": text_of(error)[:_MAX_MESSAGE]}
    if isinstance(error, DeadlineExceeded):
        predicted = error.predicted_seconds
        body["deadline_ms"] = error.deadline_seconds * 1e3
        body["waited_ms"] = error.waited_seconds * 1e3
        body["predicted_ms"] = None if predicted is None else predicted * 1e3
    return body


def error_response(error: BaseException, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to an error; one that came before the whole body ends the connection."""
    status = status_of(error)
    # Otherwise a client could go on sending the rest of a body that nobody wants.
    closing = {"Connection": "close"} if status in (REQUEST_TIMEOUT, TOO_LARGE, HEADERS_TOO_LARGE) else {}
    return Response(as_json(body_of(error)), status, {**closing, **(headers or {})}, media_type="application/json")


def as_json(value: Any, **options: Any) -> bytes:
    """Write a value as JSON in ASCII: JSON can hold half of a surrogate pair, and UTF-8 cannot.

    >>> as_json({"text": "ä"})
    b'{"text":"\\\\u00e4"}'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":"), **options).encode("ascii")
