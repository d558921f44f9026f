"""Charts drawn in Python: scales, ticks, axes, marks and legends as SVG text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


def tag(name: str, *children: str, **attributes: object) -> str:
    """Return an element; in attribute names ``_`` stands for ``-`` and a trailing one is dropped; numbers are rounded.

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
    """Return a title, which a browser shows when the pointer is over the mark that holds it."""
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
    """The plane of a chart: two scales, their labels, and the grid behind the marks."""

    x: Scale
    y: Scale
    x_label: str
    y_label: str

    def draw(self, *, x_ticks: bool = True) -> str:
        """Return the grid, the values beside it, and the names of the axes; the name of y stands upright above it.

        Args:
            x_ticks: whether the values of x are written; False for a chart that writes its own.
        """
        middle = (self.x.start + self.x.stop) / 2
        return "".join(
            [
                self._x_axis() if x_ticks else "",
                self._y_axis(),
                text(self.x_label, middle, self.y.start + 38, class_="name middle"),
                text(self.y_label, 2, 14, class_="name"),
            ]
        )

    def _y_axis(self) -> str:
        parts = []
        for tick in self.y.ticks():
            at = self.y(tick)
            parts.append(tag("line", x1=self.x.start, x2=self.x.stop, y1=at, y2=at, class_="grid"))
            parts.append(text(f"{tick:,}", self.x.start - 7, at + 4, class_="end"))
        return "".join(parts)

    def _x_axis(self) -> str:
        bottom = self.y.start
        parts = [tag("line", x1=self.x.start, x2=self.x.stop, y1=bottom, y2=bottom, class_="axis")]
        for tick in self.x.ticks():
            at = self.x(tick)
            parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
            parts.append(text(f"{tick:,}", at, bottom + 18, class_="middle"))
        return "".join(parts)


# The corners of square, triangle and diamond; the first series has a circle. The same as in svg.js.
_CORNERS: Sequence[Sequence[tuple[float, float]]] = (
    (),
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
)


def marker(kind: int, x: float, y: float, *children: str, size: float = 4.5, shade: str = "") -> str:
    """Return the mark of a series: its shape tells series apart where colours do not.

    Args:
        kind: the number of the series, which sets shape and colour.
        x: the centre.
        y: the centre.
        children: markup inside the mark, such as what ``hover`` returns.
        size: about half the width.
        shade: another class of the style sheet, such as ``"pale"``.
    """
    classes = " ".join(filter(None, ["mark", shade, f"s{kind}"]))
    corners = _CORNERS[kind % len(_CORNERS)]
    if not corners:
        return tag("circle", *children, cx=x, cy=y, r=size, class_=classes)
    points = " ".join(f"{x + dx * size:.1f},{y + dy * size:.1f}" for dx, dy in corners)
    return tag("polygon", *children, points=points, class_=classes)


def swatch(kind: int) -> str:
    """Return the mark of a series as a drawing of its own, for legends and tables."""
    line = tag("line", x1=1, x2=21, y1=7, y2=7, class_=f"line s{kind}")
    return tag("svg", line, marker(kind, 11, 7), viewBox="0 0 22 14", aria_hidden="true")


def legend(names: Sequence[str]) -> str:
    """Return the marks and names of the series as a list."""
    items = "".join(f"<li>{swatch(kind)}{html.escape(name)}</li>" for kind, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def clip(body: str, name: str, *, x: float, y: float, width: float, height: float) -> str:
    """Hide what a drawing has outside a rectangle; the name must be unique on the page."""
    window = tag("clipPath", tag("rect", x=x, y=y, width=width, height=height), id=name)
    return window + tag("g", body, clip_path=f"url(#{name})")


def figure(body: str, *, width: int, height: int, title: str) -> str:
    """Return a drawing that is as wide as its place and tells screen readers its title."""
    return tag("svg", body, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)


def _round_step(wanted: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below ``wanted``."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def _clean(value: float) -> float:
    value = round(value, 10)
    return int(value) if value == int(value) else value
