"""A device of a chosen size on a processor: the bytes are those that backward really keeps, the cap is made up."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..step.losses import LossFunction, Sums


@final
class ActivationMemory:
    """Counts the bytes of activations that a micro-batch keeps for its backward pass, and says how many fit.

    Processors have no device memory to run out of, and the resident memory of a process does not follow a small model's
    batch. What grows with a batch is what autograd keeps; that is counted here, exactly and alike in every run. The
    size of the memory is simulated: room for ``room`` examples like those of the first micro-batch.

    It is the ``source`` of a ``MemoryMonitor``.

    Args:
        room: examples that fit.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._total_bytes: int | None = None
        self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Return 0: between updates nothing is kept."""
        return 0

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of the largest micro-batch since ``reset_peak``."""
        return self._peak_bytes

    @property
    def total_bytes(self) -> int:
        """Return the size of the memory; before the first micro-batch 1, so that there is something to divide by."""
        return self._total_bytes or 1

    def reset_peak(self) -> None:
        """Forget the micro-batches so far."""
        self._peak_bytes = 0

    def watch(self, loss_fn: LossFunction) -> LossFunction:
        """Return the loss function, counted; its batches are ``(inputs, targets)``."""

        def watched(model: nn.Module, batch: Any) -> Sums:
            # Parameters are there anyway; of views that share memory only one counts.
            parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            kept: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in parameters:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            with saved_tensors_hooks(pack, _same):
                sums = loss_fn(model, batch)
            self._add(sum(kept.values()), num_items=len(batch[1]))
            return sums

        return watched

    def _add(self, num_bytes: int, *, num_items: int) -> None:
        if self._total_bytes is None:
            self._total_bytes = max(1, round(self._room * num_bytes / num_items))
        self._peak_bytes = max(self._peak_bytes, num_bytes)


def _same(tensor: Tensor) -> Tensor:
    return tensor
