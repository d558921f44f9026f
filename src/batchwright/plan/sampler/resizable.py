"""ResizableBatchSampler: a controller decides how many examples an update uses, when its batch is formed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar, final, get_args

import numpy as np
import numpy.typing as npt

from ..._checks import (
    HasSize,
    as_sized,
    as_state,
    check_choice,
    check_ranks,
    check_same,
    is_whole,
    peek_size,
    read_size,
)
from ...errors import ArgumentError
from .._settings import PlanSettings
from ..budget import Budget
from ..collating import PadTo
from ..grouping.base import Grouping, check_grouping
from ..grouping.sorting import WindowSort
from ._ordering import EpochOrder, HasPrefix, Int32Array, make_ordering
from ._progress import AbstractEpochs, Cursor, fingerprint, read_place

Item = TypeVar("Item")
SizeUnit: TypeAlias = Literal["examples", "tokens"]

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

    With ``size_unit="tokens"`` the size counts tokens: a batch takes the next examples as long as all their tokens
    together are at most ``controller.size``, and at least one example per rank. The tokens of an example are its
    length, without padding, added up over its axes. The order, the shares and the state stay as they are, counted in
    examples. Lengths alone will do, without a budget; examples are then shuffled.

    Workers form batches ahead: with ``num_workers > 0`` a new size takes effect after the batches already prefetched.
    Where it must apply at once, use ``regroup``.

    The state is plain JSON and counts the examples consumed. It holds neither rank nor world size, so it resumes on
    any world size, and not the state of the controller: save ``controller.state_dict()`` beside it. With both
    restored, the batches are those of a run without a break; batches that workers had formed ahead are formed
    again, with the size that the controller has at that time.

    Args:
        num_examples: indices are ``range(num_examples)``.
        controller: a ``BatchSizeController``, anything else with a ``.size``, or a fixed size.
        lengths: as for ``plan_batches``, with ``budget`` or ``size_unit="tokens"``.
        budget: what a micro-batch may cost, with ``lengths``; every example must fit it by itself.
        grouping: how examples are divided into micro-batches, with ``lengths`` and ``budget``; any but ``Packed``, by
            default ``WindowSort()``.
        size_unit: what ``controller.size`` counts, ``"examples"`` or ``"tokens"``.
        curriculum: has ``num_examples`` and ``prefix(epoch)``, the indices that an epoch covers; a ``size.Curriculum``.
        shuffle: a new order every epoch; the order of the data, or of the prefix, otherwise.
        seed: the same seed and epoch give the same order on every machine.
        rank: this process, from 0.
        world_size: processes.
        groups: refused, since such batches are cut; ``BatchSampler`` takes groups of examples that stay together.

    >>> from types import SimpleNamespace
    >>> controller = SimpleNamespace(size=2)
    >>> sampler = ResizableBatchSampler(7, controller, shuffle=False)
    >>> for batch in sampler:
    ...     print(batch)
    ...     controller.size = 4
    [0, 1]
    [2, 3, 4, 5]
    [6]
    >>> list(ResizableBatchSampler(5, 8, lengths=[4, 4, 9, 1, 2], size_unit="tokens", shuffle=False))
    [[0, 1], [2], [3, 4]]
    """

    def __init__(
        self,
        num_examples: int,
        controller: HasSize,
        *,
        lengths: npt.ArrayLike | None = None,
        budget: Budget | None = None,
        grouping: Grouping | None = None,
        size_unit: SizeUnit = "examples",
        curriculum: HasPrefix | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        groups: None = None,
    ) -> None:
        if groups is not None:
            raise ArgumentError(
                "ResizableBatchSampler takes no groups: a controller counts examples, and Stepper cuts its batches "
                "into micro-batches, so groups would be split; use BatchSampler(..., groups=...)"
            )
        if not is_whole(num_examples) and isinstance(num_examples, Sized):
            kind = type(num_examples).__name__
            raise ArgumentError(f"num_examples must be a whole number, got a {kind}; pass how many it holds, len(data)")
        self.rank, self.world_size = check_ranks(rank, world_size)
        self.controller = as_sized("controller", controller)
        check_choice("size_unit", size_unit, get_args(SizeUnit))
        _check_unit(self.controller, size_unit, f"size_unit is {size_unit!r}")
        self.size_unit = size_unit
        self._settings = _settings_of(grouping, shuffle=shuffle, seed=seed)
        if grouping is not None and (lengths is None or budget is None):
            raise ArgumentError(f"grouping={grouping} divides examples by their lengths; give lengths and budget too")
        self._ordering = make_ordering(
            num_examples, lengths, budget, curriculum, self._settings, counts_tokens=size_unit == "tokens"
        )
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
        ends = self._token_ends(order)
        while cursor.given < len(order):
            batch = order[cursor.given : self._next_stop(cursor.given, ends)]
            cursor.give(len(batch), num_repeated=max(0, self.world_size - len(batch)))
            yield self._share(batch).tolist()
        self._progress.end(cursor)

    def _token_ends(self, order: Int32Array) -> npt.NDArray[np.int64] | None:
        """Return the tokens of the epoch up to and with each of its examples, None where sizes count examples."""
        lengths = self._ordering.lengths
        if self.size_unit == "examples" or lengths is None:
            return None
        return lengths[order].sum(axis=1, dtype=np.int64).cumsum()

    def _next_stop(self, start: int, ends: npt.NDArray[np.int64] | None) -> int:
        """Return where the batch that begins at an example of the epoch ends."""
        size = read_size(self.controller)
        if ends is None:
            return start + max(size, self.world_size)
        before = int(ends[start - 1]) if start else 0
        return max(start + self.world_size, int(np.searchsorted(ends, before + size, side="right")))

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
            # Left out at its usual value, so that states of examples stay those of earlier versions.
            **({} if self.size_unit == "examples" else {"size_unit": self.size_unit}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on this or another world size.

        Raises:
            StateMismatchError: the state is of other lengths, another budget, unit or curriculum, other settings or
                another version; the sampler stays as it was.
        """
        mine = self.state_dict()
        saved = as_state(state, of="ResizableBatchSampler").get("settings")
        if isinstance(saved, Mapping):  # groupings have rules of their own, and a name says more than a version
            check_same("grouping", saved.get("grouping"), mine["settings"]["grouping"])
        check_same("size_unit", state.get("size_unit", "examples"), self.size_unit)  # earlier states have no unit
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
        unit = " tokens" if self.size_unit == "tokens" else ""
        size = f"size {peek_size(self.controller)}{unit}"
        place = f"epoch {self.epoch}, rank {self.rank} of {self.world_size}"
        return f"ResizableBatchSampler({self._ordering.num_examples:,} examples, {size}, {budget}{place})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}


def _check_unit(controller: Any, size_unit: SizeUnit, told: str) -> None:
    """Refuse a policy that says that it counts something else, as ``goodput(unit="tokens")`` does."""
    unit = getattr(getattr(controller, "policy", None), "unit", None)
    if unit not in (None, size_unit):
        raise ArgumentError(f"the policy of the controller counts {unit}, but {told}; let both count the same")


def check_length_of(length_of: Any, controller: HasSize, world_size: int) -> Any:
    """Return the ``length_of`` of ``regroup``, or refuse one that the policy or the ranks do not go with."""
    if length_of is None:
        _check_unit(controller, "examples", "without length_of a size counts examples")
        return None
    if not callable(length_of):
        raise ArgumentError(f"length_of must be a function of an example, got {length_of!r}")
    _check_unit(controller, "tokens", "with length_of a size counts tokens")
    if world_size > 1:
        raise ArgumentError("length_of counts tokens on one rank only; ResizableBatchSampler does so on several")
    return length_of


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
