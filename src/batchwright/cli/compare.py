"""One data set batched by several groupings under the same budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import numpy as np

import batchwright as bw

from .._lengths import as_lengths, pad_up
from .._progress import ProgressBar
from .._types import IntArray
from ..errors import ArgumentError, BudgetError
from .lengths import percentile

# With fewer batches per epoch, the last ones, only partly filled, would distort every figure.
_MIN_BATCHES = 50


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every grouping is planned with.

    Args:
        max_tokens: the most padded tokens per batch.
        max_items: the most examples per batch, or rows where they are packed; None for no limit.
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

    def code(self, grouping: str, *, fixed_size: int | None = None) -> str:
        """Write the arguments that follow the lengths: the budget, or a fixed size, and what is not the default.

        >>> Settings(max_tokens=64, max_items=8, seed=3).code("Sorted()")
        'bw.MaxTokens(64) & bw.MaxItems(8), grouping=bw.Sorted(), seed=3'
        """
        budget = f"bw.MaxTokens({self.max_tokens})"
        if self.max_items is not None:
            budget += f" & bw.MaxItems({self.max_items})"
        options = [
            budget if fixed_size is None else f"bw.MaxItems({fixed_size})",
            "" if grouping == "WindowSort()" else f"grouping=bw.{grouping}",
            f"pad_multiple_of={self.pad_multiple_of}" if self.pad_multiple_of > 1 else "",
            f"seed={self.seed}" if self.seed else "",
            f"rank=rank, world_size={self.world_size}" if self.world_size > 1 else "",
        ]
        return ", ".join(filter(None, options))


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the plan of one grouping costs.

    Args:
        name: the expression that makes the grouping, or the fixed size in words.
        padding: the share of the padded tokens that is padding.
        padded_tokens: real tokens and padding of one epoch together.
        waited_tokens: the same, with every rank of a step counted like the one with the most: they wait for it.
        num_batches: the batches per epoch, over all ranks.
        num_shapes: the number of different (items, padded lengths).
        budget_used: the mean share of the budget that a batch uses.
        recurrence: the chance that two examples of one batch share a batch again in the next epoch.
        straggler_waste: the share of time that ranks wait for the rank with the most tokens.
    """

    name: str
    padding: float
    padded_tokens: int
    waited_tokens: int
    num_batches: int
    num_shapes: int
    budget_used: float
    recurrence: float
    straggler_waste: float

    @property
    def capacity(self) -> int:
        """Return the capacity that the name of a packed plan tells."""
        return int(self.name.partition("=")[2].removesuffix(")"))


