"""ResizableBatchSampler: a controller decides how many examples an update uses, when its batch is formed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt

from ..._checks import HasSize, as_sized, as_state, as_whole, check_ranks, check_same, peek_size, read_size
from ..._lengths import as_lengths
from ..._random import Purpose, bit_stream, permutation
from ..._types import MAX_INT32
from ...errors import ArgumentError, BudgetError, LengthsError
from .._oversize import fits
from .._settings import PlanSettings
from ..budget import Budget, check_budget
from ..collating import PadTo
from ..grouping.base import Grouping, check_grouping
from ..grouping.sorting import WindowSort
from ..plan import plan_epoch
from ._progress import AbstractEpochs, Cursor, fingerprint, read_place

Item = TypeVar("Item")

# The rules of plans by the usual grouping, and the version of their states: states from before there was a choice load.
_FIRST_RULES = 1


@final
class ResizableBatchSampler(AbstractEpochs):
    """Batches of ``controller.size`` examples for ``DataLoader(dataset, batch_sampler=sampler)``.

    The size counts over all ranks and is read when a batch is formed; each rank gets its share of the same batch,
    within one of the others. Every rank must see the same sizes: feed controllers with global figures, such as
    those of a ``StepReport``. Every example comes once per epoch, and the last batch is what is left. All ranks take
    the same number of steps, so a rank has at least one example per step: a size below ``world_size`` counts as
    ``world_size``, and only when fewer examples than ranks are left are some repeated, never lost.

    With ``lengths`` and a ``budget`` an epoch is planned into micro-batches of similar lengths as ``BatchSampler``
    does, in random order. A batch takes them one after the other; one that would overshoot is cut, and its rest opens
    the next batch. Ranks are dealt the examples of a batch in turn, so all get the same mixture of lengths. Let the
    loader collate with ``list`` and give ``Stepper`` the same budget as ``micro_batch``, with ``lengths`` and
    ``collate``: it cuts a share into pieces of similar lengths again, so that little is padded. A budget that admits
    many more examples than a batch has makes neighbouring batches alike; bound it, ``budget & MaxItems(n)``.

    With ``grouping=Buckets(count)`` the micro-batches have few static shapes, one catalogue for all epochs: ``shapes``
    lists it, and a collator pads with ``pad_to``. ``split_by_shapes`` cuts a batch into these shapes again.

    Workers form batches ahead: with ``num_workers > 0`` a new size takes effect after the batches already prefetched.
    Where it must apply at once, use ``regroup``.

    The state is plain JSON and counts the examples consumed. It holds neither rank nor world size, so it resumes on
    any world size, and not the state of the controller: save ``controller.state_dict()`` beside it. With both
    restored, the batches are those of a run without a break; batches that workers had formed ahead are formed
    again, with the size that the controller has at that time.

    Args:
        num_examples: indices are ``range(num_examples)``.
        controller: a ``BatchSizeController``, anything else with a ``.size``, or a fixed number of examples.
        lengths: as for ``plan_batches``, with ``budget``.
        budget: what a micro-batch may cost, with ``lengths``; every example must fit it by itself.
        grouping: how examples are divided into micro-batches, with ``lengths`` and ``budget``; any but ``Packed``, by
            default ``WindowSort()``.
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
        grouping: Grouping | None = None,
        curriculum: HasPrefix | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.rank, self.world_size = check_ranks(rank, world_size)
        self.controller = as_sized("controller", controller)
        self._settings = _settings_of(grouping, shuffle=shuffle, seed=seed)
        if grouping is not None and (lengths is None or budget is None):
            raise ArgumentError(f"grouping={grouping} divides examples by their lengths; give lengths and budget too")
        self._ordering = make_ordering(num_examples, lengths, budget, curriculum, self._settings)
        self._lengths_hash = None if self._ordering.lengths is None else fingerprint(self._ordering.lengths)
        super().__init__()
        self._order: EpochOrder | None = None
        if self._settings.grouping.is_static:
            _ = self.pad_to  # planned now, so that shapes that cannot be are refused here and not in the first epoch

    @property
    def num_repeated(self) -> int:
        """Return how many examples the newest iterator gave out twice because fewer than ranks were left."""
        return 0 if self._progress.newest is None else self._progress.newest.num_repeated

    @cached_property
    def pad_to(self) -> PadTo:
        """Return the function a collator pads with: ``sampler.pad_to(lengths of a micro-batch)``."""
        return self._ordering.pad_to()

    @property
    def shapes(self) -> Int32Array | None:
        """Return the static shapes of micro-batches, ``(K, 1 + axes)``: full size and lengths; None if there are none.

        >>> from batchwright import Buckets, MaxTokens
        >>> grouped = {"lengths": [4, 4, 4, 4, 7, 8], "budget": MaxTokens(16), "grouping": Buckets(2)}
        >>> ResizableBatchSampler(6, 3, **grouped).shapes.tolist()
        [[4, 4], [2, 8]]
        """
        pad_to = self.pad_to
        rows = [(size, *lengths) for size, lengths in zip(pad_to.sizes, pad_to.shapes, strict=True)]
        return np.array(rows, dtype=np.int32) if rows else None

    @property
    def num_in_epoch(self) -> int:
        """Return how many examples the current epoch covers: all of them, or those that a curriculum chooses."""
        return len(self._order_of(self.epoch).indices)

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

        The loader must hand out one item per batch, in order; wrappers such as ``tqdm(loader)`` may stand around it.
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
            "version": self._settings.rules,
            "num_examples": self._ordering.num_examples,
            "lengths": self._lengths_hash,
            "budget": None if self._ordering.budget is None else self._ordering.budget.to_state(),
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
        saved = as_state(state, of="ResizableBatchSampler").get("settings")
        if isinstance(saved, Mapping):  # groupings have rules of their own, and a name says more than a version
            check_same("grouping", saved.get("grouping"), mine["settings"]["grouping"])
        epoch, position = read_place(state, mine)
        order = self._order_of(epoch)
        check_same("curriculum", state.get("curriculum"), order.curriculum)
        num = len(order.indices)
        self._move_to(epoch, position, is_there=position <= num, fault=f"is after the {num} examples of")

    def _order_of(self, epoch: int) -> EpochOrder:
        if self._order is None or self._order.epoch != epoch:
            self._order = self._ordering.of(epoch)
        return self._order

    def __repr__(self) -> str:
        budget = "" if self._ordering.budget is None else f"{self._ordering.budget}, "
        size = f"size {peek_size(self.controller)}"
        place = f"epoch {self.epoch}, rank {self.rank} of {self.world_size}"
        return f"ResizableBatchSampler({self._ordering.num_examples:,} examples, {size}, {budget}{place})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}


