"""One data set under several groupings, and the one to use."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

import batchwright as bw

from .._lengths import as_lengths, pad_up
from .._types import IntArray
from ..errors import ArgumentError
from ..plan.budget import Budget
from ..plan.grouping.base import Grouping
from .histogram import percentile

# With fewer batches an epoch, the last, partly filled ones would blur every figure.
_MIN_BATCHES = 50


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every grouping is planned with.

    Args:
        max_tokens: padded tokens a batch may hold.
        max_items: examples a batch may hold; None for no limit.
        pad_multiple_of: padded lengths are multiples of this.
        seed: of every shuffle.
        world_size: ranks that share the batches.
    """

    max_tokens: int
    max_items: int | None = None
    pad_multiple_of: int = 1
    seed: int = 0
    world_size: int = 1

    @property
    def budget(self) -> Budget:
        """The budget as batchwright takes it."""
        tokens = bw.MaxTokens(self.max_tokens)
        return tokens if self.max_items is None else tokens & bw.MaxItems(self.max_items)


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the plan of one grouping costs.

    Args:
        name: the expression that makes the grouping, or the fixed size in words.
        padding: share of the padded tokens that are padding.
        padded_tokens: real tokens and padding of an epoch together.
        num_batches: batches an epoch, over all ranks.
        num_shapes: different (items, padded lengths).
        budget_used: mean share of the budget that a batch uses.
        recurrence: chance that two examples of one batch share one again in the next epoch.
        straggler_waste: share of time that ranks wait for the one with the most tokens.
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
    """The groupings side by side."""

    settings: Settings
    fixed_size: int
    entries: tuple[Entry, ...]

    def __getitem__(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def shuffled(self) -> Entry:
        """The fixed size in random order: what a plain ``DataLoader`` does."""
        return self.entries[0]

    @property
    def sorted(self) -> Entry:
        """The fixed size, sorted by length."""
        return self.entries[1]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def default_max_tokens(lengths: IntArray, *, pad_multiple_of: int = 1) -> tuple[int, str]:
    """Choose a budget where the user named none.

    Room for 64 long examples, ``64 × p99``; less where an epoch would have fewer than 50 batches, but no less
    than four of the longest. Rounded up to a multiple of 64, or of 1,024 above 4,096.

    Args:
        lengths: shape ``(N,)`` or ``(N, axes)``.
        pad_multiple_of: lengths count as padded to this.

    Returns:
        The padded tokens of a batch, and where the number comes from.

    >>> default_max_tokens(np.array([100] * 9_990 + [900] * 10))
    (7168, '64 times the p99 length')
    >>> default_max_tokens(np.array([10] * 999 + [100]))
    (448, '4 times the longest')
    """
    totals = pad_up(as_lengths(lengths), pad_multiple_of).sum(axis=1, dtype=np.int64)
    wanted = (64 * percentile(totals, 99), "64 times the p99 length")
    wanted = min(wanted, (-(-int(totals.sum()) // _MIN_BATCHES), f"1/{_MIN_BATCHES} of all tokens"))
    value, reason = max(wanted, (4 * int(totals.max()), "4 times the longest"))
    return int(pad_up(np.array(value), 64 if value <= 4096 else 1024)), reason


def compare(lengths: IntArray, settings: Settings) -> Comparison:
    """Plan the data under each grouping.

    Args:
        lengths: shape ``(N,)`` or ``(N, axes)``.
        settings: the budget and the other options, equal for all.

    Returns:
        The plans' figures, fixed sizes first.
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
    """Refuse a budget that one example alone exceeds."""
    longest = int(pad_up(lengths, settings.pad_multiple_of).sum(axis=1, dtype=np.int64).max())
    if longest > settings.max_tokens:
        each = settings.max_tokens // lengths.shape[1] // settings.pad_multiple_of * settings.pad_multiple_of
        cut = f", or cut texts with --max-length {each}" if each else ""
        raise ArgumentError(
            f"the longest example needs {longest} padded tokens, over --max-tokens {settings.max_tokens}; raise it{cut}"
        )


def fixed_size(lengths: IntArray, settings: Settings) -> int:
    """Return the largest fixed batch size that no batch can exceed the budget with: what fits at the longest.

    >>> fixed_size(np.array([[10], [100]]), Settings(max_tokens=1000))
    10
    """
    longest = pad_up(lengths.max(axis=0, keepdims=True), settings.pad_multiple_of)
    # A pair may fit although the longest source beside the longest target would not.
    return max(1, int(settings.budget.max_items(longest)[0]))


def groupings(lengths: IntArray, settings: Settings) -> dict[str, Grouping]:
    """Return the groupings to compare, by the expression that makes them."""
    found: dict[str, Grouping] = {
        "InOrder()": bw.InOrder(),
        "Sorted()": bw.Sorted(),
        "WindowSort()": bw.WindowSort(),
        "Buckets(count=16)": bw.Buckets(count=16),
        "Buckets(count=64)": bw.Buckets(count=64),
    }
    if lengths.shape[1] == 1:  # a row of packed pairs would need two capacities
        capacity = int(pad_up(lengths, settings.pad_multiple_of).max())
        found[f"Packed(capacity={capacity})"] = bw.Packed(capacity=capacity)
    return found


def plan_entry(lengths: IntArray, name: str, grouping: Grouping, settings: Settings) -> Entry:
    """Plan with one grouping and take the figures of its report."""
    plan = _plan(lengths, settings.budget, grouping, settings)
    return _entry(name, plan, settings, plan.report().recurrence)


def _fixed_shuffled(lengths: IntArray, size: int, settings: Settings) -> Entry:
    order = np.random.default_rng(settings.seed).permutation(len(lengths))
    plan = _plan(lengths[order], bw.MaxItems(size), bw.InOrder(), settings)
    # Of the others, size - 1 share the batch of an example, each as likely as any.
    recurrence = (size - 1) / (len(lengths) - 1) if len(lengths) > size else 1.0
    return _entry(f"fixed {size:,}, shuffled", plan, settings, recurrence)


def _fixed_sorted(lengths: IntArray, size: int, settings: Settings) -> Entry:
    plan = _plan(lengths, bw.MaxItems(size), bw.Sorted(), settings)
    return _entry(f"fixed {size:,}, sorted", plan, settings, plan.report().recurrence)


def _plan(lengths: IntArray, budget: Budget, grouping: Grouping, settings: Settings) -> bw.Plan:
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
