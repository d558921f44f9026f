"""Loss functions that return sums, ``(loss_sum, weight)``, so that any split of a batch adds up to the same total."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError

Sums: TypeAlias = "tuple[Tensor, Tensor | float] | tuple[Tensor, Tensor | float, Mapping[str, Tensor]]"
LossFunction: TypeAlias = Callable[[nn.Module, Any], Sums]

# Entropy takes this many logits at a time: a float32 copy of all of them could be the largest tensor of a step.
_LOGITS_AT_ONCE = 1 << 24
# The attribute that marks a loss as one that cannot be split.
_WHOLE_BATCH = "batchwright_needs_whole_batch"


def supervised_loss(loss: Callable[..., Tensor], *, with_entropy: bool = False) -> LossFunction:
    """Make a loss function for batches ``(inputs, targets)`` from a loss with ``reduction="sum"``.

    The weight is the number of targets that count: all of them, except class indices equal to the loss's
    ``ignore_index``, by default -100. A row of class probabilities is one target. Class weights change the loss, not
    the count.

    Args:
        loss: e.g. ``functools.partial(F.cross_entropy, reduction="sum")`` or ``nn.MSELoss(reduction="sum")``.
        with_entropy: also return the summed entropy of the softmax of the outputs, for ``size.entropy_driven``.

    Returns:
        ``loss_fn(model, (inputs, targets)) -> (loss_sum, weight)``, with ``{"entropy": sum}`` if ``with_entropy``.

    >>> loss_fn = supervised_loss(nn.CrossEntropyLoss(reduction="sum"))
    >>> loss_sum, weight = loss_fn(nn.Identity(), (torch.zeros(3, 2), torch.tensor([0, 1, -100])))
    >>> round(float(loss_sum), 4), int(weight)
    (1.3863, 2)
    """
    reduction = _setting(loss, "reduction", None)
    if reduction != "sum":
        raise ArgumentError(
            f"supervised_loss needs a loss with reduction='sum', got {reduction!r}; a mean of means is not the mean; "
            "write nn.CrossEntropyLoss(reduction='sum') or functools.partial(F.cross_entropy, reduction='sum')"
        )
    ignore_index = _setting(loss, "ignore_index", -100)
    # Cross-entropy has its classes on axis 1, whatever follows. For other losses the last axis is a guess.
    class_axis = 1 if _is_cross_entropy(loss) else -1

    def loss_fn(model: nn.Module, batch: Any) -> Sums:
        inputs, targets = _pair(batch)
        outputs = model(inputs)
        are_probabilities = targets.is_floating_point() and class_axis == 1 and outputs.ndim > 1
        num_classes = outputs.shape[1] if are_probabilities else 1
        weight = _num_counted(targets, ignore_index).to(outputs.device) / num_classes
        if not with_entropy:
            return loss(outputs, targets), weight
        logits = outputs.movedim(class_axis, -1) if outputs.ndim > 1 else outputs
        indices = None if targets.is_floating_point() else targets
        return loss(outputs, targets), weight, {"entropy": entropy_sum(logits, indices, ignore_index=ignore_index)}

    return loss_fn


def entropy_sum(logits: Tensor, targets: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
    """Return the entropy of the softmax over the last axis, in nats, summed over the items that count.

    ``H(p) = −sum_i p_i log p_i``, in float32 or wider; 0 for full certainty, ``log C`` for C equal classes.

    Args:
        logits: ``(…, classes)``; a logit of minus infinity is an impossible class.
        targets: ``(…)``; items equal to ``ignore_index`` do not count. None counts all items.
        ignore_index: the target of padding.

    Returns:
        A tensor with one element, without a gradient.

    >>> round(float(entropy_sum(torch.zeros(3, 4))), 4)  # 3 × log 4
    4.1589
    """
    if targets is not None and targets.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"entropy_sum needs one target per item, {tuple(logits.shape[:-1])} for logits {tuple(logits.shape)}, "
            f"got {tuple(targets.shape)}; classes are on the last axis"
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.detach().reshape(-1, logits.shape[-1])
    counts = None if targets is None else (targets != ignore_index).reshape(-1).to(logits.device)
    total = torch.zeros((), dtype=dtype, device=logits.device)
    num_rows = max(1, _LOGITS_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), num_rows):
        part = slice(start, start + num_rows)
        # entr(0) is 0, where 0 × log 0 would be NaN.
        entropy = torch.special.entr(rows[part].to(dtype).softmax(dim=-1)).sum(dim=-1)
        total = total + (entropy if counts is None else torch.where(counts[part], entropy, 0)).sum()
    return total


def _pair(batch: Any) -> tuple[Any, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        what = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
        raise ArgumentError(
            f"supervised_loss takes batches (inputs, targets), got {what}; write a loss_fn(model, micro_batch) that "
            "returns (loss_sum, weight) for other batches"
        )
    inputs, targets = batch
    if not isinstance(targets, Tensor):
        raise ArgumentError(
            f"supervised_loss needs the targets as a tensor, got {type(targets).__name__}; convert inputs and targets, "
            "e.g. with torch.as_tensor"
        )
    if targets.ndim == 0:
        raise ArgumentError(
            "supervised_loss needs a batch, with one row of inputs and targets per example, and the target is a single "
            "number; give a batch of one as data[:1], not data[0]"
        )
    return inputs, targets


def _num_counted(targets: Tensor, ignore_index: int) -> Tensor:
    """Count on the device: reading a number from it would make the step wait."""
    if targets.is_floating_point():
        return torch.tensor(float(targets.numel()))
    return (targets != ignore_index).sum().to(torch.float32)


def _setting(loss: Callable[..., Tensor], name: str, default: Any) -> Any:
    """Return a setting of a loss module, or of a ``functools.partial`` of a loss function."""
    return getattr(loss, name, getattr(loss, "keywords", {}).get(name, default))


def _is_cross_entropy(loss: Callable[..., Tensor]) -> bool:
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or getattr(loss, "func", None) in (
        F.cross_entropy,
        F.nll_loss,
    )


def whole_batch(loss_fn: Any) -> Any:
    """Declare that a loss needs all examples at once (in-batch negatives, contrastive losses), so splitting is refused.

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
