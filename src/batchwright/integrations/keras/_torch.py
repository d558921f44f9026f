"""The torch engine: pieces run eagerly, and their gradients add up one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from keras import ops

from ..._oom import is_out_of_memory
from ._losses import weight_losses
from ._parts import AddedKind, Figures, Layout, forward, log_losses, state_variables
from ._pieces import as_array


@final
class TorchEngine:
    """Runs pieces and updates of a compiled model on torch.

    Attributes:
        num_traces: 0, since nothing is traced.
    """

    num_traces = 0

    def __init__(self, model: Any, kinds: Sequence[AddedKind] | None = None) -> None:
        self._model = model
        self._kinds = kinds
        self._layout: Layout | None = None

    def next_batch(self, data: Any) -> Any:
        """Return the batch that Keras hands over in a list."""
        return data[0]

    def state(self) -> list[Any]:
        """Return copies of what a piece changes besides gradients: metrics, seeds, statistics, torch's own streams."""
        kept = [tensor.detach().clone() for tensor in self._tensors()]
        streams = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return [torch.get_rng_state(), streams, kept]

    def restore(self, state: Sequence[Any]) -> None:
        """Put back what ``state`` returned."""
        stream, streams, kept = state
        torch.set_rng_state(stream)
        if streams:
            torch.cuda.set_rng_state_all(streams)
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), kept, strict=True):
                tensor.copy_(value)

    def _tensors(self) -> list[torch.Tensor]:
        values = [variable.value for variable in state_variables(self._model)]
        return list({id(tensor): tensor for tensor in [*values, *self._model.buffers()]}.values())

    def values(self, state: Sequence[Any]) -> list[Any]:
        """Return a state as arrays, one per variable that a forward pass may change."""
        return [as_array(tensor) for tensor in state[2][: len(state_variables(self._model))]]

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is kept for gradients."""
        return torch.no_grad()

    def run(self, piece: Any, num_examples: int) -> tuple[Any, Figures]:
        """Return the gradients of a piece and its figures."""
        found = forward(self._model, piece, float(num_examples), self._kinds)
        self._layout = found.layout
        last = len(found.objectives) - 1
        gradients = [
            self._gradients(self._model.optimizer.scale_loss(value), keep=place < last)
            for place, value in enumerate(found.objectives)
        ]
        shown, weights = ([value.detach() for value in values] for values in found.figures[:2])
        added = found.figures.added
        return gradients, Figures(shown, weights, None if added is None else added.detach())

    def _gradients(self, objective: Any, *, keep: bool = False) -> list[Any]:
        tensors = [weight.value for weight in self._model.trainable_weights]
        if not objective.requires_grad:
            return [None] * len(tensors)
        return list(torch.autograd.grad(objective, tensors, allow_unused=True, retain_graph=keep))

    def add(self, before: tuple[Any, Figures] | None, part: tuple[Any, Figures]) -> tuple[Any, Figures]:
        """Return the sum of the pieces so far."""
        if before is None:
            return part
        (gradients, figures), (more, new) = before, part
        for sums, grads in zip(gradients, more, strict=True):
            for place, grad in enumerate(grads):
                sums[place], grads[place] = _sum_of(sums[place], grad), None
        added = None if new.added is None else figures.added + new.added
        shown, weights = (
            [a + b for a, b in zip(*both, strict=True)] for both in zip(figures[:2], new[:2], strict=True)
        )
        return gradients, Figures(shown, weights, added)

    def finish(self, total: tuple[Any, Figures], num_examples: int) -> Any:
        """Apply one update from the sum of all pieces, and return the logs."""
        model, layout, (gradients, figures) = self._model, self._layout, total
        assert layout is not None
        weights = model.trainable_weights[:]
        found = weight_losses(model)
        of_weights = sum(found) if found else None
        more = [None] * len(weights) if of_weights is None else self._gradients(model.optimizer.scale_loss(of_weights))
        with torch.no_grad():
            grads = _combined(gradients, layout.divisors(figures.weights), more)
            typed = [
                None if grad is None else grad.to(weight.value.dtype)
                for grad, weight in zip(grads, weights, strict=True)
            ]
            model.optimizer.apply(typed, weights)
            known = None if of_weights is None else of_weights.detach()
            return log_losses(model, layout, figures, known, num_examples)


def _combined(gradients: Sequence[Sequence[Any]], divisors: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Return one gradient per weight: those of all objectives divided, and one more added; None where all are None."""
    found: list[Any] = list(more)
    for grads, divisor in zip(gradients, divisors, strict=True):
        for place, grad in enumerate(grads):
            if grad is not None:
                part = grad if divisor is None else ops.divide_no_nan(grad, ops.cast(divisor, grad.dtype))
                found[place] = part if found[place] is None else found[place] + ops.cast(part, found[place].dtype)
    return found


def _sum_of(before: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if before is None or more is None:
        return more if before is None else before
    wide = before.float() if before.dtype in (torch.float16, torch.bfloat16) else before
    return wide + more.to(wide.dtype)  # not in place: gradients of two weights may be one tensor


def ran_out(error: BaseException) -> bool:
    """Say whether memory ran out."""
    return is_out_of_memory(error)


def refusals(model: Any) -> list[str]:
    """Return what torch's part of a model has that pieces of a batch cannot keep exact."""
    if model.jit_compile is True:
        return ["pieces run eagerly on torch; pass jit_compile=False to compile()"]
    return []
