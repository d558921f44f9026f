"""Just enough SVG for the charts of one page: scales, ticks, axes and marks as text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


def tag(name: str, *children: str, **attributes: object) -> str:
    """Return an element; ``_`` in a name stands for ``-``, a trailing one is dropped, numbers are rounded.

    Children are markup already; attributes are escaped.

    >>> tag("rect", x=1.234, stroke_width=2, class_="bar")
    '<rect x="1.2" stroke-width="2" class="bar"/>'
    >>> tag("g", tag("circle", r=3))
    '<g><circle r="3"/></g>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_number(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{''.join(children)}</{name}>" if children else f"<{name}{written}/>"


def text(content: str, x: float, y: float, **attributes: object) -> str:
    """Return a text element with escaped content."""
    return tag("text", html.escape(content), x=x, y=y, **attributes)


def hover(content: str) -> str:
    """Return the title that a browser shows over the mark it stands in."""
    return tag("title", html.escape(content))


@final
@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps a value to a coordinate, linearly or by its logarithm.

    >>> Scale(low=0, high=10, start=100, stop=200)(5)
    150.0
    >>> Scale(low=1, high=100, start=0, stop=200, log=True)(10)
    100.0
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high, at = (
            (math.log(self.low), math.log(self.high), math.log(value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round values inside the scale.

        >>> Scale(low=0, high=23, start=0, stop=1).ticks()
        [0, 5, 10, 15, 20]
        >>> Scale(low=3, high=60, start=0, stop=1, log=True).ticks()
        [5, 10, 20, 50]
        """
        if self.log:
            candidates = [factor * 10**power for power in range(9) for factor in (1, 2, 5)]
            return [tick for tick in candidates if self.low <= tick <= self.high]
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [_clean(i * step) for i in range(first, last + 1)]


@final
@dataclass(frozen=True, kw_only=True)
class Frame:
    """A chart's plane: two scales, their labels, and the grid behind the marks."""

    x: Scale
    y: Scale
    x_label: str
    y_label: str

    def draw(self) -> str:
        """Return grid lines, tick labels and axis labels."""
        return self._x_axis() + self.draw_y() + self.draw_labels()

    def draw_labels(self) -> str:
        """Return the names of the axes; that of y stands above it, upright and easy to read."""
        middle = (self.x.start + self.x.stop) / 2
        return text(self.x_label, middle, self.y.start + 38, class_="label middle") + text(
            self.y_label, 2, 14, class_="label"
        )

    def draw_y(self) -> str:
        """Return the horizontal lines of the grid and their values."""
        parts = []
        for tick in self.y.ticks():
            at = self.y(tick)
            parts.append(tag("line", x1=self.x.start, x2=self.x.stop, y1=at, y2=at, class_="grid"))
            parts.append(text(f"{tick:,}", self.x.start - 7, at + 4, class_="tick end"))
        return "".join(parts)

    def _x_axis(self) -> str:
        bottom = self.y.start
        parts = [tag("line", x1=self.x.start, x2=self.x.stop, y1=bottom, y2=bottom, class_="axis")]
        for tick in self.x.ticks():
            at = self.x(tick)
            parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
            parts.append(text(f"{tick:,}", at, bottom + 18, class_="tick middle"))
        return "".join(parts)


def marker(kind: int, x: float, y: float, *children: str, size: float = 4.5, **attributes: object) -> str:
    """Return a circle, square, triangle or diamond: the shape tells series apart where colours do not."""
    shapes: Sequence[Sequence[tuple[float, float]]] = (
        (),
        ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
        ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    )
    corners = shapes[kind % len(shapes)]
    if not corners:
        return tag("circle", *children, cx=x, cy=y, r=size, **attributes)
    points = " ".join(f"{x + dx * size:.1f},{y + dy * size:.1f}" for dx, dy in corners)
    return tag("polygon", *children, points=points, **attributes)


def figure(body: str, *, width: int, height: int, title: str) -> str:
    """Return a drawing that fills the width of its place and names itself to screen readers."""
    return tag("svg", body, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)


def _round_step(wanted: float) -> float:
    """Return the least of 1, 2, 5 times a power of ten that is not below ``wanted``."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def _clean(value: float) -> float:
    value = round(value, 10)
    return int(value) if value == int(value) else value
