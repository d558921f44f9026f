"""The picture of the README: loss against seconds, readable on a light and a dark page, and on a telephone."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from .reading import spread, summary_of

WIDTH, HEIGHT = 540, 400
LEFT, RIGHT, TOP, BOTTOM = 36, 238, 58, 54
LEAST = 41.0  # between the names of two lines
FILE, TASK = "gpu_quality_translation.json", "translation"


@dataclass(frozen=True)
class Line:
    """One line of the picture: an arm of the results, its name in two lines, and how it is drawn."""

    arm: str
    name: str
    more: str
    is_ours: bool = False


LINES = (
    Line("fixed-16", "shuffled", "16 texts per batch"),
    Line("max_tokens-8192", "planned", "batchwright, MaxTokens(8192)", is_ours=True),
    Line("grouped-128", "by length", "128 texts, best of a sweep"),
    Line("dynabatch-64", "dynabatch", "first batch of 64, range 5"),
    Line("graphs-16-8192", "planned, replayed", "batchwright, graphs=True", is_ours=True),
)

_STYLE = """
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;font-size:15px;fill:#3f3f46}
.back{fill:#ffffff}.title{font-size:18px;font-weight:650;fill:#18181b}.name{font-weight:650}.ours{fill:#b93a08}
.more{font-size:13.5px}.grid{stroke:#d9d9de}.line{fill:none;stroke:#71717a;stroke-width:2.5;stroke-linejoin:round}
.line.ours{stroke:#d9480f;fill:none;stroke-width:3.5}.dashed{stroke-dasharray:7 5}.link{stroke:#a1a1aa;fill:none}
@media (prefers-color-scheme:dark){text{fill:#d4d4d8}.back{fill:#18181b}.title{fill:#fafafa}.ours{fill:#ff9a5c}
.grid{stroke:#3f3f46}.line{stroke:#a1a1aa}.line.ours{stroke:#ff7a33;fill:none}.link{stroke:#71717a}}
"""


def render() -> str:
    """Return the picture as an SVG file."""
    found = {row["arm"]: row for row in summary_of(FILE, TASK, [line.arm for line in LINES])}
    curves = [[point for point in found[line.arm]["curve"] if point[0] > 0] for line in LINES]
    frame = Frame.around(curves)
    ends = spread([frame.at(*curve[-1])[1] for curve in curves], least=LEAST)
    parts = [*_axes(frame)]
    for line, curve, end in zip(LINES, curves, ends, strict=True):
        parts += _drawn(line, frame, curve, end)
    return _file(parts, title="Same model, same seconds: validation loss")


@dataclass(frozen=True)
class Frame:
    """Where seconds and losses lie in the picture."""

    seconds: float
    low: int
    high: int

    @classmethod
    def around(cls, curves: Sequence[Sequence[tuple[float, float]]]) -> Frame:
        """Return whole numbers of loss around all points."""
        losses = [loss for curve in curves for _, loss in curve]
        return cls(max(seconds for curve in curves for seconds, _ in curve), int(min(losses)), int(max(losses) + 0.999))

    def at(self, seconds: float, loss: float) -> tuple[float, float]:
        """Return the place of a point."""
        across, down = seconds / self.seconds, (self.high - loss) / (self.high - self.low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)


def _axes(frame: Frame) -> list[str]:
    parts = []
    for loss in range(frame.low, frame.high + 1):
        x, y = frame.at(0, loss)
        parts.append(f'<path d="M{x:.1f} {y:.1f} H{WIDTH - RIGHT}" class="grid"/>')
        parts.append(_text(x - 10, y + 5, f"{loss}", ' text-anchor="end"'))
    for seconds in range(0, int(frame.seconds) + 1, 5):
        x, y = frame.at(seconds, frame.low)
        parts.append(_text(x, y + 22, f"{seconds}", ' text-anchor="middle"'))
    x, y = frame.at(frame.seconds / 2, frame.low)
    return [*parts, _text(x, y + 44, "seconds of training, one H200", ' text-anchor="middle"')]


def _drawn(line: Line, frame: Frame, curve: Sequence[tuple[float, float]], end: float) -> list[str]:
    points = " ".join("{:.1f},{:.1f}".format(*frame.at(*point)) for point in curve)
    kind = " ours" if line.is_ours else ""
    dashed = " dashed" if not line.is_ours and line.arm.startswith("fixed") else ""
    x, y = frame.at(*curve[-1])
    column = WIDTH - RIGHT + 22
    return [
        f'<polyline points="{points}" class="line{kind}{dashed}"/>',
        f'<path d="M{x + 3:.1f} {y:.1f} L{column - 4} {end:.1f}" class="link"/>',
        _text(column, end, f"{curve[-1][1]:.2f} {line.name}", f' class="name{kind}"'),
        _text(column, end + 17, line.more, ' class="more"'),
    ]


def _text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{html.escape(content)}</text>'


def _file(parts: Sequence[str], *, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return "\n".join([
        f'{head} role="img" aria-label="{html.escape(title)}">', f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" rx="10" class="back"/>', _text(18, 34, title, ' class="title"'), *parts,
        "</svg>", "",
    ])  # fmt: skip
