"""Times to the best constant's loss as an SVG file: one row per strategy, a dot and its interval, per task."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from .training import Row

WIDTH, LEFT, RIGHT, ROW, TOP = 860, 190, 60, 22, 66
LEAST, MOST = 0.5, 2.2
COLOURS = {"goodput": "#c2410c", "measured": "#1d4ed8"}


def draw(path: Path, tasks: Sequence[tuple[str, Sequence[Row]]], *, note: str) -> None:
    """Write the chart.

    Args:
        path: the file.
        tasks: a title and the rows of ``summarize`` for each task.
        note: how it was made.
    """
    title = "Time to the loss of the best swept constant batch"
    parts, y = [_text(20, 26, title, "title"), _text(20, 45, note, "note")], float(TOP)
    for name, rows in tasks:
        parts.append(_text(20, y + 12, name, "task"))
        y += ROW
        top = y - 4
        for row in rows:
            figures = row.get("figures")
            if figures is not None:
                parts += _row(row["name"], figures, y)
                y += ROW
        for value in (0.6, 0.8, 1.0, 1.1, 1.25, 1.5, 2.0):
            kind = "limit" if value == 1.1 else "grid"
            parts.insert(2, f'<path d="M{_at(value):.1f} {top:.1f} V{y - 4:.1f}" class="{kind}"/>')
            parts.append(_text(_at(value), y + 10, f"{value:g}", "tick", ' text-anchor="middle"'))
        y += 2 * ROW
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_frame(parts, title, y), encoding="utf-8")


def _row(name: str, figures: Row, y: float) -> list[str]:
    colour = COLOURS.get(name, "#52525b")
    low, high = _at(figures["low"]), _at(figures["high"])
    words = f"> {figures['horizons'][-1]:g}" if figures["is_beyond"] else f"{figures['ratio']:.2f}"
    return [
        _text(LEFT - 12, y + 12, name, "name", f' text-anchor="end" fill="{colour}"'),
        f'<path d="M{low:.1f} {y + 8:.1f} H{high:.1f}" stroke="{colour}" stroke-width="2"/>',
        f'<circle cx="{_at(figures["ratio"]):.1f}" cy="{y + 8:.1f}" r="4" fill="{colour}"/>',
        _text(WIDTH - RIGHT + 8, y + 12, words, "name", f' fill="{colour}"'),
    ]


def _at(ratio: float) -> float:
    """Return where a ratio stands, on a scale of equal factors; what lies outside stands at the edge."""
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, content: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{html.escape(content)}</text>'


def _frame(parts: Sequence[str], title: str, height: float) -> str:
    style = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;font-size:12px}"
        ".title{font-size:17px;font-weight:600;fill:#18181b}.note{fill:#52525b}.tick{fill:#3f3f46}"
        ".task{font-weight:600;fill:#18181b}.name{font-weight:600}.grid{stroke:#e4e4e7}"
        ".limit{stroke:#a1a1aa;stroke-dasharray:3 3}path{fill:none}"
    )
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(title)}">',
        f"<style>{style}</style>", '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>", "",
    ])  # fmt: skip
