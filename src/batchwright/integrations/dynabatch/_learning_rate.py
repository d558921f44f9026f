"""scale_lr_for_dynabatch: the learning rate of a fixed batch, for larger ones."""

from __future__ import annotations

import copy
import math
from typing import Any

from ..._checks import as_whole
from ...errors import ArgumentError
from ...size.learning_rate import Rule, get_rule


def scale_lr_for_dynabatch(
    args: Any,
    sampler: Any,
    dataset_size: int,
    baseline_batch_size: int | None = None,
    *,
    rule: str | Rule = "linear",
) -> Any:
    """Return a copy of the training arguments, its learning rate scaled to the larger batches.

    ``lr × fixed updates an epoch / updates an epoch``, both counted over all ranks and micro-batches of an update: that
    is the mean batch relative to the fixed one. Gradients are means here, so the rate is scaled this once.

    Args:
        args: ``TrainingArguments``; they stay as they are.
        sampler: whose batches are trained on.
        dataset_size: examples of the data set.
        baseline_batch_size: the fixed size a device, None takes ``per_device_train_batch_size``.
        rule: ``"linear"``, ``"sqrt"`` for Adam and its kin, or a function of (larger, smaller).

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(learning_rate=0.1, per_device_train_batch_size=8)
    >>> round(scale_lr_for_dynabatch(args, range(5), 80).learning_rate, 6)  # 10 batches of 8 become 5
    0.2
    """
    size = args.per_device_train_batch_size if baseline_batch_size is None else baseline_batch_size
    size = as_whole("baseline_batch_size", size, least=1)
    world_size, window = getattr(args, "world_size", 1), getattr(args, "gradient_accumulation_steps", 1)
    batches = len(sampler) * getattr(sampler, "world_size", 1)
    fixed = _num_updates(-(-as_whole("dataset_size", dataset_size, least=1) // size), world_size, window)
    factor = get_rule(rule)
    if not callable(factor):
        raise ArgumentError(f"rule must be 'linear', 'sqrt' or a function of (larger, smaller), got {rule!r}")
    scaled = copy.copy(args)
    scaled.learning_rate = args.learning_rate * factor(fixed, _num_updates(batches, world_size, window))
    return scaled


def _num_updates(batches: int, world_size: int, window: int) -> int:
    return max(1, math.ceil(math.ceil(batches / world_size) / window))
