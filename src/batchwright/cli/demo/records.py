"""The settings of the demo, what each of its arms did, as plain numbers, and the verdict that follows from them."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from ..._charts import page
from ..._charts.page import read_asset
from ..screen import percent, times


@final
@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The settings of a run; the defaults are those of the full demo.

    Args:
        num_train: the functions to train on; in the first comparison every arm sees each of them once.
        num_valid: the functions to validate on, from other files.
        max_length: longer functions are cut.
        max_tokens: the most padded tokens per batch, for every arm.
        num_checks: the validations per arm, spread evenly over its updates.
        vocabulary_size: how many of the most common tokens are kept; the rest become one.
        width: the width of the model.
        num_layers: the layers of the model.
        num_heads: the heads of each attention.
        base_rate: the learning rate of an update with 1,000 real tokens; close to the best one for shuffled batches.
        seed: the seed of the data order and the initial weights.
    """

    num_train: int = 440
    num_valid: int = 80
    max_length: int = 512
    max_tokens: int = 4096
    num_checks: int = 4
    vocabulary_size: int = 2000
    width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    base_rate: float = 2.5e-3
    seed: int = 0


# What the README, the Makefile and the command say, with the install: on two quiet cores.
MINUTES = 2

FULL = DemoSettings()
QUICK = DemoSettings(
    num_train=96,
    num_valid=16,
    max_length=256,
    max_tokens=2048,
    num_checks=3,
    vocabulary_size=500,
    width=32,
    num_layers=1,
)


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """A validation: the examples and processor seconds of training so far, and the loss per token."""

    num_examples: int
    seconds: float
    loss: float


@final
@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What one arm did.

    Args:
        name: the name of the arm.
        what: what it does, in a sentence.
        rate: the peak of the learning rate.
        seconds: the processor time of training, without validation.
        num_tokens: the real tokens trained on.
        checks: the validations, the last one after the last update.
        shapes: (examples, padded length) of every batch.
        num_updates: how many updates there were, None if every batch was one.
        reasons: why the size of batches changed, one line per change.
    """

    name: str
    what: str
    rate: float
    seconds: float
    num_tokens: int
    checks: tuple[Check, ...]
    shapes: tuple[tuple[int, int], ...]
    num_updates: int | None = None
    reasons: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Return the number of updates."""
        return len(self.shapes) if self.num_updates is None else self.num_updates

    @property
    def padded_tokens(self) -> int:
        """Return real tokens and padding together."""
        return sum(items * length for items, length in self.shapes)

    @property
    def padding(self) -> float:
        """Return the share of the padded tokens that is padding."""
        return 1 - self.num_tokens / self.padded_tokens

    @property
    def tokens_per_second(self) -> float:
        """Return the real tokens trained on per second."""
        return self.num_tokens / self.seconds

    @property
    def loss(self) -> float:
        """Return the validation loss at the end."""
        return self.checks[-1].loss

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        names = ("num_steps", "padding", "tokens_per_second", "loss")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


# Times within this of each other are called the same: seconds vary that much from run to run.
_ALIKE = 0.1


def verdict(results: Sequence[ArmResult], longer: Sequence[ArmResult]) -> list[str]:
    """Return the verdict in sentences, the most important first.

    Args:
        results: shuffled, by length, planned with the full and with the small budget; one epoch each.
        longer: by length and planned with the small budget, for the seconds of the shuffled arm.
    """
    shuffled, grouped, _, planned = results[:4]
    grouped_longer, planned_longer = longer
    in_short = _in_short(_ratio(shuffled, planned), _ratio(grouped, planned))
    return [
        f"Against shuffled batches of the same memory: {_faster(shuffled, planned)}. Against the same fixed size "
        f"grouped by length: {_faster(grouped, planned)}. {in_short}",
        f"At about equal updates ({planned.num_steps} planned, {shuffled.num_steps} of a fixed size, the same "
        f"examples): loss {_ranked(planned, grouped, shuffled)}.",
        f"At about equal seconds ({_seconds(planned_longer)} planned, {_seconds(grouped_longer)} by length, "
        f"{_seconds(shuffled)} shuffled): loss {_ranked(planned_longer, grouped_longer, shuffled)}.",
        "Lower is better, the lowest comes first. One seed each: small differences in loss mean nothing. All of this "
        "ran on your CPU, where time grows with padded tokens, however many steps they are in.",
    ]


