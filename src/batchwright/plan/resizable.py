"""ResizableBatchSampler: a controller decides how many examples an update uses, when its batch is formed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, StateMismatchError
from ._resizable_controller import HasSize, check_controller, read_size
from ._resizable_order import EpochOrder, HasPrefix, Int32Array, fingerprint, make_ordering
from ._resizable_progress import Cursor, Progress
from ._settings import PlanSettings, check_ranks
from ._state import check_same, read_whole
from .budget import Budget

Item = TypeVar("Item")

# Raise it when the same settings begin to give another order: a state of another version cannot be continued.
STATE_VERSION = 1


@final
class ResizableBatchSampler:
    """Batches of ``controller.size`` examples for ``DataLoader(dataset, batch_sampler=sampler)``.

    The size counts over all ranks and is read when a batch is formed; each rank gets its share of the same batch,
    within one of the others. Every rank must see the same sizes: feed controllers with figures that are global, as a
    ``StepReport`` has them. Every example comes once an epoch, and the last batch is what is left. All ranks take
    equally many steps, so a rank has at least one example a step: a size below ``world_size`` counts as
    ``world_size``, and only when fewer examples than ranks are left are some repeated, never lost.

    With ``lengths`` and a ``budget`` an epoch is planned into micro-batches of similar lengths as ``BatchSampler``
    does, in random order. A batch takes them one behind the other; one that would overshoot is cut, and its rest opens
    the next batch. Ranks are dealt the examples of a batch in turn, so all get the same mixture of lengths. Let the
    loader collate with ``list`` and give ``Stepper`` the same budget as ``micro_batch``, with ``lengths`` and
    ``collate``: it cuts a share into pieces of similar lengths again, so that little is padded. A budget that admits
    many more examples than a batch has makes neighbouring batches alike; bound it, ``budget & MaxItems(n)``.

    Workers form batches ahead: with ``num_workers > 0`` a new size takes effect after the batches already prefetched.
    Where it must apply at once, use ``regroup``.

    The state is plain JSON and counts the examples consumed. It holds neither rank nor world size, so it resumes on
    any world size, and not the state of the controller: save ``controller.state_dict()`` beside it. With both
    restored, the batches are those of a run without a break; batches that workers had formed ahead are formed again, at
    the size of then.

    Args:
        num_examples: indices are ``range(num_examples)``.
        controller: has ``.size``, a whole number of 1 or more; a ``BatchSizeController``.
        lengths: as for ``plan_batches``, with ``budget``.
        budget: what a micro-batch may cost, with ``lengths``; every example must fit it alone.
        curriculum: has ``num_examples`` and ``prefix(epoch)``, the indices that an epoch covers; a ``size.Curriculum``.
        shuffle: a new order every epoch; the order of the data, or of the prefix, otherwise.
        seed: the same seed and epoch give the same order on every machine.
        rank: this process, from 0.
        world_size: processes.

    >>> from types import SimpleNamespace
    >>> controller = SimpleNamespace(size=2)
    >>> sampler = ResizableBatchSampler(7, controller, shuffle=False)
    >>> for batch in sampler:
    ...     print(batch)
    ...     controller.size = 4
    [0, 1]
    [2, 3, 4, 5]
    [6]
    """

    def __init__(
        self,
        num_examples: int,
        controller: HasSize,
        *,
        lengths: npt.ArrayLike | None = None,
        budget: Budget | None = None,
        curriculum: HasPrefix | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_ranks(rank, world_size)
        self.rank = rank
        self.world_size = world_size
        self.controller = check_controller(controller)
        # A batch mixes micro-batches, so they stand in wholly random order and not in runs of equal cost.
        self._settings = PlanSettings(shuffle=shuffle, seed=seed, balance_over=1)
        self._ordering = make_ordering(num_examples, lengths, budget, curriculum, self._settings)
        self._lengths_hash = None if self._ordering.lengths is None else fingerprint(self._ordering.lengths)
        self._progress = Progress()
        self._order: EpochOrder | None = None

    @property
    def epoch(self) -> int:
        """Return the epoch the next ``iter()`` runs."""
        return self._progress.epoch

    @property
    def num_repeated(self) -> int:
        """Return how many examples the newest iterator gave out twice because fewer than ranks were left."""
        return 0 if self._progress.newest is None else self._progress.newest.num_repeated

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a position restored within that very epoch is kept."""
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        raise TypeError("the number of batches is not known: the controller decides the size of each as it is formed")

    def __bool__(self) -> bool:
        return True  # asked of len() otherwise, which raises

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: the epoch is fixed now, not at the first next().
        cursor = self._progress.begin()
        return self._run(cursor, self._order_of(cursor.epoch).indices)

    def _run(self, cursor: Cursor, order: Int32Array) -> Iterator[list[int]]:
        while cursor.given < len(order):
            size = max(read_size(self.controller), self.world_size)
            batch = order[cursor.given : cursor.given + size]
            cursor.give(len(batch), num_repeated=max(0, self.world_size - len(batch)))
            yield self._share(batch).tolist()
        self._progress.end(cursor)

    def _share(self, batch: Int32Array) -> Int32Array:
        if len(batch) < self.world_size:
            batch = np.resize(batch, self.world_size)
        if self._ordering.lengths is not None:
            return batch[self.rank :: self.world_size]
        small, extra = divmod(len(batch), self.world_size)
        start = self.rank * small + min(self.rank, extra)
        return batch[start : start + small + (self.rank < extra)]

    def track(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over a loader of this sampler, counting what the loop receives instead of what was prefetched.

        The loader must hand out one item a batch, in order; wrappers such as ``tqdm(loader)`` may stand around it.
        torchdata's ``StatefulDataLoader`` counts for itself: loop over it directly and save its own state.

        >>> from types import SimpleNamespace
        >>> sampler = ResizableBatchSampler(7, SimpleNamespace(size=2))
        >>> for batch in sampler.track(sampler):  # a DataLoader with workers in real life
        ...     state = sampler.state_dict()
        """
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized) and len(dataset) != self._ordering.num_examples:
            raise ArgumentError(
                f"the data set has {len(dataset)} examples but num_examples is {self._ordering.num_examples}; "
                "make the sampler with len(dataset)"
            )
        yield from self._progress.track(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, as JSON values; the state of the controller is its own."""
        epoch = self._progress.epoch
        return {
            "version": STATE_VERSION,
            "num_examples": self._ordering.num_examples,
            "lengths": self._lengths_hash,
            "budget": None if self._ordering.budget is None else repr(self._ordering.budget),
            "curriculum": None if self._ordering.curriculum is None else self._order_of(epoch).curriculum,
            "settings": self._settings.to_state(),
            "seed": self._settings.seed,
            "epoch": epoch,
            "position": self._progress.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on this or another world size.

        Raises:
            StateMismatchError: the state is of other lengths, another budget, another curriculum, other settings or
                another version; the sampler stays as it was.
        """
        mine = self.state_dict()
        for key in ("version", "num_examples", "lengths", "budget", "settings", "seed"):
            check_same(key, state.get(key), mine[key])
        epoch, position = read_whole(state, "epoch"), read_whole(state, "position")
        order = self._order_of(epoch)
        check_same("curriculum", state.get("curriculum"), order.curriculum)
        if position > len(order.indices):
            raise StateMismatchError(
                f"position {position} of the state is behind the {len(order.indices)} examples of epoch {epoch}; "
                "the state was changed by hand"
            )
        self._progress.move(epoch, position)

    def _order_of(self, epoch: int) -> EpochOrder:
        if self._order is None or self._order.epoch != epoch:
            self._order = self._ordering.of(epoch)
        return self._order

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}
