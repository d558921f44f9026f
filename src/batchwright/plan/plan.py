"""plan_batches: from lengths and a budget to a Plan, which is arrays and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, SupportsIndex, final, overload

import numpy as np
import numpy.typing as npt

from .._checks import as_whole, as_world_size
from .._lengths import as_lengths
from .._types import IntArray
from ._batches import PlanArrays, choose_order, make_batches
from ._cost import Cost
from ._oversize import Admitted, admit
from ._oversize import fits as fits
from ._ranks import shard
from ._settings import Oversize, Remainder
from ._settings import PlanSettings as PlanSettings
from .budget import Budget, check_budget
from .grouping.base import Grouping, Problem, SizeLadder
from .grouping.sorting import WindowSort

if TYPE_CHECKING:
    from .report import PlanReport

Batch = list[int] | list[list[int]]


@final
@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanArrays):
    """Batches of one epoch as arrays; a batch becomes an object only when it is asked for.

    Attributes:
        indices: examples, batch after batch, ``int32``.
        offsets: batch ``i`` is ``indices[offsets[i]:offsets[i + 1]]``.
        shapes: ``(num_items, padded length per axis)`` of each batch.
        pad_to: the lengths of a batch to the lengths it is padded to; the rule that ``shapes`` follow.
        row_offsets: where each packed row starts, None without packing.
        world_size: batches ``i × world_size`` to ``(i + 1) × world_size`` form step ``i``.
        num_repeated: examples given out twice because fewer than ``world_size`` were left, or fewer groups.
        num_dropped: examples left out by ``drop_last``, ``remainder="drop"`` or ``oversize="drop"``.
        num_truncated: examples planned shorter than they are.
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        try:
            index = operator.index(index)  # a small kind of NumPy could not hold len(self)
        except TypeError:
            raise TypeError(f"plan[…] takes the number of a batch or a slice, got {index!r}") from None
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no batch {index}: the plan has {len(self)} batches")
        index %= len(self)
        start, stop = self.offsets[index], self.offsets[index + 1]
        if self.row_offsets is None:
            return self.indices[start:stop].tolist()
        first, last = np.searchsorted(self.row_offsets, [start, stop])
        cuts = self.row_offsets[first : last + 1].tolist()
        return [self.indices[a:b].tolist() for a, b in pairwise(cuts)]

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    @property
    def num_repeated_batches(self) -> int:
        """Return how many of the last batches hold repeated examples only: one for each rank without any of its own."""
        return int((self.offsets[:-1] >= len(self.indices) - self.num_repeated).sum()) if self.num_repeated else 0

    @property
    def truncate_to(self) -> IntArray | None:
        """Return the length each example is planned at under ``oversize="truncate"``; collate must cut to it."""
        if self.settings.oversize != "truncate":
            return None
        return self.lengths[:, 0] if self.lengths.shape[1] == 1 else self.lengths

    def report(self, *, world_size: int | None = None) -> PlanReport:
        """Measure the plan: padding, budget used, shapes, straggler waste, recurrence, order correlation.

        Args:
            world_size: ranks for the straggler waste; None takes the plan's own.
        """
        from .report import make_report  # most plans are never measured

        following = plan_epoch(self.lengths, self.budget, self.settings, self.epoch + 1)
        return make_report(self, following, world_size=world_size)

    def __repr__(self) -> str:
        return f"Plan({len(self)} batches of {len(self.indices)} examples, {self.settings.grouping}, {self.budget})"


