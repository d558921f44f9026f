"""Reasons: why micro-batches ran eagerly, counted, and said once where graphs help nobody."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import final

from .._catalogue import Shape
from ._inputs import Signature
from ._micro import MicroGraph

# After so many micro-batches, none of which was of a planned shape, the plan and the batches do not go together.
_MOST_STRANGE = 16
# So many kinds of batches, and none that came again.
_MOST_KINDS = 16
NEW_KIND = "a kind of batch, by its fields, types and single values, runs eagerly at first"
MANY_KINDS = "batches hold single values, such as a list of names, that differ from batch to batch"
UNREADABLE = "a batch holds more than tensors and single values"
UNPLANNED = "a shape was not planned"


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


def replays_by_label(graphs: Iterable[MicroGraph]) -> dict[str, int]:
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
