"""How much to measure: more on a GPU, less on a CPU, least with ``--quick``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from .records import Machine

_SMALL_DEVICE_BYTES = 8 * 2**30


@final
@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes of what is run.

    Args:
        width: of the models.
        num_layers: of the model whose step is timed.
        num_attention_layers: of the stack whose attention is timed.
        num_shapes: new shapes for each attention kernel.
        repeats: timed runs of a shape after the first.
        length: of the examples in a step.
        max_items: the largest batch, a power of two.
        most_seconds: no larger batch is run after a step as long as this.
    """

    width: int
    num_layers: int
    num_attention_layers: int
    num_shapes: int
    repeats: int
    length: int
    max_items: int
    most_seconds: float


CPU = Effort(
    width=64,
    num_layers=2,
    num_attention_layers=2,
    num_shapes=4,
    repeats=3,
    length=16,
    max_items=128,
    most_seconds=0.5,
)
GPU = Effort(
    width=1024,
    num_layers=12,
    num_attention_layers=12,
    num_shapes=5,
    repeats=3,
    length=64,
    max_items=1024,
    most_seconds=0.5,
)


def effort_for(machine: Machine, *, quick: bool) -> Effort:
    """Return what fits a machine in about half a minute, or in a few seconds."""
    full = CPU if machine.device == "cpu" else GPU
    if full is GPU and machine.free_bytes < _SMALL_DEVICE_BYTES:
        full = replace(GPU, width=512)
    if not quick:
        return full
    return replace(full, num_shapes=3, max_items=full.max_items // 4, most_seconds=full.most_seconds / 4)
