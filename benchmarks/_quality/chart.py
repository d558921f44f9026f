"""Loss against seconds as an SVG file: one line per arm, named at its end."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from .results import Curve

WIDTH, HEIGHT = 960, 560
LEFT, RIGHT, TOP, BOTTOM = 64, 250, 64, 52
# Shades of one colour for one kind of arm, so that kinds are told apart at a glance; each line has a name as well.
COLOURS = {
    "graphs": ("#c2410c", "#ea580c", "#f59e0b", "#b45309"),
    "eager": ("#1d4ed8", "#0284c7", "#6366f1", "#0891b2"),
    "compile": ("#15803d", "#4d7c0f", "#059669", "#65a30d"),
    "peer": ("#52525b", "#78716c", "#94a3b8", "#64748b", "#a1a1aa", "#475569"),
}
DASHES = {"graphs": "", "eager": "", "compile": "7 3", "peer": "3 3"}


def draw(path: Path, series: Sequence[tuple[str, Curve, str]], *, title: str, note: str) -> None:
    """Write the chart of some curves.

    Args:
        path: the file.
        series: name, points (seconds, loss) and kind of each line, the best first; at least one, and each has a loss
            after the start.
        title: what it shows.
        note: how it was made, in small letters.
    """
    # The untrained model's loss says nothing and would take half the height.
    curves = [[point for point in curve if point[0] > 0 and math.isfinite(point[1])] for _, curve, _ in series]
    most_x = max(x for curve in curves for x, _ in curve)
    low = math.floor(min(y for curve in curves for _, y in curve) * 2) / 2
    high = max(low + 0.5, math.ceil(max(y for curve in curves for _, y in curve) * 2) / 2)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = x / most_x, (y - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT - 40, 28, title, "title"), _text(LEFT - 40, 46, note, "note"), *_axes(at, most_x, low, high)]
    ends = spread([at(*curve[-1])[1] for curve in curves], least=17)
    used: dict[str, int] = {}
    for (name, _, kind), curve, end in zip(series, curves, ends, strict=True):
        number = used[kind] = used.get(kind, -1) + 1
        colour = COLOURS[kind][number % len(COLOURS[kind])]
        points = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in curve)
        dashes = f' stroke-dasharray="{DASHES[kind]}"' if DASHES[kind] else ""
        parts.append(f'<polyline points="{points}" stroke="{colour}"{dashes}/>')
        parts += ['<circle cx="{:.1f}" cy="{:.1f}" r="2.6" fill="{}"/>'.format(*at(*point), colour) for point in curve]
        x, y = at(*curve[-1])
        parts.append(f'<path d="M{x + 4:.1f} {y:.1f} L{WIDTH - RIGHT + 22} {end:.1f}" stroke="{colour}" opacity=".5"/>')
        label = f"{name}  {curve[-1][1]:.2f}"
        parts.append(_text(WIDTH - RIGHT + 26, end + 4, label, "name", f' fill="{colour}"'))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_frame(parts, title), encoding="utf-8")


def _axes(at: object, most_x: float, low: float, high: float) -> list[str]:
    parts = []
    step_x, step_y = _step(most_x, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)), _step(high - low, (0.1, 0.25, 0.5, 1, 2, 5))
    for number in range(int(most_x / step_x + 1e-9) + 1):
        x, y = at(number * step_x, low)  # type: ignore[operator]
        parts.append(f'<path d="M{x:.1f} {TOP} V{y:.1f}" class="grid"/>')
        parts.append(_text(x, y + 18, f"{number * step_x:g}", "tick", ' text-anchor="middle"'))
    for number in range(int((high - low) / step_y + 1e-9) + 1):
        x, y = at(0, low + number * step_y)  # type: ignore[operator]
        parts.append(f'<path d="M{x:.1f} {y:.1f} H{WIDTH - RIGHT}" class="grid"/>')
        parts.append(_text(x - 8, y + 4, f"{low + number * step_y:g}", "tick", ' text-anchor="end"'))
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 12, "seconds of training", "axis", ' text-anchor="middle"'))
    upright = f'text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2:.0f})"'
    parts.append(_text(18, HEIGHT / 2, "validation loss per token", "axis", f" {upright}"))
    return parts


def _step(span: float, steps: Sequence[float]) -> float:
    """Return the least step that divides an axis into at most nine parts; after the last one its multiples.

    >>> _step(28, (1, 5, 10)), _step(600, (10, 60))
    (5, 120)
    """
    last = steps[-1]
    return next((step for step in steps if span / step <= 9), last * math.ceil(span / (9 * last)))


def spread(wanted: Sequence[float], *, least: float) -> list[float]:
    """Return heights as near to the wanted ones as a least distance allows.

    >>> spread([10, 12, 40], least=10)
    [6.0, 16.0, 40.0]
    """
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    groups: list[tuple[list[int], float]] = []  # neighbours that touch, and their middle
    for place in order:
        groups.append(([place], wanted[place]))
        while len(groups) > 1 and _touch(groups[-2], groups[-1], least):
            (first, _), (second, _) = groups[-2:]
            members = first + second
            groups[-2:] = [(members, sum(wanted[member] for member in members) / len(members))]
    heights = [0.0] * len(wanted)
    for members, middle in groups:
        for number, place in enumerate(members):
            heights[place] = float(middle + (number - (len(members) - 1) / 2) * least)
    return heights


def _touch(above: tuple[list[int], float], below: tuple[list[int], float], least: float) -> bool:
    return below[1] - above[1] < (len(above[0]) + len(below[0])) / 2 * least


def _text(x: float, y: float, content: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{html.escape(content)}</text>'


def _frame(parts: Sequence[str], title: str) -> str:
    style = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;font-size:12px}"
        ".title{font-size:17px;font-weight:600;fill:#18181b}.note{fill:#52525b}.tick,.axis{fill:#3f3f46}"
        ".name{font-weight:600}.grid{stroke:#e4e4e7;stroke-width:1}"
        "polyline{fill:none;stroke-width:2;stroke-linejoin:round}path{fill:none}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return "\n".join([
        f'{head} role="img" aria-label="{html.escape(title)}">', f"<style>{style}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>", "",
    ])  # fmt: skip
