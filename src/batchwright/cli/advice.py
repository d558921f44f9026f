"""Whether planned batches pay off for one data set: against what, for which model, and for which task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

import numpy as np

import batchwright as bw

from .._lengths import as_lengths
from .._types import IntArray
from ..errors import BatchwrightError
from .compare import (
    Comparison,
    Entry,
    Settings,
    compare,
    entry_of,
    fixed_plans,
    groupings,
    make_plan,
    random_order,
    slowest,
)

# A smaller gain drowns in the noise of a training run and is not worth a change.
WORTH = 1.10
# Lengths hardly vary if large random batches are padded less than this.
_LITTLE_PADDING = 0.1
# A rank correlation below this says that input length is a poor proxy for the output: it explains less than half.
PROXY = 0.7
# Rounding lengths up to multiples of 8 is worth a word if it costs at most this much padding.
_PAD_ALLOWANCE = 0.02
# Packed rows need another collator and another attention: they must save at least this much, and lose less elsewhere.
_PACK_SAVING = 0.02
# A KV cache this many times as large as that of the largest fixed batch may not fit where that one does.
_MORE_CACHE = 1.05

ModelKind: TypeAlias = Literal["encoder", "decoder", "seq2seq"]
Task: TypeAlias = Literal["train", "generate"]
Baseline: TypeAlias = Literal["shuffled", "sorted"]
Verdict: TypeAlias = Literal["yes", "depends", "pack", "no"]


@final
@dataclass(frozen=True, kw_only=True)
class Question:
    """What the batches are for, and what they are compared with.

    Args:
        model_kind: the kind of the model; None if it is not known.
        task: whether the model is trained or generates.
        against: the fixed size in random order, as a plain ``DataLoader`` has it, or sorted by length.
    """

    model_kind: ModelKind | None = None
    task: Task = "train"
    against: Baseline = "shuffled"

    def planned(self, lengths: IntArray) -> IntArray:
        """Return the lengths that batches are planned by.

        A decoder-only model reads source and target as one sequence. While a model generates, only the inputs are
        known.

        >>> pairs = np.array([[3, 5], [2, 1]])
        >>> Question(model_kind="decoder").planned(pairs).tolist(), Question(task="generate").planned(pairs).tolist()
        ([8, 3], [3, 2])
        """
        if lengths.ndim == 1 or (self.task == "train" and self.model_kind != "decoder"):
            return lengths
        return lengths[:, 0] if self.task == "generate" else lengths.sum(axis=1, dtype=np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times as fast an epoch becomes.

    Args:
        compute_bound: the ratio of padded tokens, for steps whose time grows with them; a step lasts as long as its
            slowest rank.
        launch_bound: the ratio of the numbers of steps, for steps that all take the same time.
    """

    compute_bound: float
    launch_bound: float

    @property
    def low(self) -> float:
        """Return the lower end of the range."""
        return min(self.compute_bound, self.launch_bound)

    @property
    def high(self) -> float:
        """Return the upper end of the range."""
        return max(self.compute_bound, self.launch_bound)


