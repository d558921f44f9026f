"""BatchSampler: a plan an epoch, one planned batch an update, exact resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import cached_property
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, LengthsError, StateMismatchError
from ._arrays import as_lengths
from ._oversize import admit
from ._pad import PadTo
from ._plan import Batch, Plan, make_problem, plan_epoch
from ._report import PlanReport
from ._settings import Oversize, PlanSettings, Remainder, check_ranks, check_whole
from ._shard import shard
from ._state import check_same, read_whole
from .budget import Budget, Cost, check_budget
from .grouping import Grouping, WindowSort
from .shapes import SizeLadder

Item = TypeVar("Item")

# Raise it when the same settings begin to give other batches: a state of another version cannot be continued.
STATE_VERSION = 1


@final
class BatchSampler:
    """Planned batches for ``DataLoader(dataset, batch_sampler=sampler)``, or any loop over indices.

    ``iter()`` fixes its epoch; only exhausting it moves to the next. Every rank makes the same plan from the seed, so
    no communication is needed; each takes every ``world_size``-th batch, and all take equally many.

    The state is plain JSON and holds neither rank nor world size: it counts the examples consumed, in the order of
    the plan. Resuming plans the epoch again and continues there, on any world size.

    Args:
        lengths: as for ``plan_batches``.
        budget: as for ``plan_batches``.
        rank: this process, from 0.
        world_size: processes.
        dataset: if given, checked to have one length an example; not kept.
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
        balance_over: int = 64,
        cost: Cost | None = None,
    ) -> None:
        check_ranks(rank, world_size)
        self.rank = rank
        self.world_size = world_size
        self.budget = check_budget(budget)
        self.settings = PlanSettings(
            grouping=grouping,
            shuffle=shuffle,
            seed=seed,
            size_multiple_of=size_multiple_of,
            size_ladder=size_ladder,
            pad_multiple_of=pad_multiple_of,
            keep_first=keep_first,
            oversize=oversize,
            drop_last=drop_last,
            remainder=remainder,
            balance_over=balance_over,
            cost=cost,
        )
        self._lengths = as_lengths(lengths).copy()  # a change of the caller's array must not change later epochs
        if dataset is not None:
            self._check_dataset(dataset)
        self._epoch = 0
        self._position = 0  # examples of this epoch consumed before iteration begins
        # Planned now, so that data that do not fit the budget are refused here and not in the first epoch.
        self._epoch_plan: Plan | None = plan_epoch(self._lengths, self.budget, self.settings, 0)
        self._cursor: _Cursor | None = None
        self._fingerprint: str | None = None

    @property
    def epoch(self) -> int:
        """Return the epoch the next ``iter()`` runs."""
        return self._epoch

    @property
    def plan(self) -> Plan:
        """Return what is left of the current epoch, for all ranks: batch ``i × world_size + rank`` is ours."""
        base = self._base(self._epoch)
        return shard(base, self.world_size, first_batch=int(np.searchsorted(base.offsets, self._position)))

    @cached_property
    def pad_to(self) -> PadTo:
        """Return the function a collator pads with: ``sampler.pad_to(lengths of a batch)``."""
        admitted = admit(self._lengths, self.budget, self.settings)
        problem = make_problem(admitted, self.budget, self.settings, 0)
        multiple, capacity = self.settings.pad_multiple_of, self.settings.grouping.row_capacity
        shapes = self.settings.grouping.static_shapes(problem) if problem.num_examples else None
        if capacity is not None:  # the lengths are those of packed rows
            shapes = np.array([[capacity]])
        if shapes is None:
            return PadTo(multiple_of=multiple)
        sizes = problem.sizes(shapes).tolist()
        return PadTo(tuple(map(tuple, shapes.tolist())), tuple(sizes), multiple)

    def report(self, *, world_size: int | None = None) -> PlanReport:
        """Measure the plan of the current epoch."""
        return self.plan.report(world_size=world_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a position restored within that very epoch is kept."""
        check_whole("epoch", epoch, least=0)
        if epoch != self._epoch:
            self._epoch, self._position = epoch, 0
        self._cursor = None

    def __len__(self) -> int:
        return len(self.plan) // self.world_size

    def __iter__(self) -> Iterator[Batch]:
        # Not a generator: the epoch is fixed now, not at the first next().
        cursor = _Cursor(self._epoch, self._position, self.plan)
        self._cursor = cursor
        return self._run(cursor)

    def _run(self, cursor: _Cursor) -> Iterator[Batch]:
        for step in range(cursor.num_steps):
            cursor.num_given = step + 1
            yield cursor.plan[step * self.world_size + self.rank]
        if cursor.num_received is None:  # otherwise only the prefetcher has come to the end
            self._finish(cursor)

    def _finish(self, cursor: _Cursor) -> None:
        # An iterator from before set_epoch or load_state_dict went elsewhere must not move what they set.
        if (self._epoch, self._position) == (cursor.epoch, cursor.start):
            self._epoch, self._position = cursor.epoch + 1, 0

    def track(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over a loader of this sampler, counting what the loop receives instead of what was prefetched.

        The loader must hand out one item a batch, in order; wrappers such as ``tqdm(loader)`` may stand around it.
        torchdata's ``StatefulDataLoader`` counts for itself: loop over it directly and save its own state.

        >>> from batchwright import MaxTokens
        >>> sampler = BatchSampler([3, 5, 2, 9], MaxTokens(10))
        >>> for batch in sampler.track(sampler):  # a DataLoader with workers in real life
        ...     state = sampler.state_dict()
        """
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized):
            self._check_dataset(dataset)
        if not getattr(loader, "in_order", True):
            raise ArgumentError("track() counts batches in order, the loader has in_order=False; leave it at True")
        before, start = self._cursor, (self._epoch, self._position)
        cursor = None
        for item in loader:
            # Looked up now: a wrapper may begin its loader no sooner than the first item.
            cursor = cursor or self._begin_tracking(before, start)
            cursor.count_received()
            yield item
        cursor = cursor or self._begin_tracking(before, start)
        if cursor.num_received == cursor.num_steps:  # otherwise a wrapper ended early, as a break would
            self._finish(cursor)

    def _begin_tracking(self, before: _Cursor | None, start: tuple[int, int]) -> _Cursor:
        cursor = self._cursor
        if cursor is None or cursor is before:
            raise ArgumentError(
                "track() needs a loader that draws from this sampler, batch_sampler=sampler, and has not begun yet"
            )
        cursor.num_received = 0
        self._epoch, self._position = start  # a short epoch may have been prefetched to its end already
        return cursor

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, as JSON values."""
        epoch, position = self._epoch, self._position
        if self._cursor is not None and self._cursor.epoch == epoch:  # otherwise the epoch is over
            position = self._cursor.position
        return {
            "version": STATE_VERSION,
            "num_examples": len(self._lengths),
            "lengths": self._hash(),
            "budget": repr(self.budget),
            "settings": self.settings.to_state(),
            "seed": self.settings.seed,
            "epoch": epoch,
            "position": position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on this or another world size.

        Raises:
            StateMismatchError: the state is of other lengths, another budget, other settings or another version;
                the sampler stays as it was.
        """
        mine = self.state_dict()
        for key in ("version", "num_examples", "lengths", "budget", "settings", "seed"):
            check_same(key, state.get(key), mine[key])
        epoch, position = read_whole(state, "epoch"), read_whole(state, "position")
        if position not in self._base(epoch).offsets:
            raise StateMismatchError(
                f"position {position} of the state is not where a batch of epoch {epoch} begins; "
                "the state was changed by hand"
            )
        self._epoch, self._position, self._cursor = epoch, position, None

    def _base(self, epoch: int) -> Plan:
        if self._epoch_plan is None or self._epoch_plan.epoch != epoch:
            self._epoch_plan = plan_epoch(self._lengths, self.budget, self.settings, epoch)
        return self._epoch_plan

    def _hash(self) -> str:
        if self._fingerprint is None:
            digest = hashlib.blake2b(repr(self._lengths.shape).encode(), digest_size=16)
            digest.update(self._lengths.reshape(-1).data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _check_dataset(self, dataset: Sized) -> None:
        if len(dataset) != len(self._lengths):
            raise LengthsError(
                f"the data set has {len(dataset)} examples but there are {len(self._lengths)} lengths; measure the "
                "lengths of the data set that is loaded"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cursor": None, "_epoch_plan": None}


@final
class _Cursor:
    """How far one iterator has come."""

    def __init__(self, epoch: int, start: int, plan: Plan) -> None:
        self.epoch = epoch
        self.plan = plan
        self.num_steps = len(plan) // plan.world_size
        self.num_given = 0
        self.num_received: int | None = None  # None: the loop is not tracked
        self.start = start

    def count_received(self) -> None:
        """Count an item that reached the loop; more of them than batches cannot be placed."""
        self.num_received = (self.num_received or 0) + 1
        if self.num_received > self.num_steps:
            raise ArgumentError(
                f"track() counts one item a batch, the loader gave more than the {self.num_steps} batches of the epoch"
            )

    @property
    def position(self) -> int:
        """Return the examples of the epoch consumed; repeated ones at the very end do not count."""
        num = self.num_given if self.num_received is None else self.num_received
        within = int(self.plan.offsets[num * self.plan.world_size])
        return self.start + min(within, len(self.plan.indices) - self.plan.num_repeated)
