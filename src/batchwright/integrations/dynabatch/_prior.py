"""How much memory a batch takes beside the first one, where nothing was measured on this machine.

``MemoryModel.pretrained`` answers, fitted to many models of both kinds; words and characters are no part of it, as a
device sees token ids alone. One thing it must be told: how many tokens are generated for each item. Where nobody has
said, half the longest input is assumed for every item, however short its own.

For inputs of up to some 2,000 tokens the prediction for generation is the more cautious of the two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..._types import FloatArray
from ...plan import MemoryModel
from ...plan.models.prior import Task as Task

# New tokens of every item, as a share of the longest input.
ASSUMED_OUTPUT = 0.5


def relative_memory(
    num_items: npt.ArrayLike,
    max_length: npt.ArrayLike,
    reference_items: int,
    reference_max_length: int,
    *,
    task: Task,
    new_tokens: int | None = None,
) -> FloatArray:
    """Return the memory of batches relative to a reference batch.

    It grows with both the items and the length, and is exactly 1 for the reference itself.

    Args:
        num_items: items of each batch.
        max_length: padded length of each batch; the sum where several axes are padded.
        reference_items: items of the reference.
        reference_max_length: its padded length.
        task: ``"train"`` or ``"generate"``.
        new_tokens: tokens generated for each item; None assumes half the longest input.

    >>> relative_memory([8, 16, 16], [512, 512, 64], 8, 512, task="train").round(3).tolist()
    [1.0, 2.0, 0.25]
    """
    items, lengths = np.broadcast_arrays(num_items, max_length)
    shapes = np.stack([items.ravel(), lengths.ravel()], axis=1)
    if task == "generate" and new_tokens is None:
        new_tokens = max(1, round(ASSUMED_OUTPUT * reference_max_length))
    prior = MemoryModel.pretrained(task)
    relative = prior.relative(
        shapes,
        reference=(reference_items, reference_max_length),
        new_tokens=new_tokens if task == "generate" else None,
    )
    return relative.reshape(items.shape)