@final
@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What is known of the outputs when a model generates.

    Args:
        correlation: the rank correlation of input and output lengths; None if one of them is always the same.
        cache_ratio: the largest KV cache of a planned batch over that of the fixed batches asked for, in tokens.
    """

    correlation: float | None
    cache_ratio: float

    @property
    def is_foreseen(self) -> bool:
        """Say whether the inputs tell the outputs, and planned batches need no larger cache."""
        return (self.correlation is None or self.correlation >= PROXY) and self.cache_ratio <= _MORE_CACHE


@final
@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer for one data set.

    Args:
        verdict: ``yes`` if the whole range of the gain is worth it; ``depends`` if a part of it is, or if the inputs
            do not tell the cost; ``pack`` if packed rows are better; ``no``.
        question: what was asked.
        settings: the settings of every plan.
        fixed_size: the largest fixed size that can never exceed the budget.
        planned: the recommended plan.
        packed: the examples packed into rows; None for pairs.
        rounded: the recommended plan padded to multiples of 8; None if it costs too much or was not asked for.
        shuffled: the fixed size in random order.
        sorted: the fixed size, sorted by length.
        against_shuffled: the gain over the shuffled fixed size.
        against_sorted: the gain over the sorted fixed size.
        outputs: what is known of the outputs; None while training, or if the data hold no outputs.
    """

    verdict: Verdict
    question: Question
    settings: Settings
    fixed_size: int
    planned: Entry
    packed: Entry | None
    rounded: Entry | None
    shuffled: Entry
    sorted: Entry
    against_shuffled: Gain
    against_sorted: Gain
    outputs: Outputs | None

    @property
    def gain(self) -> Gain:
        """Return the gain that was asked for."""
        return self.against_shuffled if self.question.against == "shuffled" else self.against_sorted

    @property
    def baseline(self) -> Entry:
        """Return the fixed size that was asked for."""
        return self.shuffled if self.question.against == "shuffled" else self.sorted

    @property
    def used(self) -> Entry:
        """Return the plan that the answer is about."""
        return self.packed if self.verdict == "pack" and self.packed is not None else self.planned

    @property
    def lengths_hardly_vary(self) -> bool:
        """Say whether random batches are padded little, for their size.

        Small ones always are less: even lengths waste ``(n - 1) / (n + 1)`` of what they waste in large batches.
        """
        few = (self.fixed_size - 1) / (self.fixed_size + 1)
        return self.fixed_size > 1 and self.shuffled.padding < _LITTLE_PADDING * few


def advise(
    lengths: IntArray,
    settings: Settings,
    question: Question | None = None,
    *,
    rounded_tokens: int | None = None,
    progress: bool = False,
) -> Advice:
    """Compare the recommended plan with a fixed size, shuffled and sorted.

    The padding of every plan is the one that ``compare`` finds.

    Args:
        lengths: shape ``(N,)``, or ``(N, 2)`` for pairs of source and target.
        settings: the budget and the other options.
        question: what the batches are for; None is training, against random batches of a fixed size.
        rounded_tokens: the budget that goes with lengths in multiples of 8; None for the same.
        progress: whether to show progress on a terminal.
    """
    question = Question() if question is None else question
    inputs = as_lengths(question.planned(lengths))
    comparison = compare(inputs, settings, progress=progress)
    planned, generates = comparison.recommended, question.task == "generate"
    outputs = None
    gains = [gain_of(fixed, planned) for fixed in (comparison.shuffled, comparison.sorted)]
    if generates and lengths.ndim == 2:
        outputs, gains = _with_outputs(lengths, comparison, question)
    asked = gains[0] if question.against == "shuffled" else gains[1]
    verdict = verdict_of(asked)
    if generates and verdict == "yes" and (outputs is None or not outputs.is_foreseen):
        verdict = "depends"
    if packs_better(comparison, question):
        verdict = "pack"
    return Advice(
        verdict=verdict,
        question=question,
        settings=settings,
        fixed_size=comparison.fixed_size,
        planned=planned,
        packed=comparison.packed,
        rounded=_rounded(inputs, planned, settings, rounded_tokens),
        shuffled=comparison.shuffled,
        sorted=comparison.sorted,
        against_shuffled=gains[0],
        against_sorted=gains[1],
        outputs=outputs,
    )


def verdict_of(gain: Gain) -> Verdict:
    """Say whether a gain is worth a change: wherever in its range the truth lies, at one end only, or nowhere.

    >>> [verdict_of(Gain(compute_bound=x, launch_bound=3.0)) for x in (1.5, 0.96)]
    ['yes', 'depends']
    """
    if gain.low >= WORTH:
        return "yes"
    return "depends" if gain.high >= WORTH else "no"


def gain_of(fixed: Entry, planned: Entry) -> Gain:
    """Return how many times as fast one plan is as another."""
    return Gain(
        compute_bound=fixed.waited_tokens / planned.waited_tokens,
        launch_bound=fixed.num_batches / planned.num_batches,
    )


