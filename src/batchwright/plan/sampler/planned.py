"""BatchSampler: one plan per epoch, one planned batch per update, exact resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_state, as_whole, check_ranks, read_whole
from ..._lengths import as_lengths
from ...errors import LengthsError
from .._cost import Cost
from .._ranks import shard
from .._settings import Oversize, PlanSettings, Remainder
from ..budget import Budget, check_budget
from ..collating import PadTo
from ..grouping.base import Grouping, SizeLadder
from ..grouping.sorting import WindowSort
from ..plan import Batch, Plan, plan_epoch
from ..report import PlanReport
from ._progress import AbstractEpochs, Cursor, fingerprint, read_place

Item = TypeVar("Item")


@final
class BatchSampler(AbstractEpochs):
    """Planned batches for ``DataLoader(dataset, batch_sampler=sampler)``, or any loop over indices.

    ``iter()`` fixes its epoch; only exhausting it moves to the next. Every rank makes the same plan from the seed, so
    no communication is needed; each rank takes every ``world_size``-th batch, and all take the same number.

    The state is plain JSON and holds neither rank nor world size: it counts the examples consumed, in the order of
    the plan. Resuming plans the epoch again and continues there, on any world size. The order of an epoch follows from
    the seed, the epoch and the number of ``balance_over``, which the state holds: with None a sampler takes it over for
    the rest of that epoch, and follows its own world size from the next one on.

    Args:
        lengths: as for ``plan_batches``.
        budget: as for ``plan_batches``.
        rank: this process, from 0.
        world_size: processes.
        dataset: if given, checked to have one length per example; not kept.
        grouping: and all other options: as for ``plan_batches``.

    >>> from batchwright import InOrder, MaxTokens
    >>> sampler = BatchSampler([3, 5, 2, 9], MaxTokens(10), grouping=InOrder())
    >>> len(sampler), list(sampler), sampler.epoch
    (3, [[0, 1], [2], [3]], 1)
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        budget: Budget,
        *,
        rank: int = 0,
        world_size: int = 1,
        dataset: Sized | None = None,
        grouping: Grouping = WindowSort(),  # noqa: B008 - frozen
        shuffle: bool = True,
        seed: int = 0,
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
    ) -> None:
        self.settings = PlanSettings.of(locals())
        self.rank, self.world_size = check_ranks(rank, world_size)
        self.budget = check_budget(budget)
        self._lengths = as_lengths(lengths).copy()  # a change of the caller's array must not change later epochs
        if dataset is not None:
            self._check_dataset(dataset)
        super().__init__()
        self._own_settings = self.settings.resolved(self.world_size)
        self._taken_over: tuple[int, PlanSettings] | None = None  # an epoch that began under other rules, and these
        # Planned now, so that data that do not fit the budget are refused here and not in the first epoch.
        self._epoch_plan: Plan | None = None
        self._base(0)

    @property
    def plan(self) -> Plan:
        """Return what is left of the current epoch, for all ranks: batch ``i × world_size + rank`` is ours."""
        base = self._base(self._progress.epoch)
        return shard(base, self.world_size, first_batch=int(np.searchsorted(base.offsets, self._progress.start)))

    @cached_property
    def pad_to(self) -> PadTo:
        """Return the function a collator pads with: ``sampler.pad_to(lengths of a batch)``; the same in every epoch."""
        return self._base(self._progress.epoch).pad_to

    def report(self, *, world_size: int | None = None) -> PlanReport:
        """Measure the plan of the current epoch."""
        return self.plan.report(world_size=world_size)

    def __len__(self) -> int:
        return len(self.plan) // self.world_size

    def __iter__(self) -> Iterator[Batch]:
        # Not a generator: the epoch is fixed now, not at the first next().
        plan = self.plan
        return self._run(plan, self._progress.begin(len(plan) // self.world_size))

    def _run(self, plan: Plan, cursor: Cursor) -> Iterator[Batch]:
        ends = plan.offsets[self.world_size :: self.world_size].tolist()
        num_distinct = len(plan.indices) - plan.num_repeated  # repeated examples stand at the very end
        for step, end in enumerate(ends):
            cursor.give(cursor.start + min(end, num_distinct) - cursor.given)
            yield plan[step * self.world_size + self.rank]
        self._progress.end(cursor)

    def track(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over a loader of this sampler, counting what the loop receives instead of what was prefetched.

        The loader must hand out one item per batch, in order; wrappers such as ``tqdm(loader)`` may stand around it.
        torchdata's ``StatefulDataLoader`` counts for itself: loop over it directly and save its own state.

        >>> from batchwright import MaxTokens
        >>> sampler = BatchSampler([3, 5, 2, 9], MaxTokens(10))
        >>> for batch in sampler.track(sampler):  # a DataLoader with workers in real life
        ...     state = sampler.state_dict()
        """
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized):
            self._check_dataset(dataset)
        return self._progress.track(loader)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a place restored within that very epoch is kept."""
        before = self.epoch
        super().set_epoch(epoch)
        if self.epoch != before:
            self._taken_over = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, as JSON values."""
        return {**self.start_of(self._progress.epoch), "position": self._progress.position}

    def start_of(self, epoch: int) -> dict[str, Any]:
        """Return the state at the start of an epoch, with the order that the epoch has here."""
        epoch = as_whole("epoch", epoch, least=0)
        settings = self._settings_of(epoch)
        return {
            "version": settings.rules,
            "num_examples": len(self._lengths),
            "lengths": self._fingerprint,
            "budget": self.budget.to_state(),
            "settings": settings.to_state(),
            "seed": settings.seed,
            "epoch": epoch,
            "position": 0,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on this or another world size.

        Raises:
            StateMismatchError: the state is of other lengths, another budget, other settings or a later version;
                the sampler stays as it was.
        """
        epoch, position, settings = self.read_state(state)
        is_there = position in self._planned(epoch, settings).offsets
        self._move_to(epoch, position, is_there=is_there, fault="is not where a batch begins in")
        self._taken_over = (epoch, settings)

    def read_state(self, state: Mapping[str, Any]) -> tuple[int, int, PlanSettings]:
        """Return the epoch, the position and the settings of a state, or refuse it; the sampler stays as it is."""
        state = as_state(state, of="BatchSampler")
        settings = self._settings_in(state)
        mine = {**self.start_of(0), "version": settings.rules, "settings": settings.to_state()}
        return *read_place(state, mine), settings

    def _settings_in(self, state: Mapping[str, Any]) -> PlanSettings:
        """Return our settings with what a state may differ in: the rules of its epoch, and None as a number."""
        settings, saved = replace(self.settings, rules=self.settings.read_rules(state)), state.get("settings")
        if settings.balance_over is None and isinstance(saved, Mapping):
            settings = settings.resolved(max(1, read_whole(saved, "balance_over")))
        return settings.resolved(self.world_size)

    def _settings_of(self, epoch: int) -> PlanSettings:
        if self._taken_over is not None and self._taken_over[0] == epoch:
            return self._taken_over[1]
        if self.settings.balance_over is None and self._own_settings.balance_over != self.world_size:
            self._own_settings = self.settings.resolved(self.world_size)  # a framework may set it later
        return self._own_settings

    def _base(self, epoch: int) -> Plan:
        return self._planned(epoch, self._settings_of(epoch))

    def _planned(self, epoch: int, settings: PlanSettings) -> Plan:
        plan = self._epoch_plan
        if plan is None or (plan.epoch, plan.settings) != (epoch, settings):
            self._epoch_plan = plan = plan_epoch(self._lengths, self.budget, settings, epoch)
        return plan

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._lengths)

    def _check_dataset(self, dataset: Sized) -> None:
        if len(dataset) != len(self._lengths):
            raise LengthsError(
                f"the data set has {len(dataset)} examples but there are {len(self._lengths)} lengths; measure the "
                "lengths of the data set that is loaded"
            )

    def __repr__(self) -> str:
        parts = (f"{len(self._lengths):,} examples", f"{self.budget}", f"{self.settings.grouping}")
        return f"BatchSampler({', '.join(parts)}, epoch {self.epoch}, rank {self.rank} of {self.world_size})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epoch_plan": None}
