"""One data set batched by several groupings under the same budget, side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

import batchwright as bw

from .._lengths import as_lengths, pad_up
from .._types import IntArray
from ..errors import ArgumentError
from .histogram import percentile

# With fewer batches per epoch, the last ones, only partly filled, would distort every figure.
_MIN_BATCHES = 50


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

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


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
    return Comparison(
        settings=settings,
        fixed_size=size,
        entries=(
            _fixed_shuffled(lengths, size, settings),
            _fixed_sorted(lengths, size, settings),
            *(plan_entry(lengths, name, how, settings) for name, how in groupings(lengths, settings).items()),
        ),
    )


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


def plan_entry(lengths: IntArray, name: str, grouping: bw.Grouping, settings: Settings) -> Entry:
    """Plan with one grouping and return the figures of its report."""
    plan = _plan(lengths, settings.budget, grouping, settings)
    return _entry(name, plan, settings, plan.report().recurrence)


def _fixed_shuffled(lengths: IntArray, size: int, settings: Settings) -> Entry:
    order = np.random.default_rng(settings.seed).permutation(len(lengths))
    plan = _plan(lengths[order], bw.MaxItems(size), bw.InOrder(), settings)
    # size - 1 of the other examples share the batch of an example, each equally likely.
    recurrence = (size - 1) / (len(lengths) - 1) if len(lengths) > size else 1.0
    return _entry(f"fixed {size:,}, shuffled", plan, settings, recurrence)


def _fixed_sorted(lengths: IntArray, size: int, settings: Settings) -> Entry:
    plan = _plan(lengths, bw.MaxItems(size), bw.Sorted(), settings)
    return _entry(f"fixed {size:,}, sorted", plan, settings, plan.report().recurrence)


def _plan(lengths: IntArray, budget: bw.Budget, grouping: bw.Grouping, settings: Settings) -> bw.Plan:
    return bw.plan_batches(
        lengths,
        budget,
        grouping=grouping,
        seed=settings.seed,
        world_size=settings.world_size,
        pad_multiple_of=settings.pad_multiple_of,
    )


def _entry(name: str, plan: bw.Plan, settings: Settings, recurrence: float) -> Entry:
    report = plan.report()
    shapes = plan.shapes.astype(np.int64)
    return Entry(
        name=name,
        padding=report.padding,
        padded_tokens=int((shapes[:, 0] * shapes[:, 1:].sum(axis=1)).sum()),
        num_batches=report.num_batches,
        num_shapes=report.num_shapes,
        budget_used=float(settings.budget.fraction(shapes[:, 0], shapes[:, 1:]).mean()),
        recurrence=recurrence,
        straggler_waste=report.straggler_waste,
    )
