"""What graphs did: how many shapes, how often they were replayed, what they cost and what they saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final


@final
@dataclass(frozen=True)
class GraphSummary:
    """The figures of graphed steps so far; ``str()`` is a table, ``to_dict()`` plain values.

    Attributes:
        shapes: sizes of the tensors of each captured micro-batch, and how often it was replayed.
        num_replayed: micro-batches that were replayed.
        num_eager: micro-batches that ran eagerly.
        num_updates_replayed: updates whose optimizer step was replayed.
        num_captures: captures of forward and backward, those included that a change of the model made void.
        pool_bytes: the memory that the graphs share, besides what the model and the optimizer hold.
        predicted_pool_bytes: what an eager step of the largest captured shape took, None before it was measured.
        capture_seconds: spent on capturing and on the eager steps that replays were compared with.
        saved_seconds: eager seconds minus replayed seconds, over all replays of shapes that were timed both ways.
        reasons: why something ran eagerly, and how often it was asked.
    """

    shapes: Mapping[str, int] = field(default_factory=dict)
    num_replayed: int = 0
    num_eager: int = 0
    num_updates_replayed: int = 0
    num_captures: int = 0
    pool_bytes: int = 0
    predicted_pool_bytes: int | None = None
    capture_seconds: float = 0.0
    saved_seconds: float = 0.0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Return the share of micro-batches that were replayed, 0 before the first."""
        total = self.num_replayed + self.num_eager
        return self.num_replayed / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {**asdict(self), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        rows = [
            ("captured shapes", f"{len(self.shapes):,}"),
            ("micro-batches replayed / eager", f"{self.num_replayed:,} / {self.num_eager:,} ({self.hit_rate:.1%})"),
            ("updates replayed", f"{self.num_updates_replayed:,}"),
            ("pool", f"{self.pool_bytes / 2**20:,.0f} MiB"),
            ("capture", f"{self.capture_seconds:.2f} s in {self.num_captures:,} captures"),
            ("saved", f"{self.saved_seconds:.2f} s"),
            *[(f"eager, {count:,} times", reason) for reason, count in self.reasons.items()],
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