@final
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The groupings side by side, the two fixed sizes first."""

    settings: Settings
    fixed_size: int
    entries: tuple[Entry, ...]

    def __getitem__(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)

    def get(self, name: str) -> Entry | None:
        """Return an entry, None for a grouping that these lengths and this budget do not allow."""
        return next((entry for entry in self.entries if entry.name == name), None)

    @property
    def shuffled(self) -> Entry:
        """Return the fixed size in random order: what a plain ``DataLoader`` does."""
        return self.entries[0]

    @property
    def sorted(self) -> Entry:
        """Return the fixed size, sorted by length."""
        return self.entries[1]

    @property
    def packed(self) -> Entry | None:
        """Return the packed rows; None for pairs, which are not packed."""
        return next((entry for entry in self.entries if entry.name.startswith("Packed")), None)

    @property
    def recommended(self) -> Entry:
        """Return the entry to use: the window sort, unless buckets pad clearly less.

        A global sort never pads more than the window sort, but the same examples share a batch in every epoch.
        """
        window, buckets = self["WindowSort()"], self.get("Buckets(count=64)")
        return buckets if buckets is not None and buckets.padding < window.padding - 0.05 else window


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


def compare(lengths: IntArray, settings: Settings, *, progress: bool = False) -> Comparison:
    """Plan the data with each grouping.

    Args:
        lengths: shape ``(N,)`` or ``(N, axes)``.
        settings: the budget and the other options, the same for all.
        progress: whether to show progress on a terminal.

    Returns:
        The figures of the plans, the fixed sizes first.
    """
    lengths = as_lengths(lengths)
    check_fits(lengths, settings)
    size = fixed_size(lengths, settings)
    plans = fixed_plans(lengths, settings) | {
        name: (lambda grouping=grouping: make_plan(lengths, grouping, settings))
        for name, grouping in groupings(lengths, settings).items()
    }
    entries = []
    with ProgressBar(label="planning", total=len(plans), enabled=progress) as bar:
        for name, plan in plans.items():
            bar.doing(name)
            try:
                entries.append(entry_of(name, plan(), settings))
            except BudgetError:
                # A tight budget may need more shapes than so many; all that no budget allows was refused before.
                if not name.startswith("Buckets"):
                    raise
            bar.update()
    # Shuffled, size - 1 of the other examples share the batch of an example, each equally likely.
    chance = (size - 1) / (len(lengths) - 1) if len(lengths) > size else 1.0
    entries[0] = replace(entries[0], recurrence=chance)
    return Comparison(settings=settings, fixed_size=size, entries=tuple(entries))


def fixed_plans(lengths: IntArray, settings: Settings) -> dict[str, Callable[[], bw.Plan]]:
    """Return what makes the plans of the largest safe fixed size: in random order, and sorted by length.

    The first plan is of the examples in ``random_order``.
    """
    size = fixed_size(lengths, settings)
    budget = bw.MaxItems(size)
    shuffled = lengths[random_order(len(lengths), settings)]
    return {
        f"fixed {size:,}, shuffled": lambda: make_plan(shuffled, bw.InOrder(), settings, budget),
        f"fixed {size:,}, sorted": lambda: make_plan(lengths, bw.Sorted(), settings, budget),
    }


def random_order(num_examples: int, settings: Settings) -> IntArray:
    """Return the order in which a plain ``DataLoader`` would take the examples."""
    return np.random.default_rng(settings.seed).permutation(num_examples)


def check_fits(lengths: IntArray, settings: Settings, *, num_texts: int | None = None) -> None:
    """Refuse a budget that a single example exceeds, and ranks that would have no example of their own.

    Args:
        lengths: shape ``(N, axes)``.
        settings: the budget and the other options.
        num_texts: the texts whose lengths an example adds up, each of which can be cut; None for one per axis.
    """
    if settings.world_size > len(lengths):
        raise ArgumentError(
            f"--world-size {settings.world_size} is more than the examples, {len(lengths)}; lower it, or give more data"
        )
    longest = int(pad_up(lengths, settings.pad_multiple_of).sum(axis=1, dtype=np.int64).max())
    if longest > settings.max_tokens:
        share = settings.max_tokens // (num_texts or lengths.shape[1])
        each = share // settings.pad_multiple_of * settings.pad_multiple_of
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


def make_plan(lengths: IntArray, grouping: bw.Grouping, settings: Settings, budget: bw.Budget | None = None) -> bw.Plan:
    """Plan with one grouping, under the budget of the settings or another."""
    return bw.plan_batches(
        lengths,
        settings.budget if budget is None else budget,
        grouping=grouping,
        seed=settings.seed,
        world_size=settings.world_size,
        pad_multiple_of=settings.pad_multiple_of,
    )


def entry_of(name: str, plan: bw.Plan, settings: Settings) -> Entry:
    """Return what a plan costs."""
    report = plan.report()
    num_items, padded = plan.shapes[:, 0].astype(np.int64), plan.shapes[:, 1:].astype(np.int64)
    tokens = num_items * padded.sum(axis=1)
    return Entry(
        name=name,
        padding=report.padding,
        padded_tokens=int(tokens.sum()),
        waited_tokens=settings.world_size * int(slowest(tokens, settings).sum()),
        num_batches=report.num_batches,
        num_shapes=report.num_shapes,
        budget_used=float(settings.budget.fraction(num_items, padded).mean()),
        recurrence=report.recurrence,
        straggler_waste=report.straggler_waste,
    )


def slowest(costs: IntArray, settings: Settings) -> IntArray:
    """Return the largest cost of each step, from the cost of each batch: ranks wait for each other.

    >>> slowest(np.array([3, 5, 4, 4]), Settings(max_tokens=8, world_size=2)).tolist()
    [5, 4]
    """
    largest: IntArray = costs.reshape(-1, settings.world_size).max(axis=1)
    return largest
