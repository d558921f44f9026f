"""``DynaBatchSampler``: longest examples first, and larger batches as they get shorter."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, final, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from ..._checks import as_number, as_whole, check_choice, check_ranks, read_whole
from ..._lengths import as_lengths
from ..._types import FloatArray, IntArray
from ...errors import LengthsError
from ...plan import BatchSampler, MaxItems, Plan, PlanReport
from ...plan.grouping.base import SizeRounding
from ...plan.models.prior import Task
from ._longest_first import LongestFirst, SizeRule
from .lengths import as_array

Item = TypeVar("Item")
Features: TypeAlias = dict[str, list[Any]]

# Candidate sizes in ``input_features`` per unit of max_batch_range, and the figures of each kind of length.
_CANDIDATES_PER_UNIT = 20
_STATISTICS = {"token": ("mean", "std", "sum", "max"), "word": ("mean", "sum", "max"), "char": ("sum",)}


@final
class DynaBatchSampler(Sampler[list[int]]):
    """Batches for ``DataLoader(dataset, batch_sampler=sampler)``: sorted by length, growing under a memory limit.

    The first batch holds exactly the ``min_batch_size`` longest examples. A later batch takes the most items whose
    predicted memory, relative to the first, is at most ``threshold``. Even sizes, friendly sizes and smoothing only
    ever make it smaller; the last batch takes the rest, however few or many.

    ``iter()`` fixes its epoch and does not disturb other iterators; exhausting it moves to the next epoch.

    Args:
        token_lengths: integers of 1 or more, ``(N,)``, or ``(N, axes)`` if axes such as source and target are padded
            separately. A lazy column is read once.
        word_lengths: used only in ``input_features``, or None.
        char_lengths: used only in ``input_features``, or None.
        min_batch_size: items of the first batch: the most of the longest examples that run safely.
        shuffle: shuffle the batches, and the examples inside them, in every epoch; examples of equal length change
            batches.
        threshold: the most memory of a grown batch, relative to the first.
        max_batch_range: a batch has at most ``min_batch_size × max_batch_range`` items; below 1 counts as 1.
        shuffle_seed: the same seed, epoch and lengths give the same batches on every machine.
        shuffle_keep_first_n: this many of the longest batches come first, in every epoch.
        keep_batch_size_even: round sizes down to even numbers, except for the first batch and the last.
        friendly_batch_size: likewise, round sizes down to 2^n or 3·2^n.
        dynamic_batch_mode: False gives every batch ``min_batch_size`` items.
        smooth_batches: limit how much larger a batch is than the one before it.
        smooth_batches_max_diff: this limit as a share of ``min_batch_size``; at least one item, or two for even sizes.
        debug: print a line about every batch.
        save_input_features: keep the figures of every decision in ``input_features``.
        rank: this process, from 0.
        world_size: the number of processes; each takes every ``world_size``-th batch, all take equally many.
        task: what the prediction is for: ``"generate"``, the more cautious one, or ``"train"``, under which batches of
            short examples grow further. None plans for generation here, and for training in a trainer.
        max_new_tokens: tokens generated per example; None assumes half the longest input.
        drop_last: leave out a last batch that is smaller than the one before it, and batches that cannot fill a step.

    >>> sampler = DynaBatchSampler([9, 2, 2, 7, 2, 8, 1], None, None, 2, task="train")
    >>> list(sampler)
    [[0, 5], [3, 1], [2, 4, 6]]
    """

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
        rank, world_size = check_ranks(rank, world_size)
        self.min_batch_size = as_whole("min_batch_size", min_batch_size, least=1)
        self.shuffle = bool(shuffle)
        self.threshold = as_number("threshold", threshold, least=0)
        self.batch_start_range = 1.0
        self.batch_end_range = max(as_number("max_batch_range", max_batch_range, least=0), 1.0)
        self.max_batch_size = int(self.batch_end_range * self.min_batch_size)
        self.shuffle_seed = as_whole("shuffle_seed", shuffle_seed, least=0)
        self.shuffle_keep_first_n = as_whole("shuffle_keep_first_n", shuffle_keep_first_n, least=0)
        self.keep_batch_size_even = bool(keep_batch_size_even)
        self.friendly_batch_size = bool(friendly_batch_size)
        self.dynamic_batch_mode = bool(dynamic_batch_mode)
        self.smooth_batches = bool(smooth_batches)
        self.smooth_batches_max_diff = as_number("smooth_batches_max_diff", smooth_batches_max_diff, least=0)
        self.debug = bool(debug)
        self.save_input_features = bool(save_input_features)
        check_choice("task", task, (None, *get_args(Task)))
        self.task: Task | None = task
        self.max_new_tokens = None if max_new_tokens is None else as_whole("max_new_tokens", max_new_tokens, least=1)
        self.drop_last = bool(drop_last)
        self._lengths = _check_lengths(token_lengths, word_lengths, char_lengths)
        self._inner = self._make_inner(rank, world_size, balance_over=world_size)
        self.input_features: list[Features] = []
        self._record()

    @property
    def batches(self) -> list[list[int]]:
        """Return the rest of the current epoch, for all ranks, as a new list of lists."""
        return list(self.plan)  # type: ignore[arg-type]  # rows are never packed here

    @property
    def is_first_shuffle(self) -> bool:
        """Return whether the first epoch is not finished yet."""
        return self.epoch == 0

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
        other.task = self.task or "train"
        other._inner = other._make_inner(self.rank, self.world_size, balance_over=self._grouping.balance_over)
        other.set_epoch(self.epoch)
        return other

    def for_rank(self, rank: int, world_size: int, *, drop_last: bool = False) -> DynaBatchSampler:
        """Return a sampler of the same data and settings at the start of the same epoch, for one process of several."""
        rank, world_size = check_ranks(rank, world_size)
        other = copy.copy(self)
        other.drop_last = self.drop_last or drop_last
        other._inner = other._make_inner(rank, world_size, balance_over=world_size)
        other.set_epoch(self.epoch)
        return other

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._inner)  # type: ignore[arg-type]  # rows are never packed here

    def __len__(self) -> int:
        return len(self._inner)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, as JSON values; it continues on any number of ranks."""
        return {**self._inner.state_dict(), "balance_over": self._grouping.balance_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            StateMismatchError: the state belongs to other lengths or settings; the sampler stays as it was.
        """
        balance_over = read_whole(state, "balance_over")
        inner = self._inner
        if balance_over != self._grouping.balance_over:
            # The order of the batches follows from the number of ranks on which the epoch began.
            inner = self._make_inner(self.rank, self.world_size, balance_over=max(1, balance_over))
        inner.load_state_dict(state)
        self._inner = inner

    @property
    def _grouping(self) -> LongestFirst:
        grouping = self._inner.settings.grouping
        assert isinstance(grouping, LongestFirst)
        return grouping

    def _make_inner(self, rank: int, world_size: int, *, balance_over: int) -> BatchSampler:
        return BatchSampler(
            self._lengths["token"],
            MaxItems(self.max_batch_size),
            rank=rank,
            world_size=world_size,
            grouping=LongestFirst(
                rule=self._rule if self.dynamic_batch_mode else None,
                batch_size=self.min_batch_size,
                keep_first=self.shuffle_keep_first_n,
                drop_last=self.drop_last,
                balance_over=balance_over,
            ),
            shuffle=self.shuffle,
            seed=self.shuffle_seed,
            size_multiple_of=self._rounding.multiple_of,
            size_ladder=self._rounding.ladder,
            remainder="drop" if self.drop_last else "spread",
        )

    @property
    def _rule(self) -> SizeRule:
        max_diff = self.smooth_batches_max_diff if self.smooth_batches else None
        sizes = (self.min_batch_size, self.max_batch_size)
        return SizeRule(*sizes, self.threshold, max_diff, self.task or "generate", self.max_new_tokens)

    @property
    def _rounding(self) -> SizeRounding:
        return SizeRounding(2 if self.keep_batch_size_even else 1, "pow2x3" if self.friendly_batch_size else None)

    def _record(self) -> None:
        """Print or keep how every batch was decided, longest first."""
        keeps_features = self.save_input_features and self.dynamic_batch_mode
        if not (self.debug or keeps_features):
            return
        tokens = self._lengths["token"]
        order = np.argsort(-tokens.sum(axis=1, dtype=np.int64), kind="stable")
        sizes = self._grouping.sizes(tokens[order], self._rounding)
        starts = np.cumsum(sizes) - sizes
        if self.debug:
            widths = np.maximum.reduceat(tokens[order], starts, axis=0).sum(axis=1)
            print(*_decisions(sizes, widths, self._grouping.rule), sep="\n")
        if keeps_features:
            lengths = {kind: values[order] for kind, values in self._lengths.items()}
            lengths["token"] = tokens[order].sum(axis=1)
            self.input_features = _input_features(lengths, starts, self.batch_end_range, self._rule)


def _check_lengths(token_lengths: Any, word_lengths: Any, char_lengths: Any) -> dict[str, npt.NDArray[np.int32]]:
    """Return the lengths by name, tokens of shape ``(N, axes)``; words and characters if they are given."""
    lengths = {"token": as_lengths(as_array(token_lengths))}
    for name, given in (("word", word_lengths), ("char", char_lengths)):
        if given is None:
            continue
        array = as_array(given)
        if len(array) != len(lengths["token"]):
            raise LengthsError(
                f"{name}_lengths must have one number per example, {len(lengths['token'])}, got {len(array)}"
            )
        if not np.issubdtype(array.dtype, np.integer) or array.min() < 0:
            raise LengthsError(f"{name}_lengths must be whole numbers of 0 or more, got {array.dtype}")
        lengths[name] = array.astype(np.int32)
    return lengths


def _decisions(sizes: IntArray, longest: IntArray, rule: SizeRule | None) -> Iterator[str]:
    """Yield one line per batch, longest first."""
    for number, (size, length) in enumerate(zip(sizes.tolist(), longest.tolist(), strict=True), start=1):
        line = f"batch {number}: {size} items, longest {length}"
        if rule is not None:
            share = rule.predict(size, length, int(longest[0]))
            line += f", predicted {float(share):.2f} of the first batch"
        yield line


def _input_features(
    lengths: dict[str, npt.NDArray[np.int32]], starts: IntArray, end_range: float, rule: SizeRule
) -> list[Features]:
    """Return one table per batch except the first, with the figures of every candidate size as columns.

    Candidates go from ``batch_size`` to ``batch_size × end_range``. ``_y`` is the candidate, ``_x`` the first batch and
    ``_diff`` their quotient; ``prediction`` is the memory relative to the first batch. ``pandas.DataFrame(table)``
    makes a frame of a table.

    Args:
        lengths: by kind, longest example first; several token axes are summed.
        starts: where each batch starts.
        end_range: the largest candidate, relative to the first batch.
        rule: predicts the memory.
    """
    steps = max(1, int((end_range - 1.0) * _CANDIDATES_PER_UNIT))
    sizes = np.unique(np.round(rule.batch_size * np.linspace(1.0, end_range, steps)).astype(np.int64))
    first = {kind: _statistics(values, np.full(len(sizes), rule.batch_size)) for kind, values in lengths.items()}
    reference = int(first["token"]["max"][0])
    tables = []
    for start in starts[1:].tolist():
        columns: dict[str, npt.NDArray[Any]] = {
            "batch_size_y": sizes,
            "batch_size_x": np.full(len(sizes), rule.batch_size),
            "batch_size_diff": sizes / rule.batch_size,
        }
        for kind, values in lengths.items():
            mine = _statistics(values[start:], sizes)
            for name in _STATISTICS[kind]:
                columns[f"{kind}_{name}_y"], columns[f"{kind}_{name}_x"] = mine[name], first[kind][name]
                if name != "std":
                    columns[f"{kind}_{name}_diff"] = mine[name] / np.maximum(first[kind][name], 1e-12)
        columns["prediction"] = rule.predict(sizes, columns["token_max_y"].astype(np.int64), reference)
        tables.append({name: values.tolist() for name, values in columns.items()})
    return tables


def _statistics(values: npt.NDArray[np.int32], counts: IntArray) -> dict[str, FloatArray]:
    """Return the figures of the first ``count`` values, for each count."""
    run = values[: int(counts.max())].astype(np.float64)
    num = np.minimum(counts, len(run))
    total = np.cumsum(run)[num - 1]
    # Var = E[x²] - E[x]², which rounding may push below zero.
    variance = np.maximum(np.cumsum(run**2)[num - 1] / num - (total / num) ** 2, 0.0)
    return {"sum": total, "mean": total / num, "std": np.sqrt(variance), "max": np.maximum.accumulate(run)[num - 1]}