Int32Array = npt.NDArray[np.int32]


def _settings_of(grouping: Grouping | None, *, shuffle: bool, seed: int) -> PlanSettings:
    # A batch mixes micro-batches, so they stand in completely random order, not in runs of equal cost.
    if grouping is None or grouping == WindowSort():
        return PlanSettings(shuffle=shuffle, seed=seed, balance_over=1, rules=_FIRST_RULES)
    if check_grouping(grouping).row_capacity is not None:
        raise ArgumentError(
            f"grouping={grouping} packs several examples into a row, but a controller counts examples; use "
            "Buckets(count), WindowSort() or Sorted(), or BatchSampler for packed rows"
        )
    return PlanSettings(grouping=grouping, shuffle=shuffle, seed=seed, balance_over=1)


class HasPrefix(Protocol):
    """A curriculum: which examples an epoch covers."""

    @property
    def num_examples(self) -> int:
        """Return how many examples there are in all."""

    def prefix(self, epoch: int) -> npt.ArrayLike:
        """Return the indices that an epoch covers, each once."""


@final
class EpochOrder(NamedTuple):
    """The examples of one epoch in order, and a fingerprint of the curriculum's choice, None without one."""

    epoch: int
    indices: Int32Array
    curriculum: str | None


@final
@dataclass(frozen=True, eq=False)
class Ordering:
    """Puts the examples of an epoch in order.

    Without lengths the order is shuffled. With them the epoch is planned into micro-batches of similar lengths under
    the budget, and these follow each other in random order, each from its longest example to its shortest.
    """

    num_examples: int
    settings: PlanSettings
    lengths: Int32Array | None
    budget: Budget | None
    curriculum: HasPrefix | None

    def of(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        if self.curriculum is None:
            return EpochOrder(epoch, self._order(self.num_examples, self.lengths, epoch), None)
        prefix = _check_prefix(self.curriculum.prefix(epoch), epoch, self.num_examples)
        if self.settings.grouping.is_static:
            # Planned with the others, so that every epoch has the same static shapes.
            order = self._order(self.num_examples, self.lengths, epoch)
            return EpochOrder(epoch, order[np.isin(order, prefix)], fingerprint(prefix))
        lengths = None if self.lengths is None else self.lengths[prefix]
        return EpochOrder(epoch, prefix[self._order(len(prefix), lengths, epoch)], fingerprint(prefix))

    def _order(self, num: int, lengths: Int32Array | None, epoch: int) -> Int32Array:
        if lengths is not None and self.budget is not None:
            return plan_epoch(lengths, self.budget, self.settings, epoch).indices
        if not self.settings.shuffle:
            return np.arange(num, dtype=np.int32)
        stream = bit_stream(self.settings.seed, epoch, Purpose.ORDER)
        return permutation(num, stream).astype(np.int32)

    def pad_to(self) -> PadTo:
        """Return what a collator pads with: the static shapes of the grouping and what fits at each, if it has any."""
        if self.lengths is None or self.budget is None:
            return PadTo()
        return plan_epoch(self.lengths, self.budget, self.settings, 0).pad_to


def make_ordering(
    num_examples: int,
    lengths: npt.ArrayLike | None,
    budget: Budget | None,
    curriculum: HasPrefix | None,
    settings: PlanSettings,
) -> Ordering:
    """Check what an order is made of."""
    num = as_whole("num_examples", num_examples, least=1)
    if num > MAX_INT32:
        raise ArgumentError(f"num_examples must be at most {MAX_INT32}, got {num}")
    if (lengths is None) != (budget is None):
        missing = "budget" if budget is None else "lengths"
        raise ArgumentError(
            f"lengths and budget go together, {missing} is missing; give both, or neither for a plain shuffle"
        )
    if curriculum is not None:
        _check_curriculum(curriculum, num)
    if lengths is None or budget is None:
        return Ordering(num, settings, None, None, curriculum)
    array = as_lengths(lengths).copy()  # a change of the caller's array must not change later epochs
    settings.grouping.check_axes(array.shape[1])
    _check_lengths(array, num, check_budget(budget), settings)
    return Ordering(num, settings, array, budget, curriculum)


def _check_lengths(lengths: Int32Array, num_examples: int, budget: Budget, settings: PlanSettings) -> None:
    if len(lengths) != num_examples:
        raise LengthsError(f"there are {len(lengths)} lengths but num_examples is {num_examples}; give one per example")
    over = np.flatnonzero(~fits(lengths, budget, settings))
    if len(over):
        length = lengths[over[0]].tolist()
        shown = length[0] if len(length) == 1 else tuple(length)
        more = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
        raise BudgetError(
            f"example {over[0]}{more} of length {shown} is over {budget} by itself; raise the budget or leave it out"
        )


def _check_curriculum(curriculum: HasPrefix, num_examples: int) -> None:
    if not callable(getattr(curriculum, "prefix", None)) or not hasattr(curriculum, "num_examples"):
        raise ArgumentError(
            f"curriculum must have num_examples and prefix(epoch), as size.Curriculum has, got {curriculum!r}"
        )
    if curriculum.num_examples != num_examples:
        raise ArgumentError(
            f"the curriculum has {curriculum.num_examples} examples but num_examples is {num_examples}; "
            "give one difficulty per example"
        )


def _check_prefix(prefix: npt.ArrayLike, epoch: int, num_examples: int) -> Int32Array:
    array = np.asarray(prefix)
    name = f"curriculum.prefix({epoch})"
    if array.ndim != 1 or len(array) == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ArgumentError(f"{name} must be one or more whole numbers, got {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= num_examples:
        raise ArgumentError(
            f"{name} must hold indices from 0 to {num_examples - 1}, got {array.min()} to {array.max()}"
        )
    counts = np.bincount(array, minlength=num_examples)
    if counts.max() > 1:
        raise ArgumentError(f"{name} must hold every index once, got {int(counts.argmax())} {counts.max()} times")
    return array.astype(np.int32)
