"""Generate for many examples: sorted into batches that fit, results in input order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._progress import ProgressBar
from ..errors import ArgumentError
from ..plan import Budget, MaxItems, MaxTokens, Plan, Sorted, plan_batches
from ..plan._arrays import pad_up
from ..plan.budget import check_budget
from ._decode import Collate, Decoder
from ._models import evaluating
from ._oom_safe import Pieces, run_in_pieces
from .memory import MemoryMonitor

# Without a budget: so many of the longest examples first, then as many as the peak says will fit.
_FIRST_ITEMS = 8
# A small batch says little about a far larger one, and the allocator cannot fill a device to the last byte.
_MOST_GROWTH, _USABLE = 32, 0.8
# Where no peak is measured.
_BLIND_GROWTH = 2
# Less than this much larger is not worth a new plan.
_WORTHWHILE = 1.25
# Wider batches gain little; fewer where no peak is measured. A CPU out of memory ends the process: still fewer there.
_MOST_ITEMS, _MOST_ITEMS_BLIND, _MOST_ITEMS_ON_CPU = 1024, 256, 32


def generate(
    model: Any,
    examples: Sequence[Any],
    *,
    budget: Budget | None = None,
    collate: Collate | None = None,
    lengths: npt.ArrayLike | Callable[[Any], Any] | None = None,
    count_output: bool = False,
    pad_token_id: int | None = None,
    pad_multiple_of: int = 1,
    memory: MemoryMonitor | None = None,
    progress: bool = False,
    **generate_kwargs: Any,
) -> list[Tensor]:
    """Generate from every example with ``model.generate``, in batches of similar length that fit.

    Decoder-only models are padded on the left and give their new tokens; encoder-decoders are padded on the right and
    give what ``model.generate`` does, start token included. A result ends with its first end-of-sequence token, so that
    greedy and beam search give for each example what they give for it alone; sampling draws otherwise. The longest
    examples run first: what does not fit shows at once.

    Args:
        model: a transformers model in any mode; it generates in evaluation mode.
        examples: token ids (lists or 1-D tensors), or mappings with ``input_ids``; anything with ``collate``.
        budget: what a batch may cost. A batch that runs out of memory all the same is split, and later batches stay at
            the tokens that fitted. None begins with 8 examples and lets the peak of each batch say how large the next
            can be, up to 0.8 of the memory; on a CPU it doubles up to 32 examples.
        collate: makes the keyword arguments of ``model.generate`` from a list of examples.
        lengths: ``(N,)`` or ``(N, axes)``, or a function of an example; None counts the ids.
        count_output: the most new tokens are one more axis of length that the budget counts.
        pad_token_id: None takes the model's, else its end-of-sequence token.
        pad_multiple_of: pad to multiples of this, for few shapes.
        memory: where peaks are read without a budget; None reads those of a CUDA device.
        progress: show a progress bar.
        **generate_kwargs: for ``model.generate``, e.g. ``max_new_tokens=128, num_beams=4``.

    Returns:
        One 1-D tensor of token ids an example, on the CPU, in the order of the examples.

    >>> class Echo(torch.nn.Linear):
    ...     def generate(self, input_ids, attention_mask, **options):
    ...         return torch.cat([input_ids, input_ids[:, -1:]], dim=1)
    >>> generate(Echo(1, 1), [[3, 4], [5]], max_new_tokens=1)
    [tensor([4]), tensor([5])]
    """
    if isinstance(examples, Mapping | str):
        raise ArgumentError(f"examples must be a list, one entry an example, got {type(examples).__name__}")
    if len(examples) == 0:
        return []
    decoder = Decoder(model, generate_kwargs, collate, pad_token_id, pad_multiple_of)
    axes = decoder.lengths(examples, lengths, with_output=count_output or budget is None)
    if memory is None and decoder.device.type == "cuda":
        memory = MemoryMonitor(decoder.device)
    longest = int(pad_up(axes, pad_multiple_of).sum(axis=1).max())
    limit = _first_limit(budget, longest, _most_items(decoder.device, memory))
    meter = _Meter(memory)
    results: dict[int, Tensor] = {}
    with ProgressBar(label="generating", total=len(examples), enabled=progress) as bar, evaluating(model):
        waiting = np.arange(len(examples))
        while len(waiting):
            plan = limit.plan(axes[waiting], pad_multiple_of)
            for number in np.argsort(-plan.shapes[:, 1:].sum(axis=1), kind="stable"):
                indices = waiting[plan[number]].tolist()
                meter.begin()
                pieces = _run(decoder, examples, indices, axes)
                # Cloned here, under no inference mode: tensors made there cannot be trained on.
                rows = [row.clone() for piece in pieces.results for row in piece]
                results.update(zip(indices, rows, strict=True))
                bar.update(len(indices))
                before, limit = limit, limit.after(plan.shapes[number].tolist(), pieces.size, meter)
                if limit != before:
                    break
            waiting = np.setdiff1d(waiting, list(results))
    return [results[index] for index in range(len(examples))]


def _run(decoder: Decoder, examples: Sequence[Any], indices: list[int], axes: npt.NDArray[np.int32]) -> Pieces:
    return run_in_pieces(
        lambda chosen: decoder.run([examples[index] for index in chosen]),
        lambda start, stop: indices[start:stop],
        len(indices),
        describe=lambda place: f"example {indices[place]} of length {axes[indices[place]].tolist()}",
    )


@final
@dataclass(frozen=True)
class _Limit:
    """What a batch may cost, and what running taught."""

    budget: Budget
    tokens: int | None = None  # most padded tokens a batch; None leaves it to the budget
    grows: bool = False

    def plan(self, lengths: npt.NDArray[np.int32], pad_multiple_of: int) -> Plan:
        """Sort examples into batches; one that is over the budget alone runs alone."""
        budget = self.budget if self.tokens is None else self.budget & MaxTokens(self.tokens)
        return plan_batches(
            lengths, budget, grouping=Sorted(), shuffle=False, pad_multiple_of=pad_multiple_of, oversize="alone"
        )

    def after(self, shape: list[int], num_fitting: int, meter: _Meter) -> _Limit:
        """Return the limit after a batch of this shape, of which so many examples fitted at once."""
        num_items, width = shape[0], sum(shape[1:])
        if num_fitting < num_items:
            return replace(self, tokens=num_fitting * width, grows=False)
        if not self.grows or self.tokens is None or 2 * num_items * width <= self.tokens:
            return self  # fewer examples were left than the limit allows: their peak says little
        room = meter.room()
        tokens = _BLIND_GROWTH * self.tokens if room is None else int(min(room, _MOST_GROWTH) * num_items * width)
        return replace(self, tokens=tokens) if tokens > _WORTHWHILE * self.tokens else self


@final
class _Meter:
    """How many times the last batch would fit into the memory."""

    def __init__(self, memory: MemoryMonitor | None) -> None:
        self._memory, self._before = memory, 0

    def begin(self) -> None:
        """Begin a batch."""
        if self._memory is not None:
            self._memory.reset_peak()
            self._before = self._memory.used_bytes

    def room(self) -> float | None:
        """Return ``(usable − before) / (peak − before)``, None where no peak is measured."""
        if self._memory is None or self._memory.peak_bytes <= self._before:
            return None
        usable = _USABLE * self._memory.total_bytes
        return max(0.0, usable - self._before) / (self._memory.peak_bytes - self._before)


def _first_limit(budget: Budget | None, longest: int, most_items: int) -> _Limit:
    if budget is not None:
        return _Limit(check_budget(budget))
    return _Limit(MaxItems(most_items), tokens=_FIRST_ITEMS * longest, grows=True)


def _most_items(device: torch.device, memory: MemoryMonitor | None) -> int:
    if memory is not None:
        return _MOST_ITEMS
    return _MOST_ITEMS_ON_CPU if device.type == "cpu" else _MOST_ITEMS_BLIND
