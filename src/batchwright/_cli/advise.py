"""Whether planned batches pay for this data, as a range with the assumption behind each end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, final

from .._lengths import as_lengths
from .._types import IntArray
from ..errors import BatchwrightError
from .compare import Comparison, Entry, Settings, compare, groupings, plan_entry
from .table import percent

Verdict: TypeAlias = Literal["yes", "fewer steps only", "no"]

# Below this a gain is lost in the noise of a training run and not worth a change.
WORTH = 1.10
# The extra padding that multiples of 8, which matrix units of GPUs like, may cost.
_PAD_ALLOWANCE = 0.02
# With fewer batches the last, partly filled ones weigh on every figure.
FEW_BATCHES = 20


@final
@dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times as fast an epoch becomes.

    Args:
        compute_bound: if time grows with padded tokens: the ratio of padded tokens.
        launch_bound: if every step takes the same time: the ratio of the numbers of steps.
    """

    compute_bound: float
    launch_bound: float

    @property
    def low(self) -> float:
        """The lower end of the range."""
        return min(self.compute_bound, self.launch_bound)

    @property
    def high(self) -> float:
        """The upper end of the range."""
        return max(self.compute_bound, self.launch_bound)


@final
@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer for one data set.

    Args:
        verdict: ``yes``; ``fewer steps only`` where the padding is low already; ``no``.
        fixed_size: the largest fixed size that cannot exceed the budget.
        planned: the plan that is advised.
        settings: the settings it was made with.
        shuffled, sorted: the fixed-size baselines.
        against_shuffled, against_sorted: the gain over each.
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

    The window sort gives new neighbours every epoch; the global sort, which never pads more, does not.
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
        options.append("balance_over=1")  # nobody waits on one device, so the order may be wholly random
    return (
        "import batchwright as bw\n"
        "from torch.utils.data import DataLoader\n"
        "\n"
        "lengths = bw.measure_lengths(texts, tokenizer)\n"
        f"sampler = bw.BatchSampler({', '.join(['lengths', budget, *options])})\n"
        "loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)"
    )


def caveats(advice: Advice) -> list[str]:
    """Return what the figures leave out, as sentences."""
    notes = []
    planned, fixed = advice.planned.num_batches, advice.shuffled.num_batches
    if planned < FEW_BATCHES:
        notes.append(
            f"Only {planned} batches an epoch: the figures are rough, and so few updates train poorly. "
            "Lower --max-tokens."
        )
    if advice.verdict == "no":
        return notes
    if fixed > WORTH * planned:
        notes.append(
            f"An epoch becomes {planned:,} larger updates in place of {fixed:,}: tune the learning rate "
            "again, or lower MaxTokens until the number of updates suits you."
        )
    if advice.against_sorted.compute_bound < WORTH:
        notes.append(
            f"Sorting at a fixed size already brings padding to {percent(advice.sorted.padding)}; "
            "against that, only the fewer steps are a gain."
        )
    if advice.settings.pad_multiple_of > 1:
        notes.append(f"Let collate pad to a multiple of {advice.settings.pad_multiple_of}, as planned.")
    return notes


def verdict_of(fixed: Entry, planned: Entry) -> Verdict:
    """Say whether a plan is worth having in place of a fixed size."""
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
    """Return the plan padded to multiples of 8 where the user left that open and it costs little."""
    if settings.pad_multiple_of > 1:
        return entry, settings
    rounded = replace(settings, pad_multiple_of=8)
    try:
        other = plan_entry(lengths, entry.name, groupings(lengths, rounded)[entry.name], rounded)
    except BatchwrightError:  # the longest example fits the budget only as it is
        return entry, settings
    return (other, rounded) if other.padding <= entry.padding + _PAD_ALLOWANCE else (entry, settings)