def rank_correlation(first: IntArray, second: IntArray) -> float | None:
    """Return the correlation of the ranks, equal values sharing theirs; None if all values are equal.

    >>> rank_correlation(np.array([1, 2, 3]), np.array([10, 100, 1000])), rank_correlation(np.ones(2), np.ones(2))
    (1.0, None)
    """
    ranks = [_ranks(first), _ranks(second)]
    if any(np.ptp(values) == 0 for values in ranks):
        return None
    first, second = (values - values.mean() for values in ranks)
    return round(float((first * second).sum() / np.sqrt((first**2).sum() * (second**2).sum())), 12)


def _ranks(values: IntArray) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = (ends - (counts - 1) / 2)[places]
    return ranks


def _with_outputs(lengths: IntArray, comparison: Comparison, question: Question) -> tuple[Outputs, list[Gain]]:
    """Return what outputs change: a batch decodes until its longest output ends, and its cache holds all of them."""
    settings = comparison.settings
    inputs, outputs = as_lengths(lengths[:, 0]), lengths[:, 1]
    shuffled, by_length = fixed_plans(inputs, settings).values()
    grouping = groupings(inputs, settings)[comparison.recommended.name]
    planned = _decoding(make_plan(inputs, grouping, settings), outputs, settings)
    fixed = [
        _decoding(shuffled(), outputs[random_order(len(outputs), settings)], settings),
        _decoding(by_length(), outputs, settings),
    ]
    gains = [
        Gain(compute_bound=tokens / planned[0], launch_bound=num_steps / planned[1]) for tokens, num_steps, _ in fixed
    ]
    correlation = rank_correlation(lengths[:, 0], outputs)
    asked = fixed[0] if question.against == "shuffled" else fixed[1]
    return Outputs(correlation=correlation, cache_ratio=planned[2] / asked[2]), gains


def _decoding(plan: bw.Plan, outputs: IntArray, settings: Settings) -> tuple[int, int, int]:
    """Return the padded tokens in and out, the steps that decode, and the most tokens that one batch holds.

    Both sums count every rank like the slowest of its step.
    """
    longest = np.maximum.reduceat(outputs[plan.indices], plan.offsets[:-1]).astype(np.int64)
    tokens = plan.shapes[:, 0].astype(np.int64) * (plan.shapes[:, 1] + longest)
    return int(slowest(tokens, settings).sum()), int(slowest(longest, settings).sum()), int(tokens.max())


def packs_better(comparison: Comparison, question: Question) -> bool:
    """Say whether a decoder-only model should be trained on packed rows.

    They must save tokens, cost hardly more steps than planned batches, and be worth a change from the fixed size.

    Args:
        comparison: the plans.
        question: what the batches are for.
    """
    packed = comparison.packed
    if packed is None or question.model_kind != "decoder" or question.task == "generate":
        return False
    over_planned = gain_of(comparison.recommended, packed)
    if over_planned.compute_bound < 1 + _PACK_SAVING or over_planned.launch_bound <= 1 - _PACK_SAVING:
        return False
    fixed = comparison.shuffled if question.against == "shuffled" else comparison.sorted
    return gain_of(fixed, packed).high >= WORTH


def _rounded(lengths: IntArray, planned: Entry, settings: Settings, max_tokens: int | None) -> Entry | None:
    """Return the plan padded to multiples of 8, if the user chose no multiple and it costs little."""
    if settings.pad_multiple_of > 1:
        return None
    rounded = replace(settings, pad_multiple_of=8, max_tokens=max_tokens or settings.max_tokens)
    try:
        plan = make_plan(lengths, groupings(lengths, rounded)[planned.name], rounded)
    except BatchwrightError:  # rounded up, the longest example no longer fits the budget
        return None
    other = entry_of(planned.name, plan, rounded)
    return other if other.padding <= planned.padding + _PAD_ALLOWANCE else None
