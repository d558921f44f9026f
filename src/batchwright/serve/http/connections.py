"""limited_protocol: uvicorn's HTTP with time limits on incomplete requests, and room for good clients under a flood."""

from __future__ import annotations

import asyncio
import os
import sys
from http import HTTPStatus
from typing import Any, final

from ..._optional import is_installed, require
from .limits import Limits

if is_installed("uvicorn") and is_installed("starlette"):  # otherwise limited_protocol says what to install
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from ._errors import BAD_REQUEST, HEADERS_TOO_LARGE, REQUEST_TIMEOUT, UNAVAILABLE, Refused, as_json, body_of
else:
    H11Protocol = object  # type: ignore[misc, assignment]

# How many connections asyncio accepts in one turn of its loop, and the turns from there until one is closed for them.
ACCEPTED_AT_ONCE = 16
_TURNS = 5
# Files for everything else.
_RESERVE = 32
_MOST_CONNECTIONS = 10_000
# The app has this long to refuse a slow body with an answer before the connection is cut.
_GRACE_SECONDS = 2.0


def limited_protocol(limits: Limits | None = None) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with the limits of connections: ``uvicorn.run(app, http=limited_protocol())``.

    A request whose headers or body come too slowly is cut off. If all connections are in use, a new one takes the place
    of the one that has kept an incomplete request for longest, else of the one that has been idle for longest; if every
    client waits for an answer, the new one is refused with 503.

    Args:
        limits: ``header_seconds``, ``body_seconds``, ``max_header_bytes`` and ``max_connections``; None: the defaults.
    """
    for package in ("uvicorn", "starlette"):
        require(package, extra="serve")
    connections = Connections(Limits() if limits is None else limits)

    @final
    class Limited(_Connection):
        owner = connections

    return Limited


@final
class Connections:
    """The connections of one server, by what they wait for.

    Args:
        limits: what they may take.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._most = limits.max_connections
        # In the order in which each came into its state.
        self._states: dict[str, dict[_Connection, None]] = {"headers": {}, "body": {}, "idle": {}, "busy": {}}

    def move(self, connection: _Connection, state: str | None) -> None:
        """Put a connection under a new state; None takes it out."""
        if connection.state is not None:
            del self._states[connection.state][connection]
        connection.state = state
        if state is not None:
            self._states[state][connection] = None

    def make_room(self, newest: _Connection) -> None:
        """Close a connection if there are too many, with the least loss."""
        if self._most is None:
            self._most = most_connections()
        if sum(map(len, self._states.values())) <= self._most:
            return
        headers, body, idle = (self._states[state] for state in ("headers", "body", "idle"))
        waiting = [next(iter(group)) for group in (headers, body) if group]
        slow = min(waiting, key=lambda connection: connection.since)
        if slow is not newest:
            slow.cut_off()
        elif idle:
            next(iter(idle)).cut_off()
        else:
            newest.refuse()


def most_connections() -> int:
    """Return how many connections this process has files for, besides those that come in before one is closed."""
    if not is_installed("resource"):
        return 1000
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:
        num_open = 64
    return max(8, min(_MOST_CONNECTIONS, allowed - num_open - _RESERVE - _TURNS * ACCEPTED_AT_ONCE))


class _Connection(H11Protocol):
    """One connection: uvicorn's own, which tells its owner what it waits for."""

    owner: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = h11.Connection(h11.SERVER, self.owner.limits.max_header_bytes)
        self.ws_protocol_class = None  # a WebSocket would take the connection away from its owner and its limits
        self.state: str | None = None
        self.since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take a new connection in."""
        super().connection_made(transport)
        self._enter("headers")
        self.owner.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        super().connection_lost(exc)
        self._enter(None)

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        if self.state is not None:
            super().data_received(data)
            self._look()

    def on_response_complete(self) -> None:
        """Note that an answer was written."""
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong with a request that cannot be read."""
        status = getattr(sys.exc_info()[1], "error_status_hint", BAD_REQUEST)
        text = "the headers are too large" if status == HEADERS_TOO_LARGE else msg
        self._write(Refused(status, text))

    def refuse(self) -> None:
        """Refuse a connection for which there is no room."""
        self._write(Refused(UNAVAILABLE, "every connection of the server is in use; try again later"))

    def cut_off(self) -> None:
        """Close a connection without waiting for the client."""
        self._enter(None)
        self.transport.abort()

    def _look(self) -> None:
        """Say what the connection waits for, by the state of the request."""
        if self.state is None or self.transport.is_closing():
            return
        theirs, is_answered = self.conn.their_state, self.cycle is None or self.cycle.response_complete
        if theirs is h11.SEND_BODY:
            self._enter("body")
        elif theirs is not h11.IDLE or not is_answered:
            self._enter("busy")
        else:  # without a byte of the next request, uvicorn's own timer closes it
            self._enter("headers" if self.cycle is None or self.conn.trailing_data[0] else "idle")

    def _enter(self, state: str | None) -> None:
        if state == self.state:
            return
        self.owner.move(self, state)
        self.since = self.loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        limits = self.owner.limits
        seconds = {"headers": limits.header_seconds, "body": limits.body_seconds + _GRACE_SECONDS}.get(state or "")
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cut_off()  # an answer may have begun
        else:
            self._write(Refused(REQUEST_TIMEOUT, f"the {self.state} of the request came too slowly"))

    def _write(self, error: Refused) -> None:
        """Write an error and close; the app has not seen this request."""
        body = as_json(body_of(error))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        reason = HTTPStatus(error.status).phrase
        try:
            response = h11.Response(status_code=error.status, headers=headers, reason=reason)
            parts = [self.conn.send(event) for event in (response, h11.Data(data=body), h11.EndOfMessage())]
        except h11.LocalProtocolError:  # an answer has begun
            self.cut_off()
            return
        self.transport.write(b"".join(parts))
        self.transport.close()
