"""The settings of the demo, and what each of its arms did, as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final


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
