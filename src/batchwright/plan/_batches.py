"""From the groups of a grouping to batches in their final order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from .._lengths import pad_up
from .._random import Purpose, bit_stream, permutation
from .._types import FloatArray, IntArray
from ._cost import evaluate_finite
from ._groups import AtomicGroups, group_together
from ._order import fitting_run, gather, longest_of, most_demanding, order_batches, step_cost, sum_work
from ._oversize import Admitted
from ._settings import PlanSettings
from .budget import Budget
from .collating import PadTo, pad_batches
from .grouping.base import Groups, Problem


@final
class Batches(NamedTuple):
    """Batches made of units: a unit is a slice of ``indices``, a packed row or a whole batch."""

    indices: npt.NDArray[np.int32]
    unit_starts: IntArray
    unit_sizes: IntArray
    first_unit: IntArray  # (batches,)
    num_units: IntArray  # (batches,)
    num_items: IntArray  # (batches,) rows, or examples
    padded: IntArray  # (batches, axes)
    packed: bool
    pad_to: PadTo

    def renumbered(self, kept: IntArray) -> Batches:
        """Return the batches with indices into all examples instead of the kept ones."""
        return self._replace(indices=kept[self.indices].astype(np.int32))

    def joined(self, lone: npt.NDArray[np.int32], sizes: IntArray, padded: IntArray) -> Batches:
        """Return the batches, followed by others of ``sizes`` lone examples, each in a row of its own."""
        num_units, unit_sizes = np.ones_like(sizes), sizes
        if self.packed:
            num_units, unit_sizes = sizes, np.ones(len(lone), dtype=np.int64)
        return Batches(
            indices=np.concatenate([self.indices, lone]),
            unit_starts=np.concatenate([self.unit_starts, len(self.indices) + np.cumsum(unit_sizes) - unit_sizes]),
            unit_sizes=np.concatenate([self.unit_sizes, unit_sizes]),
            first_unit=np.concatenate([self.first_unit, len(self.unit_sizes) + np.cumsum(num_units) - num_units]),
            num_units=np.concatenate([self.num_units, num_units]),
            num_items=np.concatenate([self.num_items, sizes]),
            padded=np.concatenate([self.padded, padded]),
            packed=self.packed,
            pad_to=self.pad_to,
        )

    def ordered(self, order: IntArray) -> OrderedBatches:
        """Lay the batches out in the given order."""
        columns = [self.num_items, *self.padded.T]
        shapes = np.stack([column[order].astype(np.int32) for column in columns], axis=1)
        if not self.packed:
            units = self.first_unit[order]
            indices, offsets = gather(self.indices, self.unit_starts[units], self.unit_sizes[units])
            return OrderedBatches(indices, offsets, shapes, None)
        numbers = np.arange(len(self.unit_sizes), dtype=np.int32)
        unit_order, first = gather(numbers, self.first_unit[order], self.num_units[order])
        indices, unit_offsets = gather(self.indices, self.unit_starts[unit_order], self.unit_sizes[unit_order])
        return OrderedBatches(indices, unit_offsets[first], shapes, unit_offsets)


@dataclass(frozen=True, eq=False, repr=False)
class PlanArrays:
    """The fields of a ``Plan``, apart from what can be done with one: dividing and measuring need only these."""

    indices: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    shapes: npt.NDArray[np.int32]
    row_offsets: npt.NDArray[np.int64] | None
    world_size: int
    num_repeated: int
    num_dropped: int
    num_truncated: int
    lengths: npt.NDArray[np.int32]
    budget: Budget
    settings: PlanSettings
    epoch: int
    pad_to: PadTo

    def __len__(self) -> int:
        return len(self.offsets) - 1


@final
class OrderedBatches(NamedTuple):
    """The arrays of a plan."""

    indices: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    shapes: npt.NDArray[np.int32]
    row_offsets: npt.NDArray[np.int64] | None


def make_batches(problem: Problem, admitted: Admitted, settings: PlanSettings) -> Batches:
    """Group the examples, drop the short batches if asked, and give oversize examples their own batches."""
    batches = _group(problem, admitted.groups, settings)
    if admitted.kept is not None:
        batches = batches.renumbered(admitted.kept)
    if settings.oversize == "alone" and len(admitted.oversize):
        lone = admitted.oversize.astype(np.int32)
        sizes = np.ones(len(lone), dtype=np.int64) if admitted.lone_sizes is None else admitted.lone_sizes
        longest = longest_of(admitted.lengths, lone, np.cumsum(sizes) - sizes)
        batches = batches.joined(lone, sizes, pad_up(longest, settings.pad_multiple_of))
    return batches


def _group(problem: Problem, together: AtomicGroups | None, settings: PlanSettings) -> Batches:
    if problem.num_examples == 0:
        empty = np.empty(0, dtype=np.int64)
        packed = settings.grouping.row_capacity is not None
        none = np.empty((0, problem.num_axes), dtype=np.int64)
        pad_to = _make_pad_to(problem, None, settings)
        return Batches(empty.astype(np.int32), empty, empty, empty, empty, empty, none, packed, pad_to)
    grouping = settings.grouping
    groups = grouping.group(problem) if together is None else group_together(problem, together, grouping)
    batches = _to_batches(groups, problem, _make_pad_to(problem, groups, settings))
    if settings.drop_last and groups.num_short:
        num = len(batches.num_items) - groups.num_short
        batches = batches._replace(
            first_unit=batches.first_unit[:num],
            num_units=batches.num_units[:num],
            num_items=batches.num_items[:num],
            padded=batches.padded[:num],
        )
    return batches


def _make_pad_to(problem: Problem, groups: Groups | None, settings: PlanSettings) -> PadTo:
    """Return the rule of a plan: the static shapes of its grouping, those of packed rows, or none."""
    capacity, multiple = settings.grouping.row_capacity, settings.pad_multiple_of
    if capacity is not None:  # the lengths are those of packed rows
        row = np.array([[capacity]])
        return PadTo(((capacity,),), tuple(problem.sizes(row).tolist()), multiple)
    catalogue = None if groups is None else groups.catalogue
    if catalogue is None:
        # One length may stand for several, such as the longer of two; several are of fields that are padded apart.
        return PadTo(multiple_of=multiple, num_axes=problem.num_axes if problem.num_axes > 1 else None)
    return PadTo(tuple(map(tuple, catalogue.lengths.tolist())), tuple(catalogue.sizes.tolist()), multiple)


def _to_batches(groups: Groups, problem: Problem, pad_to: PadTo) -> Batches:
    counts = np.ones(len(groups.sizes), dtype=np.int64) if groups.rows is None else groups.rows
    return Batches(
        indices=groups.indices,
        unit_starts=groups.starts,
        unit_sizes=groups.sizes,
        first_unit=np.cumsum(counts) - counts,
        num_units=counts,
        num_items=groups.sizes if groups.rows is None else counts,
        padded=groups.padded if groups.catalogue is None else _static_lengths(groups, problem, pad_to),
        packed=groups.rows is not None,
        pad_to=pad_to,
    )


def _static_lengths(groups: Groups, problem: Problem, pad_to: PadTo) -> IntArray:
    """Return what each batch of a static grouping is padded to: by the rule that a collator follows."""
    if groups.settled is None:
        return pad_batches(pad_to, groups.sizes, longest_of(problem.lengths, groups.indices, groups.starts))
    padded, open_ = groups.padded.copy(), np.flatnonzero(~groups.settled)
    if len(open_):
        indices, offsets = gather(groups.indices, groups.starts[open_], groups.sizes[open_])
        longest = longest_of(problem.lengths, indices, offsets[:-1])
        padded[open_] = pad_batches(pad_to, groups.sizes[open_], longest)
    return padded


def choose_order(batches: Batches, lengths: IntArray, budget: Budget, settings: PlanSettings, epoch: int) -> IntArray:
    """Return the order of the batches in the epoch."""
    num = len(batches.num_items)
    demand = _demand(batches, budget) if settings.keep_first else np.zeros(num)
    first = most_demanding(demand, settings.keep_first)
    if _keeps_order(settings):
        return np.concatenate([first, np.delete(np.arange(num), first)])
    run = run_length(settings, num)
    stream = bit_stream(settings.seed, epoch, Purpose.ORDER)
    if run == 1 and settings.rules > 1:  # nobody waits, so nothing is sorted by cost
        if settings.cost is not None:
            batch_cost(batches, lengths, settings)  # a wrong function is refused on one device too
        rest = np.delete(np.arange(num), first)
        return np.concatenate([first, rest[permutation(len(rest), stream)]])
    cost = batch_cost(batches, lengths, settings)
    return order_batches(cost, demand, stream, run_length=run, keep_first=settings.keep_first)


def run_length(settings: PlanSettings, num_batches: int) -> int:
    """Return how many batches of near-equal cost stand together in an epoch, 1 where cost does not choose the order."""
    if _keeps_order(settings):
        return 1
    assert settings.balance_over is not None, "resolve the settings before an epoch is planned"
    return settings.balance_over if settings.rules > 1 else fitting_run(num_batches, settings.balance_over)


def _keeps_order(settings: PlanSettings) -> bool:
    return not settings.shuffle or settings.grouping.keeps_order


def _demand(batches: Batches, budget: Budget) -> FloatArray:
    """Return how much of a device a batch asks for: its share of the budget, more for long examples."""
    share = budget.fraction(batches.num_items, batches.padded)
    return share * (1 + batches.padded.sum(axis=1) / 1024)


def batch_cost(batches: Batches, lengths: IntArray, settings: PlanSettings) -> FloatArray:
    """Return the work of each batch, by which ranks are balanced."""
    if settings.cost is not None:
        return evaluate_finite(settings.cost, batches.num_items, batches.padded)
    if not batches.packed:
        return step_cost(batches.num_items, batches.padded)
    # Packed rows are all as long as the capacity; attention works on the examples inside.
    work = sum_work(batches.indices, batches.unit_starts, batches.unit_sizes, lengths)
    up_to = np.concatenate([[0], np.cumsum(work)])
    return up_to[batches.first_unit + batches.num_units] - up_to[batches.first_unit]
