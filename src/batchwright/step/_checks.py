"""What a Stepper refuses or warns of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ArgumentError
from ..plan import Budget
from ._split import LogicalBatch
from ._tree import leaves

_WHOLE_BATCH = "batchwright_needs_whole_batch"


def whole_batch(loss_fn: Any) -> Any:
    """Declare that a loss needs all examples at once (in-batch negatives, contrastive losses): splitting is refused.

    >>> @whole_batch
    ... def contrastive(model, batch): ...
    >>> needs_whole_batch(contrastive)
    True
    """
    setattr(loss_fn, _WHOLE_BATCH, True)
    return loss_fn


def needs_whole_batch(loss_fn: Any) -> bool:
    """Return whether a loss was declared to need all examples at once."""
    return bool(getattr(loss_fn, _WHOLE_BATCH, False))


def check_split(loss_fn: Any, parts: Sequence[Sequence[int]]) -> None:
    """Refuse to split a batch whose loss compares its examples."""
    if len(parts) > 1 and needs_whole_batch(loss_fn):
        raise ArgumentError(
            f"this loss compares the examples of a batch, so {len(parts)} micro-batches would change it; "
            "use a smaller logical batch, activation checkpointing, or a loss with cached embeddings"
        )


def batch_norm_warning(module: nn.Module) -> str | None:
    """Return what to say of BatchNorm in training mode, None where there is none."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.training:
            return (
                f"BatchNorm in training mode ({name}) sees micro-batches, not the batch: its statistics, and so the "
                "update, depend on the split. Use GroupNorm or LayerNorm, or put it into eval mode"
            )
    return None


def check_micro_batch(value: Any, lengths: Any) -> Any:
    """Return the micro-batch setting, or say which there are."""
    if isinstance(value, Budget):
        if lengths is None:
            raise ArgumentError(f"micro_batch={value} needs lengths=, the lengths of the examples of a batch")
        return value
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if is_number or (isinstance(value, str) and value == "auto") or hasattr(value, "size"):
        return value
    raise ArgumentError(f"micro_batch must be 'auto', a number of 1 or more, a budget or a controller, got {value!r}")


def does_not_fit(logical: LogicalBatch, index: int, device: torch.device) -> str:
    """Return the complaint about one example that runs out of memory alone."""
    length = "" if logical.lengths is None else f" of length {logical.lengths[index].tolist()}"
    tensors = [(tuple(tensor.shape), tensor.nbytes) for tensor in leaves(logical.take([index]))]
    size = sum(num_bytes for _, num_bytes in tensors)
    free = ""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        free = f"; {available / 2**30:.2f} of {total / 2**30:.2f} GiB are free on {device}"
    return (
        f"example {index} of the batch{length} does not fit alone: tensors {[shape for shape, _ in tensors]}, "
        f"{size:,} bytes of input{free}. Shorten it, use a smaller model or activation checkpointing"
    )
