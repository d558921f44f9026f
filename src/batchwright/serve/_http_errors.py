"""Which status and which body a request ends with when it has no answer."""

from __future__ import annotations

from typing import Any, final

from ._errors import Closed, DeadlineExceeded, QueueFull, ResultError

BAD_REQUEST = 400
TOO_LARGE = 413
ITEM_FAILED = 422
# Nobody reads it: the client has gone. It is what proxies write into their logs for that.
CLIENT_GONE = 499
SERVER_ERROR = 500

# What the client reads as the kind of error, where no exception of the batcher or the function has a name for it.
_KINDS = {BAD_REQUEST: "BadRequest", TOO_LARGE: "BodyTooLarge", SERVER_ERROR: "AnswerError"}
# A message may quote the whole item; the client has that already.
_MAX_MESSAGE = 2000

_STATUSES: dict[type[Exception], int] = {QueueFull: 429, Closed: 503, DeadlineExceeded: 504, ResultError: SERVER_ERROR}


@final
class Refused(Exception):
    """The request ends here, before it reaches the batcher.

    Args:
        status: of the response.
        message: says what came and what is allowed.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: Exception) -> int:
    """Return the status for an error; one that is not the batcher's own is the item's.

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
