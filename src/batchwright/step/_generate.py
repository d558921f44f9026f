"""Generate for many examples: sorted into batches that fit, results in input order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .._progress import ProgressBar
from ..errors import ArgumentError
from ..plan import Budget
from ..plan._arrays import pad_up
from ._decode import Collate, Decoder
from ._generate_limit import Meter, first_limit
from ._models import evaluating
from ._oom_safe import Pieces, run_in_pieces
from .memory import MemoryMonitor


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
        memory: where peaks are read, and begun anew with every batch, without a budget; None is the CUDA device's.
        progress: show a progress bar.
        **generate_kwargs: for ``model.generate``, e.g. ``max_new_tokens=128, num_beams=4``.

    Returns:
        One 1-D tensor of token ids an example, on the CPU, in the order of the examples.

    >>> import torch
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
    meter = Meter.of(budget, memory, decoder.device)
    limit = first_limit(budget, int(pad_up(axes, pad_multiple_of).sum(axis=1).max()), decoder.device, meter)
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