def _in_short(to_shuffled: float, to_grouped: float) -> str:
    """Return the conclusion in a sentence, whoever is ahead."""
    if to_grouped < 1 - _ALIKE:
        return "So a fixed size grouped by length is the faster choice here."
    if to_grouped > 1 + _ALIKE:
        return "So planning is the faster choice here."
    if to_shuffled <= 1 + _ALIKE:
        return "So there is little to gain here."
    return (
        "So what saves time here is that examples of similar length share a batch; on a CPU a plan adds no more. "
        "On a GPU it does: planned shapes can be replayed as CUDA graphs (stored results, below)."
    )


def _ranked(planned: ArmResult, grouped: ArmResult, shuffled: ArmResult) -> str:
    """Name the losses of the three, the lowest first."""
    losses = sorted([(planned.loss, "planned"), (grouped.loss, "by length"), (shuffled.loss, "shuffled")])
    return ", ".join(f"{loss:.2f} {name}" for loss, name in losses)


def _ratio(slow: ArmResult, fast: ArmResult) -> float:
    return fast.tokens_per_second / slow.tokens_per_second


def _faster(slow: ArmResult, fast: ArmResult) -> str:
    """Say how many times as fast the second is, in real tokens per second."""
    ratio = _ratio(slow, fast)
    if abs(ratio - 1) <= _ALIKE:
        return f"about as fast ({times(ratio)})"
    return f"{times(ratio)} as fast" if ratio > 1 else f"slower ({times(ratio)})"


def _seconds(result: ArmResult) -> str:
    return f"{result.seconds:.0f} s"


def as_long_rows(results: Sequence[ArmResult], longer: Sequence[ArmResult]) -> list[list[str]]:
    """Return name, seconds, updates, examples and loss of the arms that trained equally long."""
    return [
        [arm.name, f"{arm.seconds:.1f}", f"{arm.num_steps:,}", f"{arm.checks[-1].num_examples:,}", f"{arm.loss:.3f}"]
        for arm in (results[0], *longer)
    ]


AS_LONG_HEADER = ("", "CPU seconds", "updates", "examples seen", "loss")


def stored_results() -> dict[str, Any]:
    """Return what was measured on a GPU when this version was made; ``tools/measured.py`` writes the file."""
    return dict(json.loads(read_asset(__package__, "gpu.json")))


GPU_HEADER = ("", "real tokens/s", "padding", "updates", "loss")


def gpu_rows(task: dict[str, Any]) -> list[list[str]]:
    """Return name, speed, padding, updates and loss of the arms of a stored task."""
    return [
        [
            row["name"],
            f"{row['tokens_per_second']:,}",
            percent(row["padding"]),
            f"{row['updates']:,}",
            f"{row['loss']:.2f}",
        ]
        for row in task["rows"]
    ]


def gpu_line(task: dict[str, Any]) -> str:
    """Return a stored task in a sentence."""
    losses = "; ".join(f"{row['loss']:.2f} with {row['name']}" for row in task["rows"])
    return f"{task['title']}, {task['seconds']} s per arm: loss {losses}."


def gpu_section(stored: dict[str, Any]) -> str:
    """Return the part of the page that shows stored results, marked as such."""
    tables = "".join(
        f"<h3>{html.escape(task['title'])}</h3><p>{html.escape(task['note'])}</p>"
        + page.render_table(GPU_HEADER, gpu_rows(task), numbers_from=1)
        for task in stored["tasks"]
    )
    return (
        f"<h2>What a GPU gives</h2><p><strong>Stored results, not of this run:</strong> measured on one "
        f"{html.escape(stored['device'])} with {html.escape(stored['command'])}, each arm for the same seconds, the "
        "capture of graphs inside the clock. On a GPU small steps all take the same time, so replaying planned shapes "
        f"as CUDA graphs gains most where starting kernels takes the time, and less where arithmetic does.</p>{tables}"
    )
