"""Bodies and statuses: items and answers as JSON, and what a client reads when there is no answer."""

from __future__ import annotations

import json
from typing import Any, NoReturn, final

from ...errors import Closed, DeadlineExceeded, QueueFull, ResultError

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
