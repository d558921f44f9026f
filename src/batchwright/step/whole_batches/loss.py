"""WholeBatchLoss: a loss that compares the examples of a batch, told apart from the encoding that can run in pieces."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, final

import torch.distributed as dist
from torch import nn

from ...errors import ArgumentError
from ..losses import Sums

# How many micro-batches the batch that a Stepper runs was cut into, for a WholeBatchLoss inside another function.
NUM_PIECES: ContextVar[int] = ContextVar("num_pieces", default=1)


@final
class WholeBatchLoss:
    """A ``loss_fn`` for losses that compare all examples of a batch: in-batch negatives, contrastive losses.

    ``Stepper`` splits the encoding, not the loss, and the gradient is that of the unsplit batch. Every micro-batch is
    encoded and only its encodings are kept; the loss runs once, on the encodings of all examples, and gives their
    gradients; then every micro-batch is encoded again, from the same random state, and these gradients run back through
    it. A batch that fits in one micro-batch is encoded once.

    Args:
        encode: ``encode(model, micro_batch)`` returns a tensor, or a nested dict or tuple of tensors, with one row per
            example. What the loss needs besides, such as labels, is returned as well.
        loss: ``loss(encodings) -> (loss_sum, weight)`` or ``(loss_sum, weight, {name: sum})``, over all examples in
            the order of the batch. It may use parameters of its own, such as a temperature.
        over_ranks: the loss sees the examples of all ranks, in the order of the ranks. Otherwise every rank has a loss
            of its own, and they are summed as any others.

    >>> import torch
    >>> from batchwright.step import Stepper
    >>> model = nn.Linear(4, 2)
    >>> def encode(model, batch):
    ...     return model(batch["text"]), model(batch["image"])
    >>> def loss(encodings):
    ...     texts, images = encodings
    ...     places = torch.arange(len(texts))
    ...     return nn.functional.cross_entropy(texts @ images.T, places, reduction="sum"), len(texts)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> stepper = Stepper(model, optimizer, WholeBatchLoss(encode, loss), micro_batch=3)
    >>> report = stepper.step({"text": torch.randn(8, 4), "image": torch.randn(8, 4)})
    >>> report.batch_size, report.num_micro_batches
    (8, 3)
    """

    batchwright_needs_whole_batch = True  # for those who only know the mark of ``whole_batch``

    def __init__(
        self, encode: Callable[[nn.Module, Any], Any], loss: Callable[[Any], Sums], *, over_ranks: bool = False
    ) -> None:
        for name, value in (("encode", encode), ("loss", loss)):
            if not callable(value):
                raise ArgumentError(f"WholeBatchLoss needs {name} as a function, got {value!r}")
        self.encode, self.loss, self.over_ranks = encode, loss, bool(over_ranks)

    def __call__(self, model: nn.Module, batch: Any) -> Sums:
        """Return the sums of a batch that is run in one piece, without a ``Stepper``."""
        if NUM_PIECES.get() > 1:
            raise ArgumentError(
                f"a function around WholeBatchLoss would give it one of {NUM_PIECES.get()} micro-batches for the "
                "whole batch; give Stepper the WholeBatchLoss itself, or mark the function with whole_batch"
            )
        if self.over_ranks and num_processes() > 1:
            raise ArgumentError(
                "WholeBatchLoss(over_ranks=True) sees only the examples of this rank when it is called by hand; give "
                "it to a Stepper, or call one with over_ranks=False"
            )
        return self.loss(self.encode(model, batch))


def modules_of(loss_fn: Any) -> list[nn.Module]:
    """Return the modules that a ``WholeBatchLoss`` was made of; they may have buffers, such as a queue."""
    parts = (loss_fn.encode, loss_fn.loss) if isinstance(loss_fn, WholeBatchLoss) else ()
    return [part for part in parts if isinstance(part, nn.Module)]


def num_processes() -> int:
    """Return how many processes torch knows of."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
