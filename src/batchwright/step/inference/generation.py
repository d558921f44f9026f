"""Generation: text for any number of prompts, in batches that fit, by graphs where these are exact."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..._ceiling import Ceiling
from ..._checks import as_whole
from ..._lengths import pad_up
from ..._progress import ProgressBar
from ...errors import ArgumentError
from ...plan import Budget, MaxItems, MaxTokens, Plan, Sorted, plan_batches
from ...plan.budget import check_budget
from .._loss_probe import evaluating
from ..graphs.backend import Choice, GraphBackend, make_backend
from ..memory.monitor import MemoryMonitor
from ._decoding import Collate, Counts, Decoder
from .pieces import Pieces, run_in_pieces

# Without a budget the first batch has this many of the longest examples, the next as many as the peak says will fit.
_FIRST_ITEMS = 8
# A small batch says little about a far larger one, and the allocator cannot fill a device to the last byte.
_MOST_GROWTH, _USABLE = 32, 0.8
# Where no peak is measured.
_BLIND_GROWTH = 2
# Less than this much larger is not worth a new plan.
_WORTHWHILE = 1.25
# Larger batches gain little. Fewer where no peak is measured, and fewest on a CPU, where running out ends the process.
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
    graphs: Choice = False,
    **generate_kwargs: Any,
) -> list[Tensor]:
    """Generate from every example as ``model.generate`` does, in batches of similar length that fit.

    Decoder-only models are padded on the left and give their new tokens; encoder-decoders are padded on the right and
    give what ``model.generate`` does, including the start token. A result ends with its first end-of-sequence token, so
    greedy and beam search give each example what it gets on its own; sampling draws differently. The longest examples
    run first, so that one that does not fit shows at once.

    With ``graphs``, tokens are decoded on a CUDA device by replays, where a step has no launches to wait for, and rows
    that have ended make room. The first steps are compared with eager ones. What graphs do not follow, such as beams,
    runs through ``model.generate`` as elsewhere, and a warning says why. Drawn tokens then have the same distribution,
    and with ``torch.manual_seed`` each example gets the same ones whichever batch it is in.

    Args:
        model: a transformers model in any mode; it generates in evaluation mode.
        examples: token ids (lists or 1-D tensors), or mappings with ``input_ids``; anything with ``collate``.
        budget: what a batch may cost. A batch that still runs out of memory is split, and later batches keep to the
            number of tokens that fitted. None begins with 8 examples and lets the peak of each batch decide how large
            the next can be, up to 0.8 of the memory; on a CPU it doubles up to 32 examples.
        collate: makes the keyword arguments of ``model.generate`` from a list of examples.
        lengths: ``(N,)`` or ``(N, axes)``, or a function of an example; None counts the ids.
        count_output: add the most new tokens as one more axis of length, for the budget to count.
        pad_token_id: None takes the model's, or its end-of-sequence token if it has none.
        pad_multiple_of: pad to multiples of this, for few shapes.
        memory: reads the peak of every batch when there is no budget; None reads that of a CUDA device.
        progress: show a progress bar.
        graphs: ``False`` always calls ``model.generate``; ``"auto"`` decodes with CUDA graphs where that is exact, and
            ``True`` refuses what they cannot do. Graphs were compared with eager generation on a CPU, by a stand-in,
            and not on a GPU yet.
        **generate_kwargs: for ``model.generate``, e.g. ``max_new_tokens=128, num_beams=4``. ``max_new_tokens`` may be a
            sequence with one number per example.

    Returns:
        One 1-D tensor of token ids per example, on the CPU, in the order of the examples.

    >>> import torch
    >>> class Echo(torch.nn.Linear):
    ...     def generate(self, input_ids, attention_mask, **options):
    ...         return torch.cat([input_ids, input_ids[:, -1:]], dim=1)
    >>> generate(Echo(1, 1), [[3, 4], [5]], max_new_tokens=1)
    [tensor([4]), tensor([5])]
    """
    if isinstance(examples, Mapping | str):
        raise ArgumentError(f"examples must be a list with one entry per example, got {type(examples).__name__}")
    if len(examples) == 0:
        return []
    pad_multiple_of = as_whole("pad_multiple_of", pad_multiple_of, least=1)
    limits = as_limits(generate_kwargs.get("max_new_tokens"), len(examples))
    if limits is not None:
        generate_kwargs["max_new_tokens"] = int(limits.max())
    decoder = Decoder(model, generate_kwargs, collate, pad_token_id, pad_multiple_of, has_limits=limits is not None)
    axes = decoder.lengths(examples, lengths, limits=limits, with_output=count_output or budget is None)
    meter = Meter.of(budget, memory, decoder.device)
    limit = first_limit(budget, int(pad_up(axes, pad_multiple_of).sum(axis=1).max()), decoder.device, meter)
    results: dict[int, Tensor] = {}
    with ProgressBar(label="generating", total=len(examples), enabled=progress) as bar, evaluating(model):
        runner = make_runner(decoder, graphs)
        waiting = np.arange(len(examples))
        while len(waiting):
            plan = limit.plan(axes[waiting], pad_multiple_of)
            for number in np.argsort(-plan.shapes[:, 1:].sum(axis=1), kind="stable"):
                indices = waiting[plan[number]].tolist()
                meter.begin(runner.held_bytes)
                pieces = _run(runner, examples, indices, axes, limits)
                # Cloned outside inference mode: tensors made inside it cannot be trained on.
                rows = [row.clone() for piece in pieces.results for row in piece]
                results.update(zip(indices, rows, strict=True))
                bar.update(len(indices))
                before, limit = limit, limit.after(plan.shapes[number].tolist(), pieces.size, meter)
                if limit != before:
                    break
            waiting = np.setdiff1d(waiting, list(results))
    return [results[index] for index in range(len(examples))]


def _run(
    runner: Runner, examples: Sequence[Any], indices: list[int], axes: npt.NDArray[np.int32], limits: Counts | None
) -> Pieces:
    return run_in_pieces(
        lambda chosen: runner.run(
            [examples[index] for index in chosen], chosen, None if limits is None else limits[chosen]
        ),
        lambda start, stop: indices[start:stop],
        len(indices),
        describe=lambda place: f"example {indices[place]} of length {axes[indices[place]].tolist()}",
    )


@final
@dataclass(frozen=True)
class Limit:
    """What a batch may cost, and what running batches has taught."""

    budget: Budget
    learned: Ceiling = field(default_factory=Ceiling)  # the most padded tokens per batch
    grows: bool = False

    def plan(self, lengths: npt.NDArray[np.int32], pad_multiple_of: int) -> Plan:
        """Sort examples into batches; one that is over the budget on its own runs alone."""
        tokens = self.learned.limit
        budget = self.budget if math.isinf(tokens) else self.budget & MaxTokens(int(tokens))
        return plan_batches(
            lengths, budget, grouping=Sorted(), shuffle=False, pad_multiple_of=pad_multiple_of, oversize="alone"
        )

    def after(self, shape: list[int], num_fitting: int, meter: Meter) -> Limit:
        """Return the limit after a batch of this shape, of which ``num_fitting`` examples fitted at once."""
        num_items, width = shape[0], sum(shape[1:])
        tokens = num_items * width
        if num_fitting < num_items:
            return replace(self, learned=self.learned.fall(num_fitting * width, failed_at=tokens), grows=False)
        if not self.grows or 2 * tokens <= self.learned.limit:
            return self  # fewer examples were left than the limit allows, so their peak says little
        room = meter.room()
        new = _BLIND_GROWTH * self.learned.limit if room is None else int(min(room, _MOST_GROWTH) * tokens)
        return replace(self, learned=self.learned.rise(new)) if new > _WORTHWHILE * self.learned.limit else self


@final
class Meter:
    """Measures how many times the last batch would fit into the memory."""

    def __init__(self, memory: MemoryMonitor | None) -> None:
        self._memory, self._before = memory, 0

    @staticmethod
    def of(budget: Budget | None, memory: MemoryMonitor | None, device: torch.device) -> Meter:
        """Return a meter of the given memory or of a CUDA device; with a budget it measures nothing."""
        if budget is not None:
            return Meter(None)
        return Meter(MemoryMonitor(device) if memory is None and device.type == "cuda" else memory)

    @property
    def measures(self) -> bool:
        """Return whether peaks are measured."""
        return self._memory is not None

    def begin(self, held_bytes: int = 0) -> None:
        """Begin a batch.

        Args:
            held_bytes: memory that is in use for the batch before, and that this one takes over or gives back.
        """
        if self._memory is not None:
            self._memory.reset_peak()
            self._before = self._memory.used_bytes - held_bytes

    def room(self) -> float | None:
        """Return ``(usable − before) / (peak − before)``, None if no peak is measured."""
        if self._memory is None or self._memory.peak_bytes <= self._before:
            return None
        usable = _USABLE * self._memory.total_bytes
        return max(0.0, usable - self._before) / (self._memory.peak_bytes - self._before)


def first_limit(budget: Budget | None, longest: int, device: torch.device, meter: Meter) -> Limit:
    """Return the limit of the first batch: the budget, or 8 of the longest examples.

    Args:
        budget: what a batch may cost; None lets batches grow.
        longest: tokens of the longest example, input and output.
        device: of the model.
        meter: whether peaks are measured.
    """
    if budget is not None:
        return Limit(check_budget(budget))
    most = _MOST_ITEMS_ON_CPU if device.type == "cpu" else _MOST_ITEMS_BLIND
    items = MaxItems(_MOST_ITEMS if meter.measures else most)
    return Limit(items, Ceiling(_FIRST_ITEMS * longest), grows=True)


class Runner(Protocol):
    """Runs batches."""

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example.

        Args:
            examples: those of one batch.
            indices: their places among all.
            limits: the most new tokens of each, None if all have the same.
        """

    @property
    def held_bytes(self) -> int:
        """Return the memory that is held from batch to batch."""


