"""Whether planned batches pay off for a data set: a range of gains, with the assumption behind each end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, final

from .._lengths import as_lengths
from .._types import IntArray
from ..errors import BatchwrightError
from .compare import Comparison, Entry, Settings, compare, groupings, plan_entry
from .screen import percent

Verdict: TypeAlias = Literal["yes", "fewer steps only", "no"]

# A smaller gain drowns in the noise of a training run and is not worth a change.
WORTH = 1.10
# How much extra padding multiples of 8 may cost; the matrix units of GPUs prefer them.
_PAD_ALLOWANCE = 0.02
# With fewer batches, the last ones, only partly filled, distort every figure.
FEW_BATCHES = 20


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

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**asdict(self), "snippet": snippet(self), "caveats": caveats(self)}


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
    against_shuffled = _gain(comparison.shuffled, planned)
    return Advice(
        verdict=verdict_of(comparison.shuffled, planned),
        fixed_size=comparison.fixed_size,
        planned=planned,
        settings=settings,
        shuffled=comparison.shuffled,
        sorted=comparison.sorted,
        against_shuffled=against_shuffled,
        against_sorted=_gain(comparison.sorted, planned),
    )


def snippet(advice: Advice) -> str:
    """Return the lines to copy into a training script."""
    if advice.verdict == "no":
        return f"loader = DataLoader(dataset, batch_size={advice.fixed_size}, shuffle=True)"
    settings = advice.settings
    budget = f"bw.MaxTokens({settings.max_tokens})"
    if settings.max_items is not None:
        budget += f" & bw.MaxItems({settings.max_items})"
    options = [] if advice.planned.name == "WindowSort()" else [f"grouping=bw.{advice.planned.name}"]
    if settings.pad_multiple_of > 1:
        options.append(f"pad_multiple_of={settings.pad_multiple_of}")
    if settings.world_size > 1:
        options.append(f"rank=rank, world_size={settings.world_size}")
    else:
        options.append("balance_over=1")  # one device waits for nobody, so the order may be entirely random
    return (
        "import batchwright as bw\n"
        "from torch.utils.data import DataLoader\n"
        "\n"
        "lengths = bw.measure_lengths(texts, tokenizer)\n"
        f"sampler = bw.BatchSampler({', '.join(['lengths', budget, *options])})\n"
        "loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)"
    )


def caveats(advice: Advice) -> list[str]:
    """Return what the figures do not say, as sentences."""
    notes = []
    planned, fixed = advice.planned.num_batches, advice.shuffled.num_batches
    if planned < FEW_BATCHES:
        notes.append(
            f"Only {planned} batches per epoch: the figures are rough, and this few updates train poorly. "
            "Lower --max-tokens."
        )
    if advice.verdict == "no":
        return notes
    if fixed > WORTH * planned:
        notes.append(
            f"An epoch becomes {planned:,} larger updates instead of {fixed:,}: tune the learning rate "
            "again, or lower MaxTokens until the number of updates suits you."
        )
    if advice.against_sorted.compute_bound < WORTH:
        notes.append(
            f"Sorting by length at the fixed size already reduces padding to {percent(advice.sorted.padding)}; "
            "compared with that, only the smaller number of steps is a gain."
        )
    if advice.settings.pad_multiple_of > 1:
        notes.append(
            f"Your collate function must pad to a multiple of {advice.settings.pad_multiple_of}, as the plan does."
        )
    return notes


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
        other = plan_entry(lengths, entry.name, groupings(lengths, rounded)[entry.name], rounded)
    except BatchwrightError:  # rounded up, the longest example no longer fits the budget
        return entry, settings
    return (other, rounded) if other.padding <= entry.padding + _PAD_ALLOWANCE else (entry, settings)
