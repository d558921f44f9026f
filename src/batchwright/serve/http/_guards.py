"""Guard: refuses what a web page of somebody else could send to this server, and headers beyond the limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import ArgumentError
from ._errors import BAD_REQUEST, FORBIDDEN, HEADERS_TOO_LARGE, NOT_FOUND, SERVER_ERROR, Refused, error_response
from .limits import Limits

# Requests that change nothing: what they answer, another site cannot read.
_SAFE = ("GET", "HEAD", "OPTIONS")
_PORTS = {"http": "80", "https": "443"}
# On every response: a browser takes the type as it is named, and other sites embed nothing.
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
_ALLOWED_HEADERS = "Content-Type, X-Deadline-Ms, X-Priority"


def guarded_app(
    routes: Sequence[Route],
    lifespan: Callable[[Any], Any],
    limits: Limits,
    *,
    allow_hosts: Iterable[str] | None,
    allow_origins: Iterable[str],
) -> Starlette:
    """Return an app of routes whose every error is JSON, with the guards around it."""
    guard = Middleware(
        Guard, limits=limits, hosts=check_names("allow_hosts", allow_hosts), origins=check_origins(allow_origins)
    )
    handlers: Any = {HTTPException: _show_error, Exception: _show_failure}
    return Starlette(routes=list(routes), lifespan=lifespan, middleware=[guard], exception_handlers=handlers)


@final
@dataclass(frozen=True)
class Guard:
    """An ASGI app around another one.

    Args:
        app: answers what is let through.
        limits: how many and how large headers may be.
        hosts: names that ``Host`` may carry, besides localhost and addresses in numbers; ``*.example.org`` for all
            below one, ``*`` for all. None: any. A name of somebody else may lead to this machine (DNS rebinding), and
            a page under it could then read the answers; an address in numbers cannot.
        origins: other sites whose pages may send requests and read the answers, such as ``https://app.example.org``.
    """

    app: ASGIApp
    limits: Limits
    hosts: Sequence[str] | None
    origins: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, hand on or refuse a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("Origin")
        shared = _shared_with(origin) if origin is not None and origin in self.origins else {}
        refusal = self._refusal(scope, headers, origin)
        answer: ASGIApp = self.app
        if refusal is not None:
            answer = error_response(refusal)
        elif scope["method"] == "OPTIONS" and shared and "Access-Control-Request-Method" in headers:
            answer = Response(status_code=204)
        await answer(scope, receive, _adding({**_HEADERS, **shared}, send))

    def _refusal(self, scope: Scope, headers: Headers, origin: str | None) -> Refused | None:
        check = _too_many(scope["headers"], self.limits)
        if check is None and self.hosts is not None:
            check = _wrong_host(headers.getlist("Host"), self.hosts)
        if check is None and (scope["method"] not in _SAFE or "Access-Control-Request-Method" in headers):
            check = _cross_site(headers, origin, self.origins)
        return check


async def _show_error(request: Request, error: Exception) -> Response:
    """Answer a path or a method that is not served."""
    assert isinstance(error, HTTPException)
    root = request.scope.get("root_path", "")
    answering = [root + route.path for route in request.app.routes if "POST" in (route.methods or ())]
    reason = "nothing is served here" if error.status_code == NOT_FOUND else error.detail
    message = f"{request.method} {request.url.path}: {reason}; send items by POST to {', '.join(answering)}"
    return error_response(Refused(error.status_code, message), error.headers)


async def _show_failure(request: Request, error: Exception) -> Response:
    """Answer a mistake of the app itself; the server logs it."""
    return error_response(Refused(SERVER_ERROR, "the server failed; its log says why"))


def check_names(name: str, values: Iterable[str] | None) -> list[str] | None:
    """Return names of hosts or origins as a list; a single text would be taken for its letters."""
    if values is None:
        return None
    found = [values] if isinstance(values, str) else list(values)
    for value in found:
        if not isinstance(value, str) or not value:
            raise ArgumentError(f"{name} must hold names, got {value!r}")
    return found


def check_origins(origins: Iterable[str]) -> list[str]:
    """Return origins as a list; each is a scheme, a host and a port, as browsers write it, or ``null``.

    >>> check_origins(["https://app.example.org"])
    ['https://app.example.org']
    """
    found = check_names("allow_origins", origins) or []
    for origin in found:
        scheme, _, rest = origin.partition("://")
        if origin != "null" and (scheme not in _PORTS or not rest or "/" in rest or origin != origin.lower()):
            raise ArgumentError(
                f"{origin!r} is not an origin; write a scheme and a host in small letters and no path, for example "
                "https://app.example.org"
            )
    return found


def _too_many(headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> Refused | None:
    if len(headers) > limits.max_headers:
        return Refused(HEADERS_TOO_LARGE, f"{len(headers)} headers, at most {limits.max_headers} are allowed")
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if num_bytes > limits.max_header_bytes:
        return Refused(
            HEADERS_TOO_LARGE, f"the headers have {num_bytes} bytes, at most {limits.max_header_bytes} are allowed"
        )
    return None


def _wrong_host(named: list[str], allowed: Sequence[str]) -> Refused | None:
    host = host_of(named[0]) if len(named) == 1 else None
    if host is not None and (host == "localhost" or _is_address(host) or any(_matches(host, name) for name in allowed)):
        return None
    shown = ", ".join(named) or "nothing"
    return Refused(
        BAD_REQUEST,
        f"Host names {shown}, which this server does not answer to; start it with --allow-host, or pass allow_hosts",
        kind="HostNotAllowed",
    )


def host_of(named: str) -> str | None:
    """Return the host of a ``Host`` header without its port, None if it has none.

    >>> host_of("Example.org:8000"), host_of("[::1]:80"), host_of("::1"), host_of("")
    ('example.org', '::1', '::1', None)
    """
    named = named.strip().lower()
    if named.startswith("["):
        return named[1:].partition("]")[0] or None
    if named.count(":") == 1:
        named = named.partition(":")[0]
    return named.removesuffix(".") or None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _matches(host: str, name: str) -> bool:
    name = name.lower()
    return name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]))


def _cross_site(headers: Headers, origin: str | None, allowed: Sequence[str]) -> Refused | None:
    """Refuse what a browser sends for another site; other clients send neither header."""
    site = headers.get("Sec-Fetch-Site")
    if origin in allowed:
        return None
    if site in ("same-origin", "none") or (site is None and (origin is None or _is_same(origin, headers.get("Host")))):
        return None
    return Refused(
        FORBIDDEN,
        f"a page of another site ({origin or site}) sent this; start the server with --allow-origin, or pass "
        "allow_origins",
        kind="CrossSite",
    )


def _is_same(origin: str, host: str | None) -> bool:
    """Say whether an origin is the host that was asked; a proxy may have taken the encryption off."""
    scheme, _, named = origin.partition("://")
    port = _PORTS.get(scheme)
    return host is not None and port is not None and _with_port(named, port) == _with_port(host, port)


def _with_port(host: str, port: str) -> str:
    host = host.strip().lower()
    return host if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else f"{host}:{port}"


def _shared_with(origin: str) -> dict[str, str]:
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": _ALLOWED_HEADERS,
        "Access-Control-Expose-Headers": "Retry-After",
        "Vary": "Origin",
    }


def _adding(headers: dict[str, str], send: Send) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            found: Any = MutableHeaders(scope=message)
            for name, value in headers.items():
                found.setdefault(name, value)
        await send(message)

    return add
