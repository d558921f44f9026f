"""One data set batched by several groupings under the same budget, and whether the best of them pays off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

import numpy as np

import batchwright as bw

from .._lengths import as_lengths, pad_up
from .._types import IntArray
from ..errors import ArgumentError, BatchwrightError
from .lengths import percentile

# With fewer batches per epoch, the last ones, only partly filled, would distort every figure.
_MIN_BATCHES = 50
# A smaller gain drowns in the noise of a training run and is not worth a change.
WORTH = 1.10
# How much extra padding multiples of 8 may cost; the matrix units of GPUs prefer them.
_PAD_ALLOWANCE = 0.02

Verdict: TypeAlias = Literal["yes", "fewer steps only", "no"]


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every grouping is planned with.

    Args:
        max_tokens: the most padded tokens per batch.
        max_items: the most examples per batch; None for no limit.
        pad_multiple_of: lengths are padded to a multiple of this.
        seed: the seed of every shuffle.
        world_size: the number of ranks that share the batches.
    """

    max_tokens: int
    max_items: int | None = None
    pad_multiple_of: int = 1
    seed: int = 0
    world_size: int = 1

    @property
    def budget(self) -> bw.Budget:
        """Return the budget as batchwright takes it."""
        tokens = bw.MaxTokens(self.max_tokens)
        return tokens if self.max_items is None else tokens & bw.MaxItems(self.max_items)


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the plan of one grouping costs.

    Args:
        name: the expression that makes the grouping, or the fixed size in words.
        padding: the share of the padded tokens that is padding.
        padded_tokens: real tokens and padding of one epoch together.
        num_batches: the batches per epoch, over all ranks.
        num_shapes: the number of different (items, padded lengths).
        budget_used: the mean share of the budget that a batch uses.
        recurrence: the chance that two examples of one batch share a batch again in the next epoch.
        straggler_waste: the share of time that ranks wait for the rank with the most tokens.
    """

    name: str
    padding: float
    padded_tokens: int
    num_batches: int
    num_shapes: int
    budget_used: float
    recurrence: float
    straggler_waste: float


@final
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The groupings side by side, the two fixed sizes first."""

    settings: Settings
    fixed_size: int
    entries: tuple[Entry, ...]

    def __getitem__(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def shuffled(self) -> Entry:
        """Return the fixed size in random order: what a plain ``DataLoader`` does."""
        return self.entries[0]

    @property
    def sorted(self) -> Entry:
        """Return the fixed size, sorted by length."""
        return self.entries[1]


def default_max_tokens(lengths: IntArray, *, pad_multiple_of: int = 1) -> tuple[int, str]:
    """Choose a budget for a user who named none.

    It holds 64 long examples, ``64 × p99``; fewer if an epoch would have fewer than 50 batches, but at least four of
    the longest. It is rounded up to a multiple of 64, or of 1,024 above 4,096.

    Args:
        lengths: shape ``(N,)`` or ``(N, axes)``.
        pad_multiple_of: lengths count as padded to a multiple of this.

    Returns:
        The padded tokens per batch, and where the number comes from.

    >>> default_max_tokens(np.array([100] * 9_990 + [900] * 10))
    (7168, '64 times the p99 length')
    >>> default_max_tokens(np.array([10] * 999 + [100]))
    (448, '4 times the longest example')
    """
    totals = pad_up(as_lengths(lengths), pad_multiple_of).sum(axis=1, dtype=np.int64)
    wanted = (64 * percentile(totals, 99), "64 times the p99 length")
    wanted = min(wanted, (-(-int(totals.sum()) // _MIN_BATCHES), f"1/{_MIN_BATCHES} of all tokens"))
    value, reason = max(wanted, (4 * int(totals.max()), "4 times the longest example"))
    return int(pad_up(np.array(value), 64 if value <= 4096 else 1024)), reason


def compare(lengths: IntArray, settings: Settings) -> Comparison:
    """Plan the data with each grouping.

    Args:
        lengths: shape ``(N,)`` or ``(N, axes)``.
        settings: the budget and the other options, the same for all.

    Returns:
        The figures of the plans, the fixed sizes first.
    """
    lengths = as_lengths(lengths)
    check_fits(lengths, settings)
    size = fixed_size(lengths, settings)
    order = np.random.default_rng(settings.seed).permutation(len(lengths))
    # Shuffled, size - 1 of the other examples share the batch of an example, each equally likely.
    chance = (size - 1) / (len(lengths) - 1) if len(lengths) > size else 1.0
    shuffled = _plan(lengths[order], f"fixed {size:,}, shuffled", bw.InOrder(), settings, bw.MaxItems(size))
    entries = (
        replace(shuffled, recurrence=chance),
        _plan(lengths, f"fixed {size:,}, sorted", bw.Sorted(), settings, bw.MaxItems(size)),
        *(_plan(lengths, name, how, settings) for name, how in groupings(lengths, settings).items()),
    )
    return Comparison(settings=settings, fixed_size=size, entries=entries)


def check_fits(lengths: IntArray, settings: Settings) -> None:
    """Refuse a budget that a single example exceeds."""
    longest = int(pad_up(lengths, settings.pad_multiple_of).sum(axis=1, dtype=np.int64).max())
    if longest > settings.max_tokens:
        each = settings.max_tokens // lengths.shape[1] // settings.pad_multiple_of * settings.pad_multiple_of
        cut = f", or cut texts with --max-length {each}" if each else ""
        raise ArgumentError(
            f"the longest example needs {longest} padded tokens, over --max-tokens {settings.max_tokens}; "
            f"raise --max-tokens{cut}"
        )


def fixed_size(lengths: IntArray, settings: Settings) -> int:
    """Return the largest fixed batch size that can never exceed the budget: what fits at the longest example.

    >>> fixed_size(np.array([[10], [100]]), Settings(max_tokens=1000))
    10
    """
    longest = pad_up(lengths.max(axis=0, keepdims=True), settings.pad_multiple_of)
    # Every pair may fit although the longest source and the longest target together do not.
    return max(1, int(settings.budget.max_items(longest)[0]))


def groupings(lengths: IntArray, settings: Settings) -> dict[str, bw.Grouping]:
    """Return the groupings to compare, by the expression that makes them."""
    found: dict[str, bw.Grouping] = {
        "InOrder()": bw.InOrder(),
        "Sorted()": bw.Sorted(),
        "WindowSort()": bw.WindowSort(),
        "Buckets(count=16)": bw.Buckets(count=16),
        "Buckets(count=64)": bw.Buckets(count=64),
    }
    if lengths.shape[1] == 1:  # packed pairs would need two capacities per row
        capacity = int(pad_up(lengths, settings.pad_multiple_of).max())
        found[f"Packed(capacity={capacity})"] = bw.Packed(capacity=capacity)
    return found


def _plan(
    lengths: IntArray, name: str, grouping: bw.Grouping, settings: Settings, budget: bw.Budget | None = None
) -> Entry:
    """Plan with one grouping, under the budget of the settings or another, and return the figures."""
    plan = bw.plan_batches(
        lengths,
        settings.budget if budget is None else budget,
        grouping=grouping,
        seed=settings.seed,
        world_size=settings.world_size,
        pad_multiple_of=settings.pad_multiple_of,
    )
    report = plan.report()
    num_items, padded = plan.shapes[:, 0].astype(np.int64), plan.shapes[:, 1:].astype(np.int64)
    return Entry(
        name=name,
        padding=report.padding,
        padded_tokens=int((num_items * padded.sum(axis=1)).sum()),
        num_batches=report.num_batches,
        num_shapes=report.num_shapes,
        budget_used=float(settings.budget.fraction(num_items, padded).mean()),
        recurrence=report.recurrence,
        straggler_waste=report.straggler_waste,
    )


@final
@dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times as fast an epoch becomes.

    Args:
        compute_bound: the ratio of padded tokens, for steps whose time grows with them.
        launch_bound: the ratio of the numbers of steps, for steps that all take the same time.
    """

    compute_bound: float
    launch_bound: float


@final
@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer for one data set.

    Args:
        verdict: ``yes``; ``fewer steps only`` if the padding is already low; ``no``.
        fixed_size: the largest fixed size that can never exceed the budget.
        planned: the recommended plan.
        settings: the settings of that plan.
        shuffled: the fixed size in random order.
        sorted: the fixed size, sorted by length.
        against_shuffled: the gain over the shuffled fixed size.
        against_sorted: the gain over the sorted fixed size.
    """

    verdict: Verdict
    fixed_size: int
    planned: Entry
    settings: Settings
    shuffled: Entry
    sorted: Entry
    against_shuffled: Gain
    against_sorted: Gain


def recommend(comparison: Comparison) -> Entry:
    """Return the entry to use: the window sort, unless buckets pad clearly less.

    A global sort never pads more than the window sort, but the same examples share a batch in every epoch.
    """
    window, buckets = comparison["WindowSort()"], comparison["Buckets(count=64)"]
    return buckets if buckets.padding < window.padding - 0.05 else window


def advise(lengths: IntArray, settings: Settings) -> Advice:
    """Compare the recommended plan with a fixed size, shuffled and sorted.

    Args:
        lengths: shape ``(N,)`` or ``(N, axes)``.
        settings: the budget and the other options.
    """
    comparison = compare(lengths, settings)
    planned, settings = _with_multiple_of_8(as_lengths(lengths), recommend(comparison), settings)
    return Advice(
        verdict=verdict_of(comparison.shuffled, planned),
        fixed_size=comparison.fixed_size,
        planned=planned,
        settings=settings,
        shuffled=comparison.shuffled,
        sorted=comparison.sorted,
        against_shuffled=_gain(comparison.shuffled, planned),
        against_sorted=_gain(comparison.sorted, planned),
    )


def verdict_of(fixed: Entry, planned: Entry) -> Verdict:
    """Say whether a plan is worth using instead of a fixed size."""
    gain = _gain(fixed, planned)
    if gain.compute_bound >= WORTH:
        return "yes"
    return "fewer steps only" if gain.launch_bound >= WORTH else "no"


def _gain(fixed: Entry, planned: Entry) -> Gain:
    return Gain(
        compute_bound=fixed.padded_tokens / planned.padded_tokens,
        launch_bound=fixed.num_batches / planned.num_batches,
    )


def _with_multiple_of_8(lengths: IntArray, entry: Entry, settings: Settings) -> tuple[Entry, Settings]:
    """Return the plan padded to multiples of 8, if the user chose no multiple and it costs little."""
    if settings.pad_multiple_of > 1:
        return entry, settings
    rounded = replace(settings, pad_multiple_of=8)
    try:
        other = _plan(lengths, entry.name, groupings(lengths, rounded)[entry.name], rounded)
    except BatchwrightError:  # rounded up, the longest example no longer fits the budget
        return entry, settings
    return (other, rounded) if other.padding <= entry.padding + _PAD_ALLOWANCE else (entry, settings)
