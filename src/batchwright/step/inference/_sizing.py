"""The memory of decoding by graphs, known before it is taken: the cache to the byte, the rest from a first few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch

from ..._types import MAX_INT32, FloatArray, IntArray
from ...plan import Budget, MaxBytes
from ...plan.budget import AllOf
from ..memory.monitor import MemoryMonitor

# Kernels want sizes that are multiples of this.
_EIGHT = 8
# Of the memory: without a budget, and beside a budget that does not count bytes.
_USABLE, _NEARLY_ALL = 0.8, 0.95
# What was measured on a few rows, as many rows take it: allocators round up.
_MARGIN = 1.25
# The share of the room for batches that reading a piece of the prompts may take, and the most tokens of a piece.
READING, _MOST_TOKENS = 0.125, 65_536


@final
@dataclass(frozen=True)
class Layout:
    """How much room slots have.

    Attributes:
        num_rows: rows side by side.
        width: tokens of the decoder in the cache.
        source_width: tokens of the source, None for a model without an encoder.
    """

    num_rows: int
    width: int
    source_width: int | None

    def holds(self, other: Layout, *, uses_ranges: bool = False) -> bool:
        """Say whether rows of another layout can be decoded in this one without any more work.

        Args:
            other: of the same model.
            uses_ranges: attention is over the keys that there are, whatever room is left beside them.
        """
        own, others = (self.width, self.source_width or 0), (other.width, other.source_width or 0)
        fits = all(one >= another for one, another in zip(own, others, strict=True)) if uses_ranges else own == others
        return self.num_rows >= other.num_rows and fits


@final
@dataclass(frozen=True)
class Sizes:
    """What decoding takes, in bytes.

    Attributes:
        own: of the cache, for each token of the decoder.
        source: of the cache, for each token of the source.
        per_token: to read a prompt, besides the cache, for each of its tokens.
        per_row: to read a prompt, besides the cache, for each row: the logits.
        per_step: of a step, for each row.
        per_slot: of what lies beside the cache for each row and token.
        per_start: of what lies beside the cache for each row.
    """

    own: int
    source: int
    per_token: float
    per_row: float
    per_step: float
    per_slot: int = 0
    per_start: int = 0

    def of_row(self, width: IntArray, source_width: IntArray | int) -> FloatArray:
        """Return what each row takes for good, for rows of such widths."""
        kept = width * (self.own + self.per_slot) + source_width * (self.source + self.per_slot)
        return np.asarray(kept + self.per_start + _MARGIN * self.per_step, dtype=np.float64)

    def of_cache(self, layout: Layout) -> int:
        """Return what the cache takes."""
        return layout.num_rows * (self.own * layout.width + self.source * (layout.source_width or 0))

    def of_slots(self, layout: Layout) -> float:
        """Return what lies beside the cache, besides what a step computes with."""
        return layout.num_rows * (self.per_slot * (layout.width + (layout.source_width or 0)) + self.per_start)

    def of_steps(self, layout: Layout) -> float:
        """Return what a step of all rows computes with, which graphs keep."""
        return layout.num_rows * _MARGIN * self.per_step

    def of_reading(self, width: IntArray | int) -> Any:
        """Return what it takes to read one row of a prompt, besides the cache."""
        return _MARGIN * (width * self.per_token + self.per_row)

    def rows_of_piece(self, width: int, room: float | None) -> int:
        """Return how many rows of a prompt are read at once.

        Args:
            width: tokens of the prompt.
            room: bytes for the batch, None if that is not known.
        """
        most = max(1, _MOST_TOKENS // max(1, width))
        if room is None or self.of_reading(width) <= 0:
            return most
        return int(max(1, min(most, READING * room // self.of_reading(width))))

    def of_batch(self, layout: Layout, width: int, room: float) -> float:
        """Return what a batch takes, at its peak, beyond what is in use before it.

        Args:
            layout: rows and widths.
            width: tokens of its longest prompt.
            room: bytes for the batch.
        """
        one = self.of_row(np.asarray([layout.width]), layout.source_width or 0)[0]
        return float(layout.num_rows * one) + min(self.of_reading(width) * layout.num_rows, self._reading(width, room))

    def _reading(self, width: Any, room: float) -> Any:
        return np.maximum(self.of_reading(width), READING * room)


@final
@dataclass(frozen=True)
class GraphBytes(Budget):
    """At most so many bytes for the cache of a batch, its steps, and for reading its prompts in pieces.

    ``rows in eights × bytes of a row + bytes of a piece <= room``.

    Args:
        sizes: what things take.
        room: bytes for a batch.
        num_prompt: tokens of the decoder's prompt before the source is counted; None for a model without an encoder,
            whose prompt is the first axis of length.
        most_new: the most new tokens, None if they are the last axis of length.
    """

    sizes: Sizes
    room: float
    num_prompt: int | None
    most_new: int | None

    def _parts(self, lengths: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return what a row takes, and what reading takes."""
        lengths = np.asarray(lengths).astype(np.int64)
        first, new = lengths[:, 0], lengths[:, -1] if self.most_new is None else self.most_new
        if self.num_prompt is None:
            rows = self.sizes.of_row(rounded(first + new - 1), 0)
        else:
            rows = self.sizes.of_row(rounded(self.num_prompt + new - 1 + 0 * first), rounded(first))
        return rows, np.asarray(self.sizes._reading(first, self.room), dtype=np.float64)

    def fraction(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        """Return the share of the room that each shape takes."""
        rows, reading = self._parts(lengths)
        return (in_eights(np.asarray(num_items)) * rows + reading) / max(self.room, 1.0)

    def max_items(self, lengths: IntArray) -> IntArray:
        """Return the most rows that fit, in eights from there on."""
        rows, reading = self._parts(lengths)
        fitting = np.clip((self.room - reading) / np.maximum(rows, 1.0), 0, MAX_INT32 - _EIGHT).astype(np.int64)
        return np.where(fitting > _EIGHT, fitting // _EIGHT * _EIGHT, fitting)


def room_for(budget: Budget | None, memory: MemoryMonitor | None, held_bytes: int = 0) -> float | None:
    """Return how many bytes a batch may take beyond what is in use, None if no memory is measured.

    Args:
        budget: what a batch may cost; one in bytes counts all that is in use at the peak.
        memory: of the device.
        held_bytes: what is in use now and will be given back.
    """
    if memory is None:
        return None
    parts = () if budget is None else budget.parts if isinstance(budget, AllOf) else (budget,)
    most = [float(part.max_bytes) for part in parts if isinstance(part, MaxBytes)]
    allowed = min([*most, (_USABLE if budget is None else _NEARLY_ALL) * memory.total_bytes])
    return max(0.0, allowed - memory.used_bytes + held_bytes)


def room_of(budget: Budget | None, memory: MemoryMonitor | None, device: torch.device) -> Callable[[int], float | None]:
    """Return what tells the bytes for a batch; it is told what is in use now and will be given back."""
    if memory is None and device.type == "cuda":
        memory = MemoryMonitor(device)
    return partial(room_for, budget, memory)


def in_eights(num: IntArray) -> IntArray:
    """Return numbers of rows as slots have them: more than eight in eights.

    >>> in_eights(np.array([3, 8, 9])).tolist()
    [3, 8, 16]
    """
    return np.where(num <= _EIGHT, num, -(-num // _EIGHT) * _EIGHT)


def rounded(width: IntArray) -> IntArray:
    """Return widths in steps of an eighth to a quarter, so that batches of similar lengths share their graphs.

    >>> rounded(np.array([1, 30, 65, 512])).tolist()
    [8, 32, 80, 512]
    """
    bits = np.frexp(np.maximum(width - 1, 1).astype(np.float64))[1]  # as int.bit_length
    step = np.maximum(_EIGHT, 2 ** np.maximum(bits - 3, 0))
    return -(-width // step) * step


def layout_of(num: int, num_prompt: int, most_new: int, source_width: int | None) -> Layout:
    """Return the room for a batch.

    Args:
        num: its rows.
        num_prompt: tokens of the decoder's prompt.
        most_new: the most new tokens.
        source_width: tokens of the source, None for a model without an encoder.
    """
    rows, width, source = in_eights(np.asarray(num)), num_prompt + most_new - 1, source_width
    return Layout(int(rows), _one(width), None if source is None else _one(source))


def _one(width: int) -> int:
    return int(rounded(np.asarray([width]))[0])
