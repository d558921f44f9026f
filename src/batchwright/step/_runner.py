"""The micro-batches of a logical batch, run again and smaller until they fit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._ranks import Ranks
from ..errors import ArgumentError, DoesNotFitError
from ._settings import Settings
from ._split import LogicalBatch, Part, cost_of, split
from ._sums import MicroSums, Pending, Totals
from ._tree import leaves
from .losses import needs_whole_batch
from .memory.budget_tracker import Feedback
from .noise import GradientNorms
from .oom import Buffers, MicroLimit, Snapshot, devices_of, drop_gradients, free_memory, is_out_of_memory

Parts = list[Part]
_Failure = tuple[float, Part]  # cost and examples of the micro-batch that did not fit


@final
class Runner:
    """Runs forward and backward of every micro-batch and remembers how large one may be."""

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        parameters: Sequence[nn.Parameter],
        *,
        norms: GradientNorms | None,
        feedback: Feedback | None,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._parameters = parameters
        self._device = parameters[0].device
        self._devices = devices_of(ranks.module)
        self._buffers = Buffers(ranks.module)
        self._norms = norms
        self._feedback = feedback
        self._warned = False
        self.limit = MicroLimit()

    def run(self, logical: LogicalBatch, pending: Pending, *, noise_seed: int | None) -> Totals:
        """Add the gradient of a logical batch to ``.grad`` and return its sums.

        Args:
            logical: the batch.
            pending: the update it belongs to.
            noise_seed: of the random subsets that noise is measured on; None measures none.
        """
        snapshot = Snapshot(self._buffers, self._devices)
        if self._feedback is not None:
            self._feedback.begin()
        while True:
            parts = self._cut(logical, noise_seed)
            self._check(parts)
            outcome = self._attempt(logical, parts, pending, measure=noise_seed is not None)
            if isinstance(outcome, Totals):
                self._learn(logical, parts)
                return outcome
            pending.ooms += 1
            self._recover(snapshot, outcome, logical)

    def _cut(self, logical: LogicalBatch, seed: int | None) -> Parts:
        order = None
        if seed is not None:
            # Length-sorted parts are no random samples: their gradients differ by more than noise.
            order = np.random.default_rng([seed]).permutation(logical.num_examples)
        factor = 1.0 if self._feedback is None else self._feedback.factor
        return split(
            logical,
            budget=self._settings.cost_budget,
            limit=min(self._settings.asked * factor, self.limit.ceiling),
            order=order,
            least_parts=1 if seed is None or self._ranks.world_size > 1 else 2,
        )

    def _check(self, parts: Parts) -> None:
        check_split(self._settings.loss_fn, parts)
        if len(parts) > 1 and not self._warned:
            self._warned = True
            warning = batch_norm_warning(self._ranks.module)
            if warning is not None:
                warnings.warn(warning, stacklevel=5)

    def _attempt(self, logical: LogicalBatch, parts: Parts, pending: Pending, *, measure: bool) -> Totals | _Failure:
        """Run all micro-batches; return their sums, or the micro-batch that ran out of memory."""
        totals = Totals()
        part: Part = []
        try:
            num_parts = self._ranks.agree_on_parts(len(parts), self._device)
            micro_batches = iter(logical.take_all(parts))
            with self._ranks.no_sync():
                for part in parts:
                    sums = self._forward(next(micro_batches))  # no name of its own: it shall not outlive the forward
                    divisor = pending.divide_by(sums.weight, len(part), logical.num_examples)
                    self._backward(sums, divisor, num_measured=len(part) if measure else 0)
                    totals.add(sums, len(part))
                # Under FSDP2 a rank that is done helps the others with micro-batches that count for nothing.
                for _ in range(num_parts - len(parts)):
                    self._backward(self._forward(logical.take(parts[-1])), math.inf)
            return totals
        except Exception as error:
            # A rank of FSDP2 cannot try again alone: the others wait for it inside their forward.
            if self._settings.on_oom == "raise" or self._ranks.is_sharded or not is_out_of_memory(error):
                raise
        # Outside the except block: the traceback is gone, and with it the activations it held.
        return cost_of(logical, part, self._settings.cost_budget), part

    def _forward(self, micro_batch: Any) -> MicroSums:
        with self._settings.precision(self._device):
            return MicroSums(self._settings.loss_fn(self._ranks.module, micro_batch))

    def _backward(self, sums: MicroSums, divisor: float, *, num_measured: int = 0) -> None:
        loss: torch.Tensor = sums.loss / divisor
        if self._settings.scaler is not None:
            loss = self._settings.scaler.scale(loss)
        if self._norms is None or num_measured == 0:
            loss.backward()
            return
        self._norms.begin()
        loss.backward()
        self._norms.end(num_measured)

    def _learn(self, logical: LogicalBatch, parts: Parts) -> None:
        if math.isfinite(self.limit.ceiling):
            largest = max(cost_of(logical, part, self._settings.cost_budget) for part in parts)
            self.limit = self.limit.after_success(largest)
        if self._feedback is not None and logical.lengths is not None:
            self._feedback.end([(len(part), *logical.lengths[part].max(axis=0).tolist()) for part in parts])

    def _recover(self, snapshot: Snapshot, failure: _Failure, logical: LogicalBatch) -> None:
        """Undo a failed attempt and lower the ceiling, or say that one example does not fit."""
        cost, part = failure
        drop_gradients(self._parameters)
        if self._norms is not None:
            self._norms.reset()
        snapshot.restore()
        free_memory(self._devices)
        if len(part) == 1:
            raise DoesNotFitError(does_not_fit(logical, part[0], self._device))
        self.limit = self.limit.after_failure(cost)


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
