"""The frame of a page that needs nothing else: its style, script and numbers are inside it."""

from __future__ import annotations

import html
import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

# A page runs only what it holds, and may ask only its own server for figures.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"


def render_page(
    title: str, body: str, *, scripts: Sequence[str], data: Any = None, attributes: Mapping[str, str] | None = None
) -> str:
    """Return a whole page with the shared style sheet.

    Args:
        title: what the window is called.
        body: markup.
        scripts: the page's own scripts, in order; they can use every name of ``svg.js``.
        data: plain values that the scripts read from the element ``#data``; None for a page without it.
        attributes: attributes of the body, such as ``data-…`` for the scripts.
    """
    given = "".join(f' {name}="{html.escape(value)}"' for name, value in (attributes or {}).items())
    script = "\n".join([read_asset(__package__, "svg.js"), *scripts])
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            # Without an icon, a browser would ask the server of a served page for one.
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{html.escape(title)}</title><style>{read_asset(__package__, 'style.css')}</style></head>",
            f"<body{given}>",
            body,
            "" if data is None else f'<script type="application/json" id="data">{embed(data)}</script>',
            f'<script>(() => {{\n"use strict";\n{script}}})();</script>',
            "</body></html>",
            "",
        ]
    )


def embed(data: Any) -> str:
    """Return JSON that can stand inside a page, since it cannot end the script.

    >>> embed({"a": "</script>"})
    '{"a":"\\\\u003c/script>"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def read_asset(package: str, name: str) -> str:
    """Return a text file that lies beside the modules of a package.

    >>> read_asset("batchwright._charts", "svg.js").startswith("// Elements")
    True
    """
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")


@final
class Markup(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def render_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    numbers_from: int | None = None,
    cards: bool = False,
) -> str:
    """Return a table that scrolls sideways when it is too wide.

    Args:
        head: the names of the columns; empty for a table without a head.
        rows: the cells as text, or as ``Markup``.
        caption: what the table shows.
        numbers_from: the first column of numbers, which are aligned right; None for no numbers.
        cards: whether the table is as wide as the page, with numbers after the first column, and turns into cards on
            a phone.

    >>> "<td>&lt;b&gt;</td>" in render_table(["a"], [["<b>"]])
    True
    """
    names = [f' data-name="{html.escape(name)}"' if cards and name else "" for name in head]
    top = "".join(f'<th scope="col"{_kind(place, numbers_from)}>{_cell(name)}</th>' for place, name in enumerate(head))
    lines = []
    for row in rows:
        kinds = [_kind(place, numbers_from) + (names[place] if names else "") for place in range(len(row))]
        cells = "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    opening = '<table class="cards">' if cards else "<table>"
    title = f"<caption><span>{html.escape(caption)}</span></caption>" if caption else ""
    first = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="wide">{opening}{title}{first}<tbody>{"".join(lines)}</tbody></table></div>'


def _kind(place: int, numbers_from: int | None) -> str:
    return ' class="number"' if numbers_from is not None and place >= numbers_from else ""


def _cell(content: str) -> str:
    return content if isinstance(content, Markup) else html.escape(content)
