"""Every number the demo depends on, on one page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The settings of a run; the defaults are the full demo.

    Args:
        num_train: functions to train on, each seen once by every arm.
        num_valid: functions to validate on, from other files.
        max_length: longer functions are cut.
        max_tokens: padded tokens a batch may hold, for every arm.
        num_checks: validations an arm, spread evenly over its examples.
        vocabulary_size: most common tokens kept; the rest become one.
        width: of the model.
        num_layers: of the model.
        num_heads: of each attention.
        base_rate: learning rate of an update with 1,000 real tokens; near the best for the fixed size, shuffled.
        seed: of the data order and the initial weights.
    """

    num_train: int = 800
    num_valid: int = 80
    max_length: int = 512
    max_tokens: int = 4096
    num_checks: int = 6
    vocabulary_size: int = 4000
    width: int = 128
    num_layers: int = 2
    num_heads: int = 4
    base_rate: float = 2.5e-3
    seed: int = 0


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
