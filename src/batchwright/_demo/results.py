"""What an arm of the demo did, as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """A validation: after how many examples and processor seconds of training, and the loss a token."""

    num_examples: int
    seconds: float
    loss: float


@final
@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What one arm did.

    Args:
        name: of the arm.
        what: it does, in a sentence.
        rate: the learning rate at its peak.
        seconds: of processor time in training, validation not counted.
        num_tokens: real tokens trained on.
        checks: the validations, the last one after the last update.
        shapes: (examples, padded length) of every batch.
    """

    name: str
    what: str
    rate: float
    seconds: float
    num_tokens: int
    checks: tuple[Check, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def num_steps(self) -> int:
        """Updates made."""
        return len(self.shapes)

    @property
    def padded_tokens(self) -> int:
        """Real tokens and padding together."""
        return sum(items * length for items, length in self.shapes)

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding."""
        return 1 - self.num_tokens / self.padded_tokens

    @property
    def tokens_per_second(self) -> float:
        """Real tokens trained on in a second."""
        return self.num_tokens / self.seconds

    @property
    def loss(self) -> float:
        """The validation loss at the end."""
        return self.checks[-1].loss

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        names = ("num_steps", "padding", "tokens_per_second", "loss")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}