def plan_batches(
    lengths: npt.ArrayLike,
    budget: Budget,
    *,
    grouping: Grouping = WindowSort(),  # noqa: B008 - frozen
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    world_size: int = 1,
    size_multiple_of: int = 1,
    size_ladder: SizeLadder | None = None,
    pad_multiple_of: int = 1,
    keep_first: int = 0,
    oversize: Oversize = "error",
    drop_last: bool = False,
    remainder: Remainder = "spread",
    balance_over: int | None = None,
    cost: Cost | None = None,
    groups: npt.ArrayLike | None = None,
) -> Plan:
    """Decide which examples share a batch, for one epoch.

    Args:
        lengths: whole numbers of 1 or more, shape ``(N,)`` or ``(N, axes)``; axes are padded separately.
        budget: what a batch may cost; never exceeded, counted on lengths as padded.
        grouping: ``InOrder``, ``Sorted``, ``WindowSort``, ``Buckets`` or ``Packed``.
        shuffle: new neighbours and a new order every epoch; the order of the data otherwise.
        seed: the same seed, epoch and lengths give the same plan on every machine.
        epoch: which epoch to plan.
        world_size: ranks; every step holds one batch for each.
        size_multiple_of: round the number of items down to a multiple.
        size_ladder: round it down to ``"pow2"`` (1, 2, 4, …) or ``"pow2x3"`` (1, 2, 3, 4, 6, 8, 12, …).
        pad_multiple_of: padded lengths are multiples of this; it counts in the budget.
        keep_first: this many of the most demanding batches come first, so that memory runs out early or never.
        oversize: an example that is over the budget by itself: ``"error"``, ``"alone"``, ``"drop"`` or ``"truncate"``.
        drop_last: leave out the batches that end only because the data end.
        remainder: batches that fill no step: ``"spread"`` splits them over the ranks, ``"drop"`` leaves them out.
        balance_over: batches of near-equal cost form runs of this many, and the runs are shuffled. None takes
            ``world_size``: a run is a step, and one device has a completely random order. A number gives the same order
            for every world size; those that divide it are balanced, but a step resembles the others of its run.
        cost: work of a batch as ``cost(num_items, padded_lengths)``, such as ``TimeModel.cost``: for ranks, where
            None takes ``tokens × (1 + L / 1024)``, and for choosing the shapes of ``Buckets``, where None takes tokens.
        groups: one label per example, numbers or texts: examples of one label share a batch, whatever the other options
            say, as the two texts of a preference or the answers to a prompt must. A group that is over the budget by
            itself follows ``oversize`` as a whole. ``size_multiple_of`` and ``size_ladder`` hold where whole groups can
            make such a size, and ``Buckets`` needs groups of one size.

    Returns:
        A plan: ``len(plan)``, ``plan[i]``, ``plan.indices``, ``plan.offsets``, ``plan.shapes``, ``plan.report()``.

    >>> from batchwright import InOrder, MaxTokens
    >>> plan = plan_batches([3, 5, 2, 9], MaxTokens(10), grouping=InOrder())
    >>> list(plan), plan.shapes.tolist()
    ([[0, 1], [2], [3]], [[2, 5], [1, 2], [1, 9]])
    """
    settings = PlanSettings.of(locals())
    epoch, world_size = as_whole("epoch", epoch, least=0), as_world_size(world_size)
    return shard(
        plan_epoch(as_lengths(lengths), check_budget(budget), settings.resolved(world_size), epoch), world_size
    )


def plan_epoch(lengths: npt.NDArray[np.int32], budget: Budget, settings: PlanSettings, epoch: int) -> Plan:
    """Plan an epoch before it is divided over ranks; the settings are ``resolved``."""
    settings.grouping.check_axes(lengths.shape[1])
    if settings.groups is not None:
        settings.groups.check(len(lengths))
    admitted = admit(lengths, budget, settings)
    problem = make_problem(admitted, budget, settings, epoch)
    batches = make_batches(problem, admitted, settings)
    order = choose_order(batches, admitted.lengths, budget, settings, epoch)
    arrays = batches.ordered(order)
    return Plan(
        *arrays,
        world_size=1,
        num_repeated=0,
        num_dropped=len(lengths) - len(arrays.indices),
        num_truncated=admitted.num_truncated,
        lengths=admitted.lengths,
        budget=budget,
        settings=settings,
        epoch=epoch,
        pad_to=batches.pad_to,
    )


def make_problem(admitted: Admitted, budget: Budget, settings: PlanSettings, epoch: int) -> Problem:
    """Return what the grouping receives."""
    kept = admitted.kept
    packed = settings.grouping.row_capacity is not None
    return Problem(
        lengths=admitted.lengths if kept is None else admitted.lengths[kept],
        budget=budget,
        rounding=settings.rounding,
        pad_multiple_of=1 if packed else settings.pad_multiple_of,
        shuffle=settings.shuffle,
        seed=settings.seed,
        epoch=epoch,
        rules=settings.rules,
        drop_last=settings.drop_last,
        cost=settings.cost,
    )
