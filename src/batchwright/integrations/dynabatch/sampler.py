"""``DynaBatchSampler``: longest examples first, and larger batches as they get shorter."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from ..._checks import as_flag, as_state, check_ranks, is_same, read_whole, shared_options
from ...errors import ArgumentError, StateMismatchError
from ...plan import BatchSampler, MaxItems, Plan, PlanReport
from ...plan.models.prior import Task
from ._features import Features, decisions, input_features
from ._given import GivenBatches, as_batches, check_lengths
from ._longest_first import LongestFirst
from ._settings import Setting, Settings

Item = TypeVar("Item")

# Raise it when the same lengths and settings begin to give other sizes: an epoch is not continued in other batches.
SIZING = 2

# Settings that change the order of batches only, not their sizes.
_ORDER = ("shuffle", "shuffle_seed", "shuffle_keep_first_n")


@final
class DynaBatchSampler(Sampler[list[int]]):
    """Batches for ``DataLoader(dataset, batch_sampler=sampler)``: sorted by length, growing under a memory limit.

    The first batch holds exactly the ``min_batch_size`` longest examples. A later batch takes the most items whose
    predicted memory, relative to the first, is at most ``threshold``, and never fewer than ``min_batch_size``: so many
    fit, as none is longer than those of the first batch. Even sizes, friendly sizes and smoothing only ever make a
    grown batch smaller; the last batch takes the rest. So there are never more batches than of a fixed size. Only with
    several axes may a batch be smaller, where one that is wider on an axis would take more memory than the first.

    ``iter()`` fixes its epoch and does not disturb other iterators; exhausting it moves to the next epoch. Settings may
    be set later, as attributes: the current epoch begins anew under them. An iterator that has begun runs on as it
    began, and the next one shows the change.

    Args:
        token_lengths: whole numbers ``(N,)``, or ``(N, axes)`` if axes such as source and target are padded
            separately; floats must be whole, and 0 counts as 1. A lazy column is read once.
        word_lengths: used only in ``input_features``, or None. They do not change a batch: a device sees only token
            ids, so its memory cannot depend on words.
        char_lengths: likewise.
        min_batch_size: items of the first batch: the most of the longest examples that run safely.
        shuffle: shuffle the batches, and the examples inside them, in every epoch; examples of equal length change
            batches.
        threshold: the most memory of a grown batch, relative to the first; a higher one never gives more batches.
        max_batch_range: a batch has at most ``min_batch_size × max_batch_range`` items, rounded; below 1 counts as 1. A
            larger one never gives more batches. The attribute is ``batch_end_range``.
        shuffle_seed: the same seed, epoch and lengths give the same batches on every machine.
        shuffle_keep_first_n: this many of the longest batches come first, in every epoch.
        keep_batch_size_even: round sizes down to even numbers, but not below ``min_batch_size``; the first batch and
            the last are not rounded.
        friendly_batch_size: likewise, round sizes down to 2^n or 3·2^n.
        dynamic_batch_mode: False gives every batch ``min_batch_size`` items.
        smooth_batches: limit how much larger a batch is than the one before it, before sizes are rounded.
        smooth_batches_max_diff: this limit as a share of ``min_batch_size``; at least one item, or two for even sizes.
        debug: print a line about every batch.
        save_input_features: keep the figures of every decision in ``input_features``: a ``pandas.DataFrame`` per batch
            with the columns of dynabatch, or a dict of lists if pandas is not installed.
        rank: this process, from 0.
        world_size: the number of processes; each takes every ``world_size``-th batch, all take equally many.
        task: what the prediction is for: ``"generate"``, the more cautious one, or ``"train"``, under which batches of
            short examples grow further. None plans for generation here, and for training in a trainer.
        max_new_tokens: tokens generated per example. None assumes half the longest input of each batch: short inputs
            have short outputs, as in translation. If all examples generate up to a fixed number, give it: a large one
            leaves less room for growth.
        drop_last: leave out a last batch that is smaller than the one before it, and batches that cannot fill a step.

    >>> sampler = DynaBatchSampler([9, 2, 2, 7, 2, 8, 1], None, None, 2, task="train")
    >>> list(sampler)
    [[0, 5], [3, 1], [2, 4, 6]]
    >>> sampler
    <DynaBatchSampler: 3 batches of 7 examples, sizes 2 to 3, task='train', threshold=0.7, max_batch_range=2.0>
    """

    min_batch_size = Setting[int]()
    shuffle = Setting[bool]()
    threshold = Setting[float]()
    batch_start_range = Setting[float](advice="batches never shrink below min_batch_size, but for the last")
    batch_end_range = Setting[float]("max_batch_range")
    max_batch_size = Setting[int](advice="set batch_end_range, by which min_batch_size is multiplied")
    shuffle_seed = Setting[int]()
    shuffle_keep_first_n = Setting[int]()
    keep_batch_size_even = Setting[bool]()
    friendly_batch_size = Setting[bool]()
    dynamic_batch_mode = Setting[bool]()
    smooth_batches = Setting[bool]()
    smooth_batches_max_diff = Setting[float]()
    debug = Setting[bool]()
    save_input_features = Setting[bool]()
    task = Setting["Task | None"]()
    max_new_tokens = Setting["int | None"]()
    drop_last = Setting[bool]()

    def __init__(
        self,
        token_lengths: Any,
        word_lengths: Any,
        char_lengths: Any,
        min_batch_size: int,
        shuffle: bool = False,
        threshold: float = 0.7,
        max_batch_range: float = 2.0,
        shuffle_seed: int = 21,
        shuffle_keep_first_n: int = 5,
        keep_batch_size_even: bool = False,
        friendly_batch_size: bool = False,
        dynamic_batch_mode: bool = True,
        smooth_batches: bool = True,
        smooth_batches_max_diff: float = 0.2,
        debug: bool = False,
        save_input_features: bool = False,
        *,
        rank: int = 0,
        world_size: int = 1,
        task: Task | None = None,
        max_new_tokens: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self._settings = Settings(**shared_options(Settings, locals()))
        rank, world_size = check_ranks(rank, world_size)
        self._lengths = check_lengths(token_lengths, word_lengths, char_lengths)
        self._given: list[npt.NDArray[np.int32]] | None = None
        self._first_epoch = 0
        self._inner = self._make_inner(self._settings, rank, world_size, balance_over=world_size)
        self.input_features: list[Features]
        self._record()

    @property
    def batches(self) -> list[list[int]]:
        """The rest of the current epoch, for all ranks, as a new list: changing it does not change the sampler.

        Set it to use exactly the given batches, whatever is set afterwards. No example may come twice; those that come
        in none are left out, and the report counts them as dropped. The batches are shuffled if ``shuffle`` is True,
        and divided over the ranks; of several ranks the last batches are split so that all have equally many.

        >>> sampler = DynaBatchSampler([9, 2, 7], None, None, 2)
        >>> sampler.batches = [[2], [0, 1]]
        >>> list(sampler)
        [[2], [0, 1]]
        """
        return list(self.plan)  # type: ignore[arg-type]  # rows are never packed here

    @batches.setter
    def batches(self, batches: Any) -> None:
        self._given = as_batches(batches, self.num_examples)
        self._change()

    @property
    def is_first_shuffle(self) -> bool:
        """Whether the first epoch is not finished yet. Set it to True to count from the current epoch.

        The first batches come first in every epoch, so this moves none; ``shuffle_keep_first_n = 0`` does.
        """
        return self.epoch == self._first_epoch

    @is_first_shuffle.setter
    def is_first_shuffle(self, is_first: bool) -> None:
        if not as_flag("is_first_shuffle", is_first) and self.is_first_shuffle:
            raise ArgumentError(
                "is_first_shuffle can only be set to True, as the first batches are kept in every epoch; set "
                "shuffle_keep_first_n = 0 to shuffle them too"
            )
        if is_first:
            self._first_epoch = self.epoch

    @property
    def num_examples(self) -> int:
        """Return how many examples there are: the length of the data set to load."""
        return len(self._lengths["token"])

    @property
    def rank(self) -> int:
        """Return this process, from 0."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self._inner.world_size

    @property
    def epoch(self) -> int:
        """Return the epoch the next ``iter()`` runs."""
        return self._inner.epoch

    @property
    def plan(self) -> Plan:
        """Return the rest of the current epoch, for all ranks."""
        return self._inner.plan

    def report(self) -> PlanReport:
        """Measure the current epoch: padding, shapes, recurrence of neighbours, waiting of ranks."""
        return self._inner.report()

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a position restored within that same epoch is kept."""
        self._inner.set_epoch(epoch)

    def track(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over a loader of this sampler; states then count what the loop received, not what was prefetched."""
        return self._inner.track(loader)

    def for_training(self) -> DynaBatchSampler:
        """Return a sampler of the same data and settings at the start of the same epoch, planned for training.

        A ``task`` that was chosen stays.

        >>> sampler = DynaBatchSampler([9, 9, 2, 2, 2, 2], None, None, 2)
        >>> sampler.task, sampler.for_training().task
        (None, 'train')
        """
        other = copy.copy(self)
        other._change(task=self.task or "train")
        return other

    def for_rank(self, rank: int, world_size: int, *, drop_last: bool = False) -> DynaBatchSampler:
        """Return a sampler of the same data and settings at the start of the same epoch, for one process of several."""
        rank, world_size = check_ranks(rank, world_size)
        other = copy.copy(self)
        other._settings = replace(self._settings, drop_last=self.drop_last or as_flag("drop_last", drop_last))
        other._inner = other._make_inner(other._settings, rank, world_size, balance_over=world_size)
        other.set_epoch(self.epoch)
        return other

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator: the epoch is fixed now, not at the first next().
        inner = self._inner
        return self._run(inner, inner.epoch, iter(inner))  # type: ignore[arg-type]  # rows are never packed here

    def _run(self, inner: BatchSampler, epoch: int, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        yield from batches
        if self._inner is not inner and (self.epoch, inner.epoch) == (epoch, epoch + 1):
            self.set_epoch(epoch + 1)  # planned again while the epoch ran

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        plan, rank = self.plan, ""
        sizes = plan.shapes[:, 0].tolist() or [0]
        if self.world_size > 1:
            rank = f", rank={self.rank}, world_size={self.world_size}"
        rule = "batches as they were set"
        if self._given is None:
            rule = f"task={self.task!r}, threshold={self.threshold}, max_batch_range={self.batch_end_range}"
        return (
            f"<DynaBatchSampler: {len(plan)} batches of {self.num_examples} examples, "
            f"sizes {min(sizes)} to {max(sizes)}, {rule}{rank}>"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, as JSON values; it continues on any number of ranks."""
        return {**self._inner.state_dict(), "balance_over": self._grouping.balance_over, "sizing": SIZING}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            StateMismatchError: the state belongs to other lengths, settings or batches; the sampler stays as it was.
        """
        state = as_state(state, of="DynaBatchSampler")
        _check_sizing(state)
        balance_over = read_whole(state, "balance_over")
        inner = self._inner
        if balance_over != self._grouping.balance_over:
            # The order of the batches follows from the number of ranks on which the epoch began.
            ranks = (self.rank, self.world_size)
            inner = self._make_inner(self._settings, *ranks, balance_over=max(1, balance_over))
        inner.load_state_dict(state)
        self._inner = inner

    @property
    def _grouping(self) -> LongestFirst | GivenBatches:
        grouping = self._inner.settings.grouping
        assert isinstance(grouping, LongestFirst | GivenBatches)
        return grouping

    def _change(self, **changes: Any) -> None:
        """Plan with other settings, and begin the current epoch anew; what is refused changes nothing."""
        settings = replace(self._settings, **changes)
        ranks = (self.rank, self.world_size)
        inner = self._make_inner(settings, *ranks, balance_over=self._grouping.balance_over)
        inner.set_epoch(self.epoch)
        is_recorded = settings == replace(self._settings, **{name: getattr(settings, name) for name in _ORDER})
        self._settings, self._inner = settings, inner
        if not is_recorded:
            self._record()

    def _make_inner(self, settings: Settings, rank: int, world_size: int, *, balance_over: int) -> BatchSampler:
        grouping: LongestFirst | GivenBatches = settings.grouping(balance_over)
        most = settings.max_batch_size
        if self._given is not None:
            keep_first = settings.shuffle_keep_first_n
            grouping = GivenBatches.of(self._given, keep_first=keep_first, balance_over=balance_over)
            most = max(map(len, self._given))
        return BatchSampler(
            self._lengths["token"],
            MaxItems(most),
            rank=rank,
            world_size=world_size,
            grouping=grouping,
            shuffle=settings.shuffle,
            seed=settings.shuffle_seed,
            size_multiple_of=settings.rounding.multiple_of,
            size_ladder=settings.rounding.ladder,
            remainder="drop" if settings.drop_last else "spread",
        )

    def _record(self) -> None:
        """Print or keep how every batch was decided, longest first."""
        self.input_features = []
        keeps_features = self.save_input_features and self.dynamic_batch_mode
        grouping = self._grouping
        if isinstance(grouping, GivenBatches) or not (self.debug or keeps_features):
            return
        tokens = self._lengths["token"]
        order = np.argsort(-tokens.sum(axis=1, dtype=np.int64), kind="stable")
        sizes = grouping.sizes(tokens[order], self._settings.rounding)
        starts = np.cumsum(sizes) - sizes
        if self.debug:
            widths = np.maximum.reduceat(tokens[order], starts, axis=0).sum(axis=1)
            print(*decisions(sizes, widths, grouping.rule), sep="\n")
        if keeps_features:
            lengths = {kind: values[order] for kind, values in self._lengths.items()}
            lengths["token"] = tokens[order].sum(axis=1)
            self.input_features = input_features(lengths, starts, self.batch_end_range, self._settings.rule)


def _check_sizing(state: Mapping[str, Any]) -> None:
    """Refuse the middle of an epoch that was planned in other sizes; at its start nothing is lost or repeated."""
    sizing = state.get("sizing", 1)
    if not is_same(sizing, SIZING) and not is_same(state.get("position"), 0):
        raise StateMismatchError(
            f"the state was saved in the middle of an epoch whose batches have other sizes (sizing {sizing!r}, here "
            f"{SIZING}); finish that epoch with the version of batchwright that began it, or start without the state"
        )
