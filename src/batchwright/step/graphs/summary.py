"""What graphs did: how many shapes, how often they were replayed, what they cost and saved, and why not more."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Protocol, final

from ._catalogue import Shape
from ._inputs import Signature


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
        unit: what is counted, ``"micro-batches"`` of training or ``"calls"`` of a function.
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
    unit: str = "micro-batches"

    @property
    def hit_rate(self) -> float:
        """Return the share of what ran that was replayed, 0 before the first."""
        total = self.num_replayed + self.num_eager
        return self.num_replayed / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {**asdict(self), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        rows = [
            ("captured shapes", f"{len(self.shapes):,}"),
            (f"{self.unit} replayed / eager", f"{self.num_replayed:,} / {self.num_eager:,} ({self.hit_rate:.1%})"),
            *([("updates replayed", f"{self.num_updates_replayed:,}")] if self.unit == "micro-batches" else []),
            ("pool", f"{self.pool_bytes / 2**20:,.0f} MiB"),
            ("capture", f"{self.capture_seconds:.2f} s in {self.num_captures:,} captures"),
            ("saved", f"{self.saved_seconds:.2f} s"),
            *[(f"eager, {count:,} times", reason) for reason, count in self.reasons.items()],
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


# After so many micro-batches, none of which was of a planned shape, the plan and the batches do not go together.
_MOST_STRANGE = 16
# So many kinds of batches, and none that came again.
_MOST_KINDS = 16
NEW_KIND = "a kind of batch, by its fields, types and single values, runs eagerly at first"
MANY_KINDS = "batches hold single values, such as a list of names, that differ from batch to batch"
UNREADABLE = "a batch holds more than tensors and single values"
UNPLANNED = "a shape was not planned"
FAR_SIDE = (
    "the rotary positions of the model are others for all rows beyond some length, and no planned shape on the side of "
    "the call holds it; plan that length too"
)
OTHER_RESULTS = "a replay gave other results than an eager run of the same batch"
NO_ROOM = "an eager step finds no memory beside the pool of the graphs"


@final
class Reasons:
    """Counts reasons, and warns of each text once.

    Attributes:
        counts: how often each reason was given.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._warned: set[str] = set()
        self._num_strange: int | None = 0  # micro-batches so far, None after one that was planned

    def count(self, reason: str) -> None:
        """Note that a micro-batch ran eagerly."""
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def warn(self, text: str) -> None:
        """Warn, unless that was said before."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=10)

    def see(self, signature: Signature, shapes: Sequence[Shape], planned: Mapping[Shape, int]) -> None:
        """Look whether batches are of planned shapes at all.

        Args:
            signature: of a micro-batch that has no graph.
            shapes: the planned ones that it may be of.
            planned: all of them.
        """
        if shapes or self._num_strange is None:
            self._num_strange = None
            return
        self._num_strange += 1
        if self._num_strange == _MOST_STRANGE:
            first = ", ".join("x".join(map(str, shape)) for shape in islice(planned, 3))
            self.warn(
                f"{_MOST_STRANGE} micro-batches ran eagerly, as none had a planned shape: the last has tensors of "
                f"{text_of_sizes(signature.sizes)}, and shapes= begins with {first} (rows, then padded lengths)"
            )

    def of_new_kind(self, num_kinds: int, *, is_any_captured: bool) -> str:
        """Return why a kind of batch that never came before runs eagerly; many kinds are warned of."""
        if num_kinds < _MOST_KINDS or is_any_captured:
            return NEW_KIND
        self.warn(f"steps run eagerly: {MANY_KINDS}; leave them out of the batch, or out of what loss_fn is given")
        return MANY_KINDS

    def of_unreadable(self, *, is_any_captured: bool) -> str:
        """Return why a batch with more than tensors runs eagerly; if no other kind comes, it is warned of."""
        if self.counts.get(UNREADABLE, 0) + 1 == _MOST_STRANGE and not is_any_captured:
            self.warn(f"{_MOST_STRANGE} micro-batches ran eagerly: {UNREADABLE}")
        return UNREADABLE


def text_of_sizes(sizes: Iterable[tuple[int, ...]]) -> str:
    """Return the sizes of tensors, for people.

    >>> text_of_sizes([(4, 6), (4, 6), (4,)])
    '4x6 4'
    """
    return " ".join("x".join(map(str, size)) for size in dict.fromkeys(sizes) if size)


class Replayed(Protocol):
    """Something captured that is replayed."""

    signature: Signature
    num_replayed: int

    @property
    def types(self) -> str:
        """Return the types of the inputs, for people."""


def replays_by_label(graphs: Iterable[Replayed]) -> dict[str, int]:
    """Return how often each graph was replayed, by its sizes; with types and a number where two would be alike."""
    found = list(graphs)
    sizes = [text_of_sizes(graph.signature.sizes) for graph in found]
    counts: dict[str, int] = {}
    for graph, text in zip(found, sizes, strict=True):
        label = text if sizes.count(text) == 1 else f"{text} ({graph.types})"
        number, unique = 1, label
        while unique in counts:
            number += 1
            unique = f"{label} #{number}"
        counts[unique] = graph.num_replayed
    return counts