@final
class Eager:
    """Runs batches through ``model.generate``."""

    held_bytes = 0

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example."""
        return self._decoder.run(examples, limits)


def as_limits(value: Any, num: int) -> Counts | None:
    """Return ``max_new_tokens`` of each example, None if there is one number for all.

    Args:
        value: what was given.
        num: the number of examples.
    """
    if value is None or np.ndim(value) == 0:
        return None
    limits = np.asarray(value)
    if limits.shape != (num,) or not np.issubdtype(limits.dtype, np.integer) or limits.min() < 1:
        raise ArgumentError(
            f"max_new_tokens must be one whole number from 1, or one per example, {num}; got an array of shape "
            f"{limits.shape} and type {limits.dtype}"
        )
    return limits.astype(np.int64)


def make_runner(decoder: Decoder, graphs: Choice) -> Runner:
    """Return what runs a batch.

    Args:
        decoder: runs a batch eagerly.
        graphs: what was asked for.
    """
    backend = None if graphs is False else make_backend(graphs, decoder.device)
    if backend is None:
        return Eager(decoder)
    from ._options import read_options

    options = read_options(decoder.base, decoder.model, decoder.kwargs)
    if not isinstance(options, str):
        from ._ranges import make_attend
        from ._replaying import Replaying

        seed = int(torch.randint(2**62, ())) if options.rules.draws else 0
        make = partial(_another, backend, graphs, decoder.device)
        attend = make_attend(decoder.base, decoder.device)
        return Replaying(decoder, options, make, seed=seed, is_wanted=graphs is True, attend=attend)
    if graphs is True:
        raise ArgumentError(f"graphs=True cannot be followed: {options}; pass graphs='auto' or graphs=False")
    warnings.warn(f"generate runs eagerly: {options}", stacklevel=4)
    return Eager(decoder)


def _another(given: GraphBackend, graphs: Choice, device: torch.device) -> GraphBackend:
    """Return what captures for a new layout of the memory; CUDA graphs of the one before go with their pool."""
    return (make_backend(graphs, device) or given) if isinstance(graphs, bool | str) else given
