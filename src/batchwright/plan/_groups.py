"""Examples that stay together: the groups of a plan, planned as items and laid out as examples again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from .._lengths import as_array
from .._types import FloatArray, IntArray
from ..errors import ArgumentError, LengthsError
from ._cost import Cost
from ._order import gather, longest_of
from .budget import Budget
from .grouping.base import Catalogue, Grouping, Groups, Problem
from .sampler._progress import fingerprint

if TYPE_CHECKING:  # packed rows of groups are rare: what they need is loaded where they are made
    from .grouping._blocks import Members

_Int32 = npt.NDArray[np.int32]


@final
@dataclass(frozen=True, eq=False, repr=False)
class AtomicGroups:
    """Groups of examples in the order of their first members: group ``i`` is ``members[offsets[i]:offsets[i + 1]]``."""

    members: _Int32
    offsets: IntArray
    labels: Any = None  # as the user gave them, one per example, for errors

    @property
    def num_examples(self) -> int:
        """Return how many examples the groups hold in all."""
        return len(self.members)

    @cached_property
    def sizes(self) -> IntArray:
        """Return the number of examples of each group."""
        return np.diff(self.offsets)

    @cached_property
    def common_size(self) -> int | None:
        """Return how many examples every group has, None where they differ."""
        least = int(self.sizes.min(initial=self.largest))
        return least if least == self.largest else None

    @cached_property
    def largest(self) -> int:
        """Return the number of examples of the largest group."""
        return int(self.sizes.max(initial=0))

    @cached_property
    def ids(self) -> _Int32:
        """Return the number of the group of each example."""
        ids = np.empty(len(self.members), dtype=np.int32)
        ids[self.members] = np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)
        return ids

    @cached_property
    def key(self) -> str:
        """Return the text by which a saved state knows the groups, whatever their labels are."""
        return fingerprint(self.ids)

    def longest(self, lengths: _Int32) -> _Int32:
        """Return the longest length of each group on each axis, ``(groups, axes)``."""
        return longest_of(lengths, self.members, self.offsets[:-1]).astype(np.int32, copy=False)

    def members_of(self, lengths: _Int32) -> Members:
        """Return the groups with the lengths of their members, of one axis."""
        from .grouping._blocks import Members

        return Members(self.members, self.offsets, lengths[self.members, 0])

    def some(self, wanted: npt.NDArray[np.bool_]) -> AtomicGroups:
        """Return the wanted groups, with their members counted among the wanted examples only."""
        is_member = np.repeat(wanted, self.sizes)
        members = self.members[is_member]
        numbers = np.zeros(self.num_examples, dtype=np.int32)
        numbers[members] = 1
        numbers = np.cumsum(numbers, dtype=np.int32) - np.int32(1)
        return AtomicGroups(numbers[members], np.append(0, np.cumsum(self.sizes[wanted])))

    def describe(self, group: int) -> str:
        """Return the label, the first example and the size of a group, for an error."""
        first = int(self.members[self.offsets[group]])
        label = self.labels[first]
        label = label.item() if isinstance(label, np.generic) else label
        num = int(self.sizes[group])
        return f"group {label!r} of {num} example{'s' if num > 1 else ''} (the first is {first})"

    def check(self, num_examples: int) -> None:
        """Refuse another number of labels than of examples."""
        if self.num_examples != num_examples:
            raise LengthsError(
                f"groups must give one label per example, {num_examples}, got {self.num_examples}; give a label of "
                "its own to an example that stands for itself"
            )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, AtomicGroups) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"{len(self.sizes):,} groups of up to {self.largest}"


def as_groups(groups: Any) -> AtomicGroups | None:
    """Return groups from a label per example: numbers, texts or anything else that can be a key of a dictionary.

    >>> as_groups(["b", "a", "b"])
    2 groups of up to 2
    """
    if groups is None or isinstance(groups, AtomicGroups):
        return groups
    if isinstance(groups, list | tuple):
        return _from_objects(groups)
    if hasattr(groups, "is_floating_point") and groups.is_floating_point():
        groups = groups.detach().cpu().double().numpy()
    array = _as_labels(groups)
    if array.dtype.kind not in "biufSUmM":
        return _from_objects(array.tolist())
    _refuse_missing(_is_missing_in(array))
    if array.dtype.kind in "iu" and len(array) and int(array.max()) - int(array.min()) < 1 << 32:
        return _partition((array - array.min()).astype(np.uint64), array)
    _, inverse = np.unique(array, return_inverse=True)
    return _partition(inverse.astype(np.uint64), array)


def _as_labels(groups: Any) -> npt.NDArray[Any]:
    array = as_array("groups", groups, "(N,)", ArgumentError)
    if array.ndim != 1:
        raise ArgumentError(
            f"groups must be one label per example, got {type(groups).__name__} of shape {array.shape}; join several "
            "columns into one label"
        )
    return array


def _is_missing_in(array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    if array.dtype.kind == "f":
        return np.isnan(array)
    return np.isnat(array) if array.dtype.kind in "mM" else np.zeros(1, dtype=bool)


def _refuse_missing(is_missing: npt.NDArray[np.bool_]) -> None:
    if is_missing.any():
        raise ArgumentError(
            f"groups has no label for {int(is_missing.sum())} examples, first for example {int(is_missing.argmax())}; "
            "give a label of its own to an example that stands for itself"
        )


def _from_objects(labels: Sequence[Any]) -> AtomicGroups:
    """Number labels of any kind: as equal as keys of a dictionary are."""
    numbers: dict[Any, int] = {}
    try:
        ids = [numbers.setdefault(label, len(numbers)) for label in labels]
    except TypeError as reason:
        raise ArgumentError(f"groups must be one number or text per example: {reason}") from reason
    # By their texts: pandas' NA has no truth value, and not every NaN is a float.
    missing = [n for label, n in numbers.items() if not isinstance(label, str | bytes) and str(label) in _MISSING]
    array = np.array(ids, dtype=np.uint64)
    if missing:
        _refuse_missing(np.isin(array, np.array(missing, dtype=np.uint64)))
    return _partition(array, labels)


_MISSING = ("None", "nan", "NaT", "<NA>")
_LOW_HALF = np.uint64(0xFFFFFFFF)


def _partition(numbers: npt.NDArray[np.uint64], labels: Any) -> AtomicGroups:
    """Sort examples by the number of their group, all below 2**32, and the groups by their first members."""
    members = np.arange(len(numbers), dtype=np.int32)
    if (numbers[1:] < numbers[:-1]).any():
        # Number and index in one word: a plain sort of these keeps the order within a group.
        keys = (numbers << np.uint64(32)) | members.astype(np.uint64)
        keys.sort()
        members = (keys & _LOW_HALF).astype(np.int32)
        numbers = keys >> np.uint64(32)
    starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)])
    offsets = np.append(starts, len(numbers))
    first = members[starts]
    if (first[1:] < first[:-1]).any():
        # A table over the examples sorts the groups by their first members without comparing them.
        group_at = np.full(len(members), -1, dtype=np.int32)
        group_at[first] = np.arange(len(first), dtype=np.int32)
        order = group_at[group_at >= 0]
        members, offsets = gather(members, starts[order], np.diff(offsets)[order])
    return AtomicGroups(members, offsets, labels)


@final
@dataclass(frozen=True, repr=False)
class _PerGroup(Budget):
    """A budget that counts groups of equally many examples."""

    inner: Budget
    size: int

    def fraction(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        return self.inner.fraction(np.asarray(num_items) * self.size, lengths)

    def max_items(self, lengths: IntArray) -> IntArray:
        return self.inner.max_items(lengths) // self.size

    def __repr__(self) -> str:
        return repr(self.inner)


def _cost_per_group(cost: Cost | None, size: int) -> Cost | None:
    return None if cost is None else lambda num_items, lengths: cost(num_items * size, lengths)


def group_together(problem: Problem, groups: AtomicGroups, grouping: Grouping) -> Groups:
    """Let a grouping divide groups, each as long as its longest member, and return batches of examples.

    Groups of one size are items under a budget that counts them; groups of several sizes have weights.
    """
    size, capacity = groups.common_size, grouping.row_capacity
    if size == 1:
        return grouping.group(problem)
    if capacity is not None:
        return _pack_together(problem, groups, grouping, capacity)
    lengths = groups.longest(problem.lengths)
    if size is None:
        _check_weights(groups, grouping)
        return _expanded(grouping.group(replace(problem, lengths=lengths, weights=groups.sizes)), groups)
    items = replace(
        problem,
        lengths=lengths,
        budget=_PerGroup(problem.budget, size),
        rounding=problem.rounding.per_group(size),
        cost=_cost_per_group(problem.cost, size),
    )
    batches = _expanded(grouping.group(items), groups)
    if batches.catalogue is None:
        return batches
    return replace(batches, catalogue=Catalogue(batches.catalogue.lengths, batches.catalogue.sizes * size))


# Rows are full enough: packing over several rows takes longer.
_FULL = 0.97


def _pack_together(problem: Problem, groups: AtomicGroups, grouping: Grouping, capacity: int) -> Groups:
    """Pack groups into rows as if each were one example, or over several rows of a batch where that takes fewer."""
    from .grouping._blocks import group_blocks
    from .grouping.packed import rows_that_fit

    members = groups.members_of(problem.lengths)
    totals = members.totals
    if (totals > capacity).any():
        return group_blocks(problem, members, capacity)
    plain = _expanded(grouping.group(replace(problem, lengths=totals.astype(np.int32)[:, None])), groups)
    if rows_that_fit(problem, capacity) == 1 or int(totals.sum()) >= _FULL * capacity * len(plain.sizes):
        return plain
    blocks = group_blocks(problem, members, capacity)
    return blocks if len(blocks.sizes) < len(plain.sizes) else plain


def _check_weights(groups: AtomicGroups, grouping: Grouping) -> None:
    if not grouping.takes_weights:
        raise ArgumentError(
            f"{grouping} makes batches of equally many examples, which groups of {int(groups.sizes.min())} to "
            f"{groups.largest} examples do not fill; give groups of one size, or use WindowSort(), Sorted(), InOrder() "
            "or Packed(capacity)"
        )


def _expanded(batches: Groups, groups: AtomicGroups) -> Groups:
    """Replace groups by their members."""
    chosen = batches.indices
    if groups.common_size is None:
        indices, ends = gather(groups.members, groups.offsets[chosen], groups.sizes[chosen])
        starts = ends[batches.starts]
        return replace(batches, indices=indices, starts=starts, sizes=ends[batches.starts + batches.sizes] - starts)
    size = groups.common_size
    indices = groups.members.reshape(-1, size).take(chosen, axis=0).reshape(-1)
    return replace(batches, indices=indices, starts=batches.starts * size, sizes=batches.sizes * size)
