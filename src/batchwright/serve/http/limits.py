"""Limits: what one client may ask of the server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from ..._checks import as_number, as_whole
from ..settings import MAX_PRIORITY


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request and one connection may take; anything beyond is refused with the reason.

    The app keeps the limits of a request, whatever server runs it. Those of a connection (``header_seconds``,
    ``max_connections``) need ``uvicorn.run(app, http=limited_protocol(limits))``, as ``batchwright serve`` does.

    Args:
        max_items: the most items in a request of several.
        max_deadline_ms: the longest deadline that a client may name; ``math.inf``: any.
        max_priority: the highest priority that a client may name; every lower one is allowed.
        max_headers: the most headers of a request.
        max_header_bytes: the most bytes of all headers.
        header_seconds: the time that the headers of a request may take.
        body_seconds: the time that the body of a request may take.
        max_connections: the most connections at once; None: as many as this process may open files, less a reserve.
            One more closes the connection that has kept an incomplete request for longest.

    >>> Limits(max_items=0)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: max_items must be a whole number of 1 or more, got 0
    """

    max_items: int = 256
    max_deadline_ms: float = 600_000.0
    max_priority: float = 4.0
    max_headers: int = 100
    max_header_bytes: int = 16_384
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    max_connections: int | None = None

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {
            name: as_whole(name, getattr(self, name), least=1)
            for name in ("max_items", "max_headers", "max_header_bytes")
        }
        for name in ("header_seconds", "body_seconds"):
            plain[name] = as_number(name, getattr(self, name), above=0, below=math.inf)
        plain["max_deadline_ms"] = as_number("max_deadline_ms", self.max_deadline_ms, above=0, infinite=True)
        plain["max_priority"] = as_number("max_priority", self.max_priority, least=-MAX_PRIORITY, most=MAX_PRIORITY)
        if self.max_connections is not None:
            plain["max_connections"] = as_whole("max_connections", self.max_connections, least=1)
        for name, value in plain.items():
            object.__setattr__(self, name, value)
