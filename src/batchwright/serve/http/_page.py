"""The live page and the figures it draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..._charts import page
from ..batcher import Batcher
from ..stats import Stats

# No other page may show this one in a frame, open it with a handle on it, or learn its address.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{page.POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def page_routes(read: Callable[[], dict[str, Any]]) -> list[Route]:
    """Return the routes of the page.

    Args:
        read: returns the figures of ``/live``: ``arms``, ``deadline_ms``, ``load``.
    """
    content = render_page()

    async def show_page(request: Request) -> Response:
        return HTMLResponse(content, headers=_HEADERS)

    async def show_figures(request: Request) -> Response:
        return JSONResponse(read(), headers={"Cache-Control": "no-store"})

    return [Route("/", show_page), Route("/live", show_figures)]


def render_page() -> str:
    """Return the page as HTML that needs no other file."""
    body, script = (page.read_asset(__package__, f"live/{name}") for name in ("page.html", "script.js"))
    return page.render_page("batchwright serve", body, scripts=[script])


def figures_of_server(batchers: Mapping[str, Batcher[Any, Any]]) -> dict[str, Any]:
    """Return the figures of ``/live`` for the batchers of a server, by name."""
    arms = [figures_of(name, batcher.stats()) for name, batcher in batchers.items()]
    deadlines = {batcher.settings.deadline_ms for batcher in batchers.values()}
    differ = len(deadlines) > 1
    return {"arms": arms, "deadline_ms": None if differ else deadlines.pop(), "deadlines_differ": differ, "load": None}


def figures_of(name: str, stats: Stats) -> dict[str, Any]:
    """Return the figures of one batcher: counts since the start; the page draws their differences.

    Args:
        name: the name of the arm.
        stats: the figures of its batcher.
    """
    refused = sum(stats.num_refused.values())
    return {
        "name": name,
        "asked": stats.num_submitted + refused,
        "answered": stats.num_answered,
        "late": stats.num_missed,
        "shed": stats.num_shed + refused,
        "failed": stats.num_failed,
        "waiting": stats.num_waiting,
        "batches": stats.num_batches,
        "items": stats.num_items,
        "tokens": [stats.num_tokens, stats.num_padded_tokens],
        "p50_ms": stats.latency_ms.get("p50"),
        "p99_ms": stats.latency_ms.get("p99"),
    }
